"""Arms of the adapter measurement have equal budgets, and train what they say they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.adapters import training
from benchmarks.adapters.cases import CASES, load_base
from benchmarks.adapters.models import MobileNet
from benchmarks.adapters.training import Bench, Job, budget_of, train
from esper.growth.adapters.finding import find_weights


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """The robot arm before it was trained at all: no data is needed, and no time."""
    torch.save(CASES["arm"].make().state_dict(), tmp_path / "arm.pt")
    return Bench(tmp_path, tmp_path)


@pytest.mark.parametrize("arm", ["esper", "placed", "uniform", "full"])
def test_every_arm_trains_within_its_parameters(arm: str, bench: Bench) -> None:
    record = train(Job("arm", arm, 0.01, 0), bench, steps=20)
    assert record["score"] > record["before"]
    assert record["budget"] == 2 * (6 + 96 + 3 * 192 + 98)
    if arm == "full":
        assert record["parameters"] == sum(p.numel() for p in CASES["arm"].make().parameters())
    else:
        assert 0.8 * record["budget"] < record["parameters"] <= record["budget"]
    assert len(record["curve"]) == 10


def test_runs_are_the_same_again_and_differ_by_seed(bench: Bench) -> None:
    def strip(record: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in record.items() if key not in ("seconds", "name")}

    one, again, other = (
        strip(train(Job("arm", "esper", 0.01, seed), bench, steps=12)) for seed in (0, 0, 1)
    )
    assert one == again
    assert one["score"] != other["score"]


def test_networks_are_trained_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    case = replace(CASES["arm"], pretraining=5)
    first = load_base(case, tmp_path, tmp_path)
    monkeypatch.setattr(torch.optim, "AdamW", None)
    for name, value in load_base(case, tmp_path, tmp_path).items():
        assert torch.equal(value, first[name])


def test_mobilenet_has_the_weights_of_the_package_and_a_new_head() -> None:
    network = MobileNet(10)
    assert sum(p.numel() for p in network.features.parameters()) == 2_223_872
    names = training._uniform_weights(CASES["mobilenet"], network)
    assert len(names) == 35
    assert len(find_weights(network, ["head"]).weights) == 52
    assert budget_of(CASES["mobilenet"], network) == 2 * sum(
        w.shape[0] + w[0].numel() for w in names.values()
    )
