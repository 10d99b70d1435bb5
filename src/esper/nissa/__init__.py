"""Nissa, the telemetry: it writes down what happened in a run, for people and programs to read.

`open_store` is for what runs, `open_run` and `query_run` for whoever asks afterwards. Everything
recorded is declared in `schema`; `monitors` raise alarms on it and `sinks` show it elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper._lazy import find_in

if TYPE_CHECKING:
    from esper.nissa.database import StoreError
    from esper.nissa.history import read_history
    from esper.nissa.listing import find_runs
    from esper.nissa.query import query_run
    from esper.nissa.reader import open_run
    from esper.nissa.schema import EventKind, RunRow
    from esper.nissa.sinks import register_sink
    from esper.nissa.store import RunStore, open_store

__all__ = [
    "EventKind",
    "RunRow",
    "RunStore",
    "StoreError",
    "find_runs",
    "open_run",
    "open_store",
    "query_run",
    "read_history",
    "register_sink",
]

_HOMES = {
    "EventKind": "esper.nissa.schema",
    "RunRow": "esper.nissa.schema",
    "RunStore": "esper.nissa.store",
    "StoreError": "esper.nissa.database",
    "find_runs": "esper.nissa.listing",
    "open_run": "esper.nissa.reader",
    "open_store": "esper.nissa.store",
    "query_run": "esper.nissa.query",
    "read_history": "esper.nissa.history",
    "register_sink": "esper.nissa.sinks",
}

__getattr__ = find_in(__name__, _HOMES)
