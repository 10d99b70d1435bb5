from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import esper
from esper.leyline.actions import HEAD_NAMES
from esper.nissa import schema
from esper.nissa.columns import TABLES, VIEWS, Table

SOURCE = Path(esper.__file__).parent

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
    "stacks",
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


def test_a_view_unfolds_a_json_column_of_a_table() -> None:
    for view in VIEWS.values():
        assert TABLES[view.table].column(view.column).is_json
        assert view.name not in TABLES
        assert view.meaning.endswith(".")


def test_every_kind_of_event_is_its_own_name_in_lower_case_and_is_emitted() -> None:
    # A report only reads events.
    writers = [path for path in SOURCE.rglob("*.py") if "report" not in path.parts]
    source = "".join(path.read_text(encoding="utf-8") for path in writers)
    for kind in schema.EventKind:
        assert kind == kind.name.lower()
        emitted = re.findall(rf"EventKind\.{kind.name}\b", source)
        assert emitted, f"nothing emits {kind.name}; emit it or delete it"


def test_the_version_is_a_whole_number() -> None:
    assert isinstance(schema.SCHEMA_VERSION, int)
    assert schema.SCHEMA_VERSION >= 1
