from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.nissa.database import connect_writer, create_database


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """The writer's connection to a store that holds nothing yet, `run.db` of `tmp_path`."""
    create_database(tmp_path / "run.db", lambda made: None)
    opened = connect_writer(tmp_path / "run.db")
    yield opened
    opened.close()


class Clock:
    """Stands in for the module `time` of a module under test; a test sets it forward."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()
