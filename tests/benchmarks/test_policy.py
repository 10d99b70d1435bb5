from __future__ import annotations

import sys
import time

import pytest

from benchmarks import policy


def test_without_the_reference_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert policy.main(["--rounds", "1"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "[bench]" in said.err
    assert len(said.err.splitlines()) == 1


def test_the_ratio_is_that_of_neighbours() -> None:
    result = policy.compare(
        lambda: time.sleep(0.002),
        lambda: time.sleep(0.02),
        rounds=3,
        repeats=2,
        finish=None,
    )
    assert 3 < result["ratio"] < 15
    assert result["least_ratio"] <= result["ratio"] <= result["greatest_ratio"]
    assert result["esper_ms"] < result["reference_ms"]
