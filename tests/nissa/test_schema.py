from __future__ import annotations

import dataclasses
import re

import pytest

from esper.leyline.actions import HEAD_NAMES
from esper.nissa import schema
from esper.nissa.columns import TABLES, Table

PROMISED = [
    "runs",
    "rounds",
    "updates",
    "update_heads",
    "episodes",
    "epochs",
    "decisions",
    "seeds",
    "seed_stages",
    "contributions",
    "alarms",
    "events",
]


def test_the_promised_tables_are_there_in_order() -> None:
    assert list(TABLES) == PROMISED


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_every_column_is_explained(table: Table) -> None:
    assert table.meaning.endswith(".")
    for column in table.columns:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", column.name)
        assert column.meaning.endswith("."), column
        if column.name == "time" or column.unit.endswith("/s"):
            assert column.is_volatile, column
        if column.name.endswith(("_bytes", "memory_share", "seconds", "wait_s")):
            assert column.is_volatile, column
        # A key identifies a row in every identical run.
        assert not (column.is_key and column.is_volatile), column


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_records_are_frozen_and_empty_by_default(table: Table) -> None:
    record = table.record()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, table.names[0], 3)
    absent = [c for c in table.columns if not c.is_required]
    assert all(getattr(record, c.name) is None for c in absent)


def test_keys_are_round_row_step_and_ordinal() -> None:
    allowed = {"round", "row", "step", "ordinal", "head", "volatile"}
    for table in TABLES.values():
        assert set(table.key) <= allowed
        assert table.key or table.name == "runs"


def test_every_head_has_its_columns_in_a_decision() -> None:
    names = TABLES["decisions"].names
    for head in HEAD_NAMES:
        assert {head, f"valid_{head}", f"confidence_{head}"} <= set(names)


def test_every_term_of_the_reward_has_a_column() -> None:
    terms = [
        "gain",
        "attribution",
        "blending",
        "holding",
        "pbrs",
        "synergy",
        "rent",
        "shock",
        "occupancy",
        "first_germination",
        "action",
        "terminal",
        "escrow",
        "clawback",
        "auto_prune",
        "hindsight",
        "rollback",
    ]
    assert {f"reward_{term}" for term in terms} <= set(TABLES["decisions"].names)
    assert "shaped_reward_ratio" in TABLES["decisions"].names


def test_the_version_is_a_whole_number() -> None:
    assert isinstance(schema.SCHEMA_VERSION, int)
    assert schema.SCHEMA_VERSION >= 1
