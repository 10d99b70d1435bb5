"""Which strategy runs, and why it says it does."""

from __future__ import annotations

import logging

import pytest
import torch

from esper.leyline.errors import EsperWarning, UsageError
from esper.population.config import PopulationConfig, Strategy
from esper.population.population import Population
from esper.population.strategy import (
    find_slots,
    pick_strategy,
    stacking_problem,
    train_settings,
)
from tests.population.plugins import Deciding, Dropping, Odd, odd_task, plugged_in
from tests.population.worlds import (
    MIXED,
    TinyImages,
    TinyText,
    TinyValues,
    advance,
    do,
    germinate,
    make_population,
    populations,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = PopulationConfig()


@pytest.mark.parametrize(
    ("asked", "device", "config", "picked", "reason"),
    [
        ("auto", CUDA, PLAIN, "stacked", "on an accelerator stacked rows share every kernel"),
        ("auto", CPU, PLAIN, "sequential", "on a CPU plain convolutions one row at a time"),
        (
            "auto",
            CUDA,
            PLAIN.replace(training_mode="shadow"),
            "sequential",
            "the shadow pass is not stacked",
        ),
        ("stacked", CPU, PLAIN, "stacked", "it was asked for"),
        ("workers", CPU, PLAIN, "workers", "it was asked for"),
    ],
)
def test_what_is_picked_and_why(
    asked: Strategy, device: torch.device, config: PopulationConfig, picked: Strategy, reason: str
) -> None:
    found, why = pick_strategy(asked, device, config)
    assert found == picked
    assert why.startswith(reason)


def test_a_population_says_what_it_picked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="esper.population"):
        population = Population(TinyValues(), 2, device="cpu")
    assert population.strategy == "sequential"
    assert "one row at a time" in population.reason
    assert f"population of 2 rows runs sequential: {population.reason}" in caplog.text


def test_what_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"must be one of auto, .*, got 'fast'"):
        pick_strategy("fast", CPU, PLAIN)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"'workers' runs on the CPU, but the device is cuda"):
        pick_strategy("workers", CUDA, PLAIN)


@pytest.mark.parametrize("task", MIXED)
def test_the_tiny_tasks_can_be_stacked(task: type[TinyImages]) -> None:
    assert stacking_problem(task(), PLAIN) is None
    assert stacking_problem(task(), PLAIN.replace(use_bf16=True)) is None


def test_why_rows_cannot_be_stacked() -> None:
    with plugged_in():
        assert stacking_problem(odd_task(), PLAIN) is None
        assert stacking_problem(odd_task(batch_norm=True), PLAIN) == (
            "host 'odd': 'body.1' is a BatchNorm, whose statistics change in place"
        )
        problem = stacking_problem(odd_task(dropout=0.1), PLAIN)
        assert problem is not None
        assert problem.startswith("host 'odd': 'drop' draws random numbers")
    shadow = PLAIN.replace(training_mode="shadow")
    assert stacking_problem(TinyText(), shadow) == "the shadow pass is not stacked"


@pytest.mark.filterwarnings("ignore:the model has BatchNorm layers")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch_norm": True}, r"'body\.1' is a BatchNorm"),
        ({"dropout": 0.3}, r"'drop' draws random numbers"),
    ],
)
def test_a_host_that_cannot_be_stacked_warns_and_runs_one_row_after_another(
    options: dict[str, float], reason: str
) -> None:
    with plugged_in():
        tasks = [odd_task(**options), TinyValues()]
        plain = make_population(tasks, (2, 2))
        stacked = make_population(tasks, (2, 2), "stacked")
        with populations(plain, stacked):
            expected = plain.reset()
            with pytest.warns(
                EsperWarning, match=f"cannot be stacked: host 'odd': {reason}.*one after another"
            ):
                found = stacked.reset()
            assert [cohort.engine.is_stacked for cohort in stacked.cohorts] == [False, True]
            assert torch.equal(found.val_loss[:2], expected.val_loss[:2])


@pytest.mark.parametrize("seed", [Dropping, Deciding])
def test_a_blueprint_that_cannot_be_stacked_warns_and_still_grows(seed: type[Odd]) -> None:
    with plugged_in(odd=seed):
        task = TinyValues(
            TinyValues.defaults.replace(
                host_options=TinyValues.defaults.host_options.replace(hidden=(6, 6))
            )
        )
        population = make_population([task], 2, "stacked")
        with populations(population):
            with pytest.warns(EsperWarning, match="cannot be stacked: blueprint 'odd': "):
                population.reset()
            do(population, germinate("odd"))
            signals = do(population, advance())
            assert bool(signals.last_success[0])
            assert bool(torch.isfinite(signals.val_loss).all())


def test_slots_and_settings_come_from_the_task() -> None:
    task = TinyImages()
    slots = find_slots(task.build_host(0), task, PLAIN)
    assert [(slot.name, slot.topology, slot.channels) for slot in slots] == [
        ("r0c0", "cnn", 4),
        ("r0c1", "cnn", 4),
        ("r0c2", "cnn", 4),
    ]
    assert slots[0].shape == (2, 4, 6, 6)
    assert find_slots(TinyText().build_host(0), TinyText(), PLAIN)[0].channels == 8
    settings = train_settings(task)
    assert (settings.batch_size, settings.learning_rate) == (4, 0.05)
    assert settings.max_grad_norm == task.config.max_grad_norm
