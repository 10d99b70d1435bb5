"""Growing one network within a budget of compute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import esper
from esper.growth.batches import BatchStream
from esper.growth.budget import BudgetedBatches
from esper.growth.config import GrowthConfig
from esper.leyline.errors import ConfigError, UsageError
from tests.plots import same

pytestmark = pytest.mark.filterwarnings("ignore::esper.EsperWarning")

EPOCHS, TRAIN, VAL, BATCH = 12, 45, 20, 10
PLAN = "- {epoch: 3, op: grow, slot: '2', blueprint: mlp_small}\n"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )


def batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=draw)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return f"schedule:{path}"


def grow(controller: str, **changes: Any) -> Any:
    given = {"train": batches(TRAIN, 1), "val": batches(VAL, 2), "epochs": EPOCHS, "budget": "3x"}
    given["keep"] = "last"
    return esper.grow(model(), ["2"], controller=controller, **given | changes)


def test_a_grown_network_takes_fewer_steps_and_spends_the_same(plan: str) -> None:
    grown, waited = grow(plan, twin=True), grow("wait")
    host = grown.summary.flops_before
    budget = int(3 * EPOCHS * host * (3 * TRAIN + VAL))
    for run in (grown, waited):
        summary, spent = run.summary, [record.training_flops for record in run.history]
        assert summary.compute_budget == budget
        assert summary.training_flops == spent[-1]
        assert 0 <= budget - spent[-1] < 3 * BATCH * run.history[-1].flops
        assert spent == sorted(set(spent))
        assert f"{spent[-1]:.4g} of {budget:.4g} training FLOPs" in repr(run)
    assert grown.history[-1].flops > host
    # The twin has as much to spend: it is the network that only waits.
    assert grown.summary.twin_val_score == waited.summary.val_score
    assert same(dict(grown.twin.state_dict()), dict(waited.model.model.state_dict()))


def test_once_the_host_is_a_run_without_a_budget() -> None:
    train = batches(40, 1)
    plain, within = (grow("wait", train=train, budget=budget) for budget in (None, "1x"))
    assert same(dict(plain.model.state_dict()), dict(within.model.state_dict()))
    assert plain.summary.training_flops is None
    assert "training FLOPs" not in repr(plain)


def test_a_run_that_is_continued_is_one_that_was_not_interrupted(plan: str, tmp_path: Path) -> None:
    whole = grow(plan, twin=True, out=tmp_path / "whole", sinks=())

    class Stop(Exception):
        """Ends a run in the middle."""

    def stop(record: Any) -> None:
        if record.epoch == 7:
            raise Stop

    with pytest.raises(Stop):
        grow(plan, twin=True, out=tmp_path / "parts", sinks=(), on_epoch=stop)
    parts = grow(plan, twin=True, out=tmp_path / "parts", sinks=(), resume=True)
    assert same(dict(whole.model.state_dict()), dict(parts.model.state_dict()))
    assert same(dict(whole.twin.state_dict()), dict(parts.twin.state_dict()))
    told = [[record.training_flops for record in run.history] for run in (whole, parts)]
    assert told[0] == told[1]
    page = (tmp_path / "parts" / "report.html").read_text()
    assert "of the budget of" in page


def test_shares_are_read_on_where_the_last_ended_and_can_be_read_again() -> None:
    class Passes:
        """Three batches, which are others in every pass."""

        def __init__(self) -> None:
            self.number = 0

        def set_epoch(self, epoch: int) -> None:
            self.number = epoch

        def __iter__(self) -> Iterator[Any]:
            yield from (torch.full((2,), 10 * self.number + place) for place in range(3))

    read = BudgetedBatches(Passes())

    def numbers(share: Iterator[Any]) -> list[int]:
        return [int(batch[0]) for batch in share]

    # A step of two samples costs 3 x 2 x 5 = 30.
    assert numbers(read.share(65, 5)) == [10, 11]
    assert read.samples == 4
    assert numbers(read.share(120, 5)) == [12, 20, 21, 22]
    other = read.fork()
    assert numbers(read.share(-10, 5)) == [30], "one step at least"
    assert numbers(read.again()) == [30]
    assert numbers(other.share(60, 5)) == [30, 31]
    again = BudgetedBatches(Passes())
    again.load_state_dict(other.state_dict())
    assert numbers(again.again()) == [30, 31]
    assert numbers(again.share(30, 5)) == [32]
    with pytest.raises(UsageError, match="cannot be resumed"):
        BatchStream(iter([torch.ones(1)])).seek(1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"budget": "much"}, "budget must be a number of FLOPs"),
        ({"budget": 1000}, "too small for 12 epochs"),
        ({"decide_every": 2}, "budget does not go together with decide_every"),
        ({"rewarm": 3}, "budget does not go together with rewarm"),
        (
            {
                "optimizer": torch.optim.SGD,
                "scheduler": lambda of: StepLR(of, 3),
                "scheduler_every": "batch",
            },
            "step the scheduler every epoch",
        ),
    ],
)
def test_what_a_budget_does_not_go_with_is_refused(changes: Any, reason: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=reason):
        grow("wait", **changes)


def test_a_multiple_needs_to_know_how_long_an_epoch_is() -> None:
    class Unsized:
        def __iter__(self) -> Iterator[Any]:
            return iter(batches(TRAIN, 1))

    with pytest.raises(UsageError, match="give a number of FLOPs"):
        grow("wait", train=Unsized())
    assert grow("wait", train=Unsized(), budget=5e6, epochs=4).summary.training_flops < 5e6


def test_the_setting_is_read_and_written() -> None:
    config = GrowthConfig(budget="2X")
    assert config.budget == "2x"
    assert GrowthConfig.from_mapping(config.to_mapping()) == config
