"""Stores as somebody might send them: each does to its reader what no store of Esper does."""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path

_LEVELS = 12


def endless_view(store: Path) -> None:
    """Put a view that never ends in the place of a table."""
    with _changing(store) as change:
        columns = [row[1] for row in change.execute("PRAGMA table_info(epochs)")]
        change.execute("DROP TABLE epochs")
        values = ", ".join(f'n AS "{name}"' for name in columns)
        change.execute(
            "CREATE VIEW epochs AS WITH RECURSIVE counted(n) AS "
            f"(SELECT 1 UNION ALL SELECT n + 1 FROM counted) SELECT {values} FROM counted"
        )


def trigger(store: Path) -> None:
    """Have every change of the run write something else as well."""
    with _changing(store) as change:
        change.execute(
            "CREATE TRIGGER meanwhile AFTER UPDATE ON runs BEGIN DELETE FROM epochs; END"
        )


def dropped_column(store: Path) -> None:
    """Take a column away."""
    with _changing(store) as change:
        change.execute("ALTER TABLE epochs DROP COLUMN val_score")


def deep_text(store: Path) -> None:
    """Nest a value deeper than it can be read."""
    with _changing(store) as change:
        change.execute("UPDATE runs SET slots = ?", ["[" * 100_000 + "]" * 100_000])


def other_type(column: str) -> Callable[[Path], None]:
    """Return what puts a text into a column of numbers, such as 'epochs.val_score'."""
    table, _, name = column.partition(".")

    def alter(store: Path) -> None:
        with _changing(store) as change:
            change.execute(f'UPDATE "{table}" SET "{name}" = \'x\'')

    return alter


def endless_table(store: Path, table: str = "epochs") -> None:
    """Make the pages of a table refer to each other so often that reading it never ends.

    The schema is as it was: only the time that a question takes shows what is wrong.
    """
    with _changing(store) as change:
        size = change.execute("PRAGMA page_size").fetchone()[0]
        root = change.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = ?", [table]
        ).fetchone()[0]
    data = bytearray(store.read_bytes())
    pages = len(data) // size
    # The table as it was moves to a page of its own; the pages above it all point downwards.
    child = pages + 1
    data += data[(root - 1) * size : root * size]
    for level in range(_LEVELS):
        page = _pointing_to(child, size)
        if level == _LEVELS - 1:
            data[(root - 1) * size : root * size] = page
        else:
            data += page
            child += 1
    data[28:32] = struct.pack(">I", len(data) // size)
    store.write_bytes(bytes(data))


def _pointing_to(child: int, size: int) -> bytes:
    """Return an inner page of a table whose every entry leads to the same page."""
    count = (size - 12) // 7 - 1
    cells = struct.pack(">I", child) + b"\x01"
    start = size - count * len(cells)
    header = struct.pack(">BHHHBI", 5, 0, count, start, 0, child)
    pointers = b"".join(struct.pack(">H", start + number * len(cells)) for number in range(count))
    page = header + pointers
    return page + bytes(start - len(page)) + cells * count


BAD_STORES: dict[str, Callable[[Path], None]] = {
    "a view that never ends": endless_view,
    "a table that never ends": endless_table,
    "a trigger": trigger,
    "a column is missing": dropped_column,
    "a deep text": deep_text,
    "a score that is a text": other_type("epochs.val_score"),
    "a time that is a text": other_type("runs.created"),
    "a number of epochs that is a text": other_type("runs.epochs"),
}


class _changing(contextlib.closing[sqlite3.Connection]):
    """A connection to a store; within the block it can be changed, and at its end it is saved."""

    def __init__(self, store: Path) -> None:
        change = sqlite3.connect(store, isolation_level=None)
        # Without a log beside it, the file is all that there is to send.
        change.execute("PRAGMA journal_mode = DELETE")
        super().__init__(change)
