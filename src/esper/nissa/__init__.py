"""Nissa, the telemetry: records what happens in a run and reads it back.

A run records with `open_store`; `open_run` and `query_run` read it. `schema` declares everything
that is recorded, `monitors` raise alarms on it, and `sinks` show it elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.leyline.registry import find_in

if TYPE_CHECKING:
    from esper.nissa.database import StoreError
    from esper.nissa.listing import find_runs
    from esper.nissa.query import query_run
    from esper.nissa.reader import open_run, read_history
    from esper.nissa.schema import EventKind
    from esper.nissa.schema_runs import RunRow
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
    "esper.nissa.database": ("StoreError",),
    "esper.nissa.reader": (
        "read_history",
        "open_run",
    ),
    "esper.nissa.listing": ("find_runs",),
    "esper.nissa.query": ("query_run",),
    "esper.nissa.schema": ("EventKind",),
    "esper.nissa.schema_runs": ("RunRow",),
    "esper.nissa.sinks": ("register_sink",),
    "esper.nissa.store": ("RunStore", "open_store"),
}

__getattr__ = find_in(__name__, _HOMES)
