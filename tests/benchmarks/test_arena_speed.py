"""The benchmark of growing networks on an arena of depth: all kinds spend the same compute."""

from __future__ import annotations

import json

import pytest

from benchmarks import arena_speed
from benchmarks.__main__ import main


@pytest.mark.slow
def test_all_kinds_of_networks_spend_the_same_compute(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--steps", "300", "--members", "1", "--rows", "8", "--device", "cpu", "--json"]
    assert arena_speed.main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    flops = [own["flops_per_s"] * own["seconds"] / own["rows"] for own in found["kinds"].values()]
    assert flops == [pytest.approx(flops[0], rel=0.05)] * 3
    static = [found["kinds"][name]["flops_per_s"] for name in ("never grow", "4 blocks")]
    growing = found["kinds"]["grow"]["flops_per_s"]
    assert found["grow_over_static"] == pytest.approx(2 * growing / sum(static))


def test_a_family_without_a_budget_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena_speed", "--family", "digits_family"]) == 2
    assert "'digits_family' has no budget of compute" in capsys.readouterr().err
