from __future__ import annotations

from pathlib import Path

import pytest

from esper.kasmina.hosts import BuiltInSeed
from esper.lab.proof.results import ResultFile
from esper.leyline.errors import CheckpointError
from tests.lab.proof.made_up import result


def test_what_was_added_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results = [result("a", "m", [0.1, 0.2]), result("b", "m", [0.3, 0.2])]
    ResultFile(path).add(results)
    again = ResultFile(path)
    assert list(again) == results
    assert ("proof", "a", "m") in again
    assert ("rates", "a", "m") not in again
    assert again.get(("proof", "b", "m")).test_errors == [0.3, 0.2]
    assert again.of("rates") == []
    assert results[0].architectures()[0] == (
        BuiltInSeed(slot="r0c0", blueprint="norm", channels=2, algorithm="ADD"),
    )


def test_a_line_that_was_broken_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ResultFile(path).add([result("a", "m", [0.1])])
    whole = path.read_text()
    path.write_text(whole + '{"purpose": "proof", "arm": "b", "mem')
    assert len(list(ResultFile(path))) == 1
    assert path.read_text() == whole


def test_a_line_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"arm": "a"}\n')
    with pytest.raises(CheckpointError, match="line 1 is not a result of this version"):
        ResultFile(path)
