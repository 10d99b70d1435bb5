from __future__ import annotations

from pathlib import Path

import pytest

from esper.nissa.columns import TABLES
from esper.testing.sinks import check_sink, sample_records
from tests.nissa.sinks.test_sink import Remembering


def test_a_good_sink_passes(tmp_path: Path) -> None:
    check_sink(Remembering, tmp_path)


def test_every_kind_of_record_is_tried() -> None:
    kinds = {type(record) for record in sample_records()}
    assert {table.record for table in TABLES.values()} <= kinds


class Talkative(Remembering):
    def mark(self) -> dict[str, object]:
        return {"sink": self}


class Fussy(Remembering):
    def write(self, records: object) -> None:
        raise ValueError("not like this")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (dict, "must be an object with start"),
        (lambda: Remembering, "must be an object with start"),
        (Talkative, "mark\\(\\) must return plain data"),
    ],
)
def test_what_breaks_the_protocol_is_named(tmp_path: Path, factory: object, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_sink(factory, tmp_path)  # type: ignore[arg-type]


def test_what_a_sink_raises_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not like this"):
        check_sink(Fussy, tmp_path)
