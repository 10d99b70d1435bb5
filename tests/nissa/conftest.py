from __future__ import annotations

import sqlite3
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
