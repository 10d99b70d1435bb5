"""The validation benchmark: it measures what it says."""

from __future__ import annotations

import json

import pytest

from benchmarks import validation


def test_both_ways_give_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    assert validation.main(["--images", "24", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["seeds"] for each in found] == list(validation.SEEDS)
    for each in found:
        assert (each["images"], each["configurations"]) == (24, 8)
        assert each["difference"] < 1e-4
        assert each["ratio"] == pytest.approx(each["shared_s"] / each["apart_s"])
