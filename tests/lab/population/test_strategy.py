"""Which strategy runs, and why it says it does."""

from __future__ import annotations

import logging
import multiprocessing
import operator

import pytest
import torch

from esper.lab.population.engine import PopulationConfig, Strategy, StrategyError
from esper.lab.population.population import Population
from esper.lab.population.strategy import (
    count_processes,
    find_slots,
    find_tasks,
    pick_strategy,
    place_data,
    share_out,
    stacking_problem,
)
from esper.lab.population.worker_pool import usable_cores
from esper.lab.tasks import DataCache
from esper.leyline.errors import EsperWarning, UsageError
from tests.lab.population.plugins import Deciding, Dropping, Odd, odd_task, plugged_in
from tests.lab.population.tiny_tasks import (
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
TWO = PopulationConfig(workers=2)


@pytest.mark.parametrize(
    ("asked", "device", "config", "picked", "reason"),
    [
        ("auto", CUDA, PLAIN, "stacked", "on an accelerator stacked rows share every kernel"),
        ("auto", CPU, TWO, "workers", "on a CPU rows run one after another, here in 2 processes"),
        ("auto", CPU, PLAIN.replace(workers=1), "sequential", "there is one core for all rows"),
        (
            "auto",
            CUDA,
            PLAIN.replace(training_mode="shadow"),
            "sequential",
            "the shadow pass is not stacked",
        ),
        ("auto", CPU, TWO.replace(training_mode="shadow"), "workers", "on a CPU rows"),
        ("stacked", CPU, PLAIN, "stacked", "it was asked for"),
        ("sequential", CPU, PLAIN, "sequential", "it was asked for"),
        ("workers", CPU, PLAIN, "workers", "it was asked for"),
    ],
)
def test_what_is_picked_and_why(
    asked: Strategy, device: torch.device, config: PopulationConfig, picked: Strategy, reason: str
) -> None:
    found, why = pick_strategy(asked, device, config, rows=8, samples=10**7)
    assert found == picked
    assert why.startswith(reason)


def test_processes_are_started_only_for_work_that_is_worth_it() -> None:
    assert pick_strategy("auto", CPU, TWO, rows=1, samples=10**9) == (
        "sequential",
        "there is one row",
    )
    assert pick_strategy("auto", CPU, TWO, rows=2, samples=9_000) == (
        "sequential",
        "an episode of 9,000 samples is not worth starting processes",
    )
    running = pick_strategy("auto", CPU, TWO, rows=2, samples=9_000, has_processes=True)
    assert running[0] == "workers"
    assert count_processes(TWO, 1) == 1
    assert count_processes(TWO, 9) == 2
    assert count_processes(PLAIN, 10**6) == usable_cores() > 0


def test_a_process_that_may_have_no_children_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    found, why = pick_strategy("auto", CPU, TWO, rows=8, samples=10**7)
    assert (found, why) == ("sequential", "a daemonic process may not start others")
    population = make_population([TinyValues], 2, "workers", workers=2)
    with pytest.raises(StrategyError, match="daemonic process, which may not start others"):
        population.reset()


def test_a_population_says_what_it_picked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="esper.lab.population"):
        small = Population(TinyValues(), 2, device="cpu", config=TWO)
        large = Population("digits", 8, device="cpu", config=TWO)
    assert (small.strategy, large.strategy) == ("sequential", "workers")
    assert f"population of 2 rows runs sequential: {small.reason}" in caplog.text
    assert f"population of 8 rows runs workers: {large.reason}" in caplog.text


def test_what_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"must be one of auto, .*, got 'fast'"):
        pick_strategy("fast", CPU, PLAIN, rows=2, samples=9)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"'workers' runs on the CPU, but the device is cuda"):
        pick_strategy("workers", CUDA, PLAIN, rows=2, samples=9)


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
            assert [group.engine.is_stacked for group in stacked.groups] == [False, True]
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


def test_rows_are_shared_out_evenly_or_as_asked_for() -> None:
    assert share_out(7, 3) == [3, 2, 2]
    assert share_out([1, 5], 2) == [1, 5]
    for rows, tasks in ((1, 2), ([3], 2), ([3, 0], 2)):
        with pytest.raises(UsageError, match=f"every one of {tasks} tasks needs at least one row"):
            share_out(rows, tasks)


def test_data_that_was_given_stays_shared_where_it_goes() -> None:
    tasks, shelf = [TinyImages(), TinyValues(), TinyImages()], DataCache()
    given = [shelf.load(task) for task in tasks]
    assert all(map(operator.is_, place_data(tasks, given, CPU), given))
    moved = place_data(tasks, given, torch.device("meta"))
    assert [data.device.type for data in moved] == ["meta"] * 3
    assert moved[0].splits is moved[2].splits is not moved[1].splits
    with pytest.raises(UsageError, match="3 tasks need as many data sets, got 1"):
        place_data(tasks, given[:1], CPU)


def test_tasks_are_found_by_name_and_take_another_horizon() -> None:
    assert [task.name for task in find_tasks(["digits", TinyText()], None)] == [
        "digits",
        "tiny_text",
    ]
    assert [task.config.horizon for task in find_tasks(["digits", TinyText()], 7)] == [7, 7]
    (alone,) = find_tasks("digits", None)
    assert alone.config.horizon == 60
