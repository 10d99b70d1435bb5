"""Nissa, the telemetry: it writes down what happened in a run, for people and programs to read.

`open_store` is for what runs, `open_run` and `query_run` for whoever asks afterwards. Everything
recorded is declared in `schema`; `monitors` raise alarms on it and `sinks` show it elsewhere.
"""

from __future__ import annotations

from esper.nissa.database import STORE_FILE, STORE_FILES
from esper.nissa.errors import StoreError
from esper.nissa.events import EventKind
from esper.nissa.growing import read_history, record_epoch
from esper.nissa.listing import RunEntry, find_runs
from esper.nissa.query import QueryResult, query_run
from esper.nissa.reader import StoredRun, open_run
from esper.nissa.schema import RunRow
from esper.nissa.sinks import Sink, check_sink, register_sink
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
    "check_sink",
    "find_runs",
    "open_run",
    "open_store",
    "query_run",
    "read_history",
    "record_epoch",
    "register_sink",
]
