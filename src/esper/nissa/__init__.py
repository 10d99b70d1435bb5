"""Nissa, the telemetry: it writes down what happened in a run, for people and programs to read.

`open_store` is for what runs, `open_run` and `query_run` for whoever asks afterwards. Everything
recorded is declared in `schema`; `monitors` raise alarms on it and `sinks` show it elsewhere.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.nissa.database import STORE_FILE, STORE_FILES, StoreError
    from esper.nissa.history import read_history
    from esper.nissa.listing import RunEntry, find_runs
    from esper.nissa.query import QueryResult, query_run
    from esper.nissa.reader import StoredRun, open_run
    from esper.nissa.schema import EventKind, RunRow
    from esper.nissa.sinks import Sink, register_sink
    from esper.nissa.store import RunStore, open_store

__all__ = [
    "STORE_FILE",
    "STORE_FILES",
    "EventKind",
    "QueryResult",
    "RunEntry",
    "RunRow",
    "RunStore",
    "Sink",
    "StoreError",
    "StoredRun",
    "find_runs",
    "open_run",
    "open_store",
    "query_run",
    "read_history",
    "register_sink",
]

# Loaded when they are first used: whoever reads a run should not wait for what writes one.
_HOMES = {
    "EventKind": "esper.nissa.schema",
    "QueryResult": "esper.nissa.query",
    "RunEntry": "esper.nissa.listing",
    "RunRow": "esper.nissa.schema",
    "RunStore": "esper.nissa.store",
    "STORE_FILE": "esper.nissa.database",
    "STORE_FILES": "esper.nissa.database",
    "Sink": "esper.nissa.sinks",
    "StoreError": "esper.nissa.database",
    "StoredRun": "esper.nissa.reader",
    "find_runs": "esper.nissa.listing",
    "open_run": "esper.nissa.reader",
    "open_store": "esper.nissa.store",
    "query_run": "esper.nissa.query",
    "read_history": "esper.nissa.history",
    "register_sink": "esper.nissa.sinks",
}


def __getattr__(name: str) -> Any:
    """Find a public name in the module that defines it."""
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
