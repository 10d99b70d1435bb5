"""Waits fit the length of a run, and nothing is left of a seed that came too late."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import esper
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.signals import TrackerConfig
from esper.lab.tasks import get_task
from esper.lab.tasks.request import task_config, task_run
from esper.leyline.controller import pace, shortened
from esper.leyline.errors import EsperWarning
from esper.leyline.stages import SeedStage
from tests.plots import EAGER, Script, germinate


def batches(seed: int = 0, count: int = 4) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(32, 6, generator=draw) for _ in range(count)]
    return [(x, (x[:, 0] * x[:, 1] > 0).long()) for x in inputs]


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))


def test_durations_are_as_written_from_sixty_epochs_on() -> None:
    for horizon in (60, 61, 150):
        assert pace(horizon) == 1
        assert [shortened(n, horizon) for n in (0, 1, 5, 10)] == [0, 1, 5, 10]
        assert LifecycleConfig().fitted(horizon) == LifecycleConfig()
        assert TrackerConfig().fitted(horizon) == TrackerConfig()
    assert [shortened(n, 10) for n in (0, 1, 3, 5, 10)] == [0, 1, 1, 1, 2]
    assert shortened(10, 30) == 5


def test_a_seed_is_inert_until_its_training_ends() -> None:
    assert LifecycleConfig().inert_epochs == 11
    assert LifecycleConfig(auto_training=True).inert_epochs == 10


def test_a_host_settles_once_its_losses_are_known() -> None:
    assert TrackerConfig().settling_epochs == 6
    assert TrackerConfig(stable_epochs=0).settling_epochs == 1


@pytest.mark.filterwarnings("ignore:A static network of the same size")
def test_something_grows_in_ten_epochs() -> None:
    grown = esper.grow(
        net(4),
        ["1"],
        train=batches(),
        val=batches(1),
        epochs=10,
        optimizer=partial(SGD, lr=0.1, momentum=0.9),
        controller="heuristic",
        keep="last",
    )
    assert grown.why == ()
    (seed,) = grown.summary.seeds
    assert seed.fate in ("blending", "holding", "fossilized")
    assert grown.model.slots["1"].alpha == 1.0
    assert grown.summary.parameters_after > grown.summary.parameters_before


def test_the_learned_controller_grows_in_twelve_epochs() -> None:
    task = get_task("digits")
    data, whole = task.load(), []
    for number in range(2):
        config = task_config(task, epochs=12, seed=number, twin=False, keep="last")
        with warnings.catch_warnings():
            warnings.simplefilter("error", EsperWarning)
            run = task_run(task, data, config=config)
        *_, last = run.epochs()
        grown = run.finish()
        assert run.controller_name == "tamiyo"
        assert last.parameters == grown.summary.parameters_after
        # The limits it learned under are kept where nobody gave any.
        before = grown.summary.parameters_before
        assert before <= grown.summary.parameters_after <= 2 * before
        fates = [seed.fate for seed in grown.summary.seeds]
        whole.append(grown.why == () and fates[:1] in (["holding"], ["fossilized"]))
    # Which epoch it begins in depends on the last bits of what it sees: one of the two is enough.
    assert any(whole)


def test_a_run_that_is_too_short_says_so_at_its_start() -> None:
    def run(epochs: int, controller: Any = "heuristic") -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            esper.grow(
                net(), ["1"], train=batches(), val=batches(1), epochs=epochs, controller=controller
            )
        return [str(one.message) for one in told if issubclass(one.category, EsperWarning)]

    first = run(4)[0]
    assert first.startswith("4 epochs are too few to grow in")
    assert "train for 7 or more" in first
    assert not any("too few to grow in" in line for line in run(8))
    # Who does not wait for the host to settle needs less, and who only waits nothing.
    assert not any("too few to grow in" in line for line in run(4, "random"))
    assert run(2, "wait") == []


def test_a_frozen_network_gets_adapters_in_a_run_of_three_epochs() -> None:
    model = net()
    model.requires_grad_(False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        grown = esper.grow(
            model,
            ["1"],
            train=batches(count=40),
            val=batches(1),
            epochs=3,
            optimizer=partial(SGD, lr=0.1, momentum=0.9),
            keep="last",
            max_growth=9.0,
        )
    lines = [str(one.message) for one in told]
    assert any("0 parameters of its host train" in line for line in lines)
    assert not any("to grow in" in line for line in lines), lines
    decision = grown.history[0].decision
    assert decision is not None
    assert (decision.op, decision.style, decision.tempo) == ("GERMINATE", None, 0)
    (seed,) = grown.summary.seeds
    assert (seed.germinated, seed.fate) == (1, "holding")


def test_a_seed_that_is_still_inert_at_the_end_is_not_part_of_the_result() -> None:
    config = esper.GrowthConfig(garden=EAGER, epochs=4)
    with pytest.warns(EsperWarning, match="was not yet blended in when the run ended"):
        grown = esper.grow(
            net(),
            ["1"],
            train=batches(),
            val=batches(1),
            controller=Script({3: germinate()}),
            config=config,
        )
    (seed,) = grown.summary.seeds
    assert (seed.fate, seed.ended) == ("dropped", 4)
    assert grown.summary.parameters_after == grown.summary.parameters_before
    assert grown.model.slots["1"].stage is SeedStage.DORMANT
    assert list(grown.model.slot_parameters("1")) == []
    assert not grown.contributions.leave_one_out


def test_dropping_leaves_what_is_blended_and_every_output() -> None:
    x = torch.randn(5, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    garden = esper.Garden(model, ["1", "2"], x, config=EAGER)
    assert garden.germinate("1", "mlp_small", tempo=1, style="linear_add")
    assert garden.advance("1")
    assert garden.advance("1")
    garden.tick()
    with torch.no_grad():
        for parameter in garden.slot_parameters("1"):
            parameter += 0.1
    assert garden.germinate("2", "norm")
    before = garden(x)
    parameters = garden.count_parameters()
    assert garden.drop_inert() == ("2",)
    assert torch.equal(garden(x), before)
    assert garden.count_parameters() < parameters
    assert garden.slots["1"].stage is SeedStage.BLENDING
    assert garden.drop_inert() == ()
