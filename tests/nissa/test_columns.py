from __future__ import annotations

import json
import math
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.nissa.columns import (
    TABLE_OF,
    TABLES,
    Row,
    column,
    key,
    plain_data,
    plain_value,
    storable_text,
    table,
)


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> type[Row]:
    """A table of our own, forgotten afterwards."""
    monkeypatch.setitem(TABLES, "samples", None)
    del TABLES["samples"]

    @table("samples", "Things.", indexes=(("name",),), numbered=True)
    class SampleRow(Row):
        step: int = key("When.")
        ordinal: int | None = key("Which.", default=None)
        name: str | None = column("", "What.")
        share: float | None = column("share", "How much.", volatile=True)
        is_good: bool = column("", "Whether.", default=False)
        data: dict[str, Any] | None = column("", "More.")

    monkeypatch.setitem(TABLE_OF, SampleRow, TABLE_OF.pop(SampleRow))
    return SampleRow


def test_a_record_class_declares_a_table(sample: type[Row]) -> None:
    made = TABLES["samples"]
    assert made is TABLE_OF[sample]
    assert made.names == ("step", "ordinal", "name", "share", "is_good", "data")
    assert made.key == ("step", "ordinal")
    assert [c.sql for c in made.columns] == [
        "INTEGER",
        "INTEGER",
        "TEXT",
        "REAL",
        "INTEGER",
        "TEXT",
    ]
    assert [c.is_required for c in made.columns] == [True, True, False, False, True, False]
    assert [c.name for c in made.columns if c.is_volatile] == ["share"]
    assert [c.name for c in made.columns if c.is_flag] == ["is_good"]
    assert [c.name for c in made.columns if c.is_json] == ["data"]
    assert made.column("step").declaration == '"step" INTEGER NOT NULL'
    assert made.values(sample(step=3)) == (3, None, None, None, False, None)  # type: ignore[call-arg]
    assert made.stored_as == "samples"


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (None, None),
        (True, 1),
        (3, 3),
        (0.5, 0.5),
        (math.nan, None),
        (math.inf, math.inf),
        ("text", "text"),
        ("bytes \udcff", "bytes \\udcff"),
        (Path("a/b"), "a/b"),
        (Colour.RED, "RED"),
        (np.int64(4), 4),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1),
        (torch.tensor(2), 2),
        (torch.tensor(math.nan), None),
    ],
)
def test_values_become_sqlites_own(sample: type[Row], value: Any, kept: Any) -> None:
    assert plain_value(value, TABLES["samples"].column("name")) == kept


@pytest.mark.parametrize("value", [object(), [1], {"a": 1}, torch.zeros(2), b"x", 1j])
def test_other_values_are_refused(sample: type[Row], value: Any) -> None:
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        plain_value(value, TABLES["samples"].column("name"))


def test_plain_data_is_strict_json(sample: type[Row]) -> None:
    data = {"a": (1, 2.5, math.nan, math.inf), 3: {"b": Colour.RED, "c": Path("x")}, "d": {7}}
    plain = plain_data(data)
    assert plain == {"a": [1, 2.5, None, None], "3": {"b": "RED", "c": "x"}, "d": [7]}
    json.dumps(plain, allow_nan=False)
    stored = plain_value({"b": 1, "a": "\udcff"}, TABLES["samples"].column("data"))
    assert json.loads(stored) == {"b": 1, "a": "\udcff"}


@given(st.text(st.characters()))
def test_text_is_always_storable_and_valid_text_stays(text: str) -> None:
    stored = storable_text(text)
    stored.encode("utf-8")
    if all(not 0xD800 <= ord(c) <= 0xDFFF for c in text):
        assert stored == text
