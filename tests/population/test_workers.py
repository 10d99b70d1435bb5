"""Rows shared out among processes: the same numbers, and no process left behind."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from esper.kasmina.ablation import participating, plan_ablations
from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.leyline.errors import EsperError
from esper.population.engine import StrategyError
from esper.population.workers import WorkerError, WorkersEngine
from tests.plots import same
from tests.population.plugins import Odd, plugged_in
from tests.population.seedlings import make_state
from tests.population.worlds import (
    TinyValues,
    advance,
    do,
    germinate,
    make_population,
    populations,
    row_tree,
)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0


def watch_exchanges(engine: WorkersEngine) -> list[Any]:
    """Let rows be exchanged after every epoch, whatever they cost; return where it is noted."""
    noted: list[Any] = []
    exchange = engine._exchange

    def note(one: tuple[int, int], other: tuple[int, int]) -> None:
        noted.append((one, other))
        exchange(one, other)

    def at_once(seconds: Sequence[float]) -> None:
        assert len(seconds) == 3
        assert min(seconds) > 0
        if engine._state is not None:
            engine._exchange((0, engine._parts[0][0]), (1, engine._parts[1][len(noted) % 2]))

    engine._exchange = note  # type: ignore[method-assign]
    engine._balance = at_once  # type: ignore[method-assign]
    return noted


class Loads(WorkersEngine):
    """Two processes of three rows that only say who would exchange what."""

    def __init__(self) -> None:
        self._parts = [[0, 1, 2], [3, 4, 5]]
        self._state = make_state(6)
        self.exchanged: list[tuple[int, int]] = []

    def _exchange(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        self.exchanged.append((one[1], other[1]))
        for (number, row), (_, new) in ((one, other), (other, one)):
            self._parts[number][self._parts[number].index(row)] = new


@pytest.mark.parametrize(
    ("seconds", "exchanged"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], []),
        ([1.0, 1.02, 1.0, 1.0, 1.0, 1.0], []),
        ([2.0, 1.0, 1.0, 1.0, 1.0, 1.0], []),  # whoever has it is the slowest
        ([2.0, 2.0, 1.0, 1.0, 1.0, 1.0], [(0, 3)]),
        ([1.0, 1.0, 1.0, 3.0, 1.5, 3.0], [(3, 0)]),
        ([9.0, 5.0, 5.0, 1.0, 1.0, 1.0], [(0, 3)]),
    ],
)
def test_rows_are_exchanged_while_that_pays(
    seconds: list[float], exchanged: list[tuple[int, int]]
) -> None:
    engine = Loads()
    before = max(sum(seconds[row] for row in part) for part in engine._parts)
    engine._balance(seconds)
    assert engine.exchanged[:1] == exchanged
    after = max(sum(seconds[row] for row in part) for part in engine._parts)
    assert after < before or not exchanged
    engine._state = None
    engine.exchanged.clear()
    engine._balance(seconds)
    assert not engine.exchanged, "a row that was replaced is not known well enough to move"


def test_workers_give_the_numbers_of_rows_one_after_another_until_one_is_killed() -> None:
    plain = make_population([TinyValues], 3)
    shared = make_population([TinyValues], 3, "workers", workers=2)
    with populations(plain, shared):
        expected, found = plain.reset(), shared.reset()
        engine = shared.cohorts[0].engine
        assert isinstance(engine, WorkersEngine)
        processes = list(engine._processes)
        assert len(processes) == 2
        files = open_files()
        exchanges = watch_exchanges(engine)
        for choices in (
            [germinate("mlp", 0, 3), germinate("lora")],
            [advance(), advance(), germinate("mlp")],
            [],
            [advance(), advance(), {"op": 0}],
        ):
            expected, found = do(plain, *choices), do(shared, *choices)
            assert same(expected.val_loss, found.val_loss)
        assert exchanges, "processes have exchanged rows, and nobody can tell"
        assert engine._parts != [[0], [1, 2]]
        for row in range(3):
            assert same(row_tree(plain, row), row_tree(shared, row))
        saved = shared.snapshot()
        ahead = do(shared)
        plain.restore(saved)
        assert same(do(plain).val_loss, ahead.val_loss)
        assert open_files() <= files, "a row that was read holds no file open"
        state = shared.cohorts[0].state
        plans = [plan_ablations(row) for row in participating(state).tolist()]
        spoiled = engine.read(2)
        spoiled.host["head.weight"].fill_(float("nan"))
        engine.train([9, 9, 9])
        engine.write(2, spoiled, state.select([2]))
        loss, _ = engine.measure(plans)
        assert loss.isfinite().all(1).tolist() == [True] * (len(loss) - len(plans[2])) + [
            False
        ] * len(plans[2]), "what was evaluated ahead is forgotten when a row is replaced"
        assert do(shared).rolled_back.tolist() == [False, False, True]

        victim = processes[1]
        lost = ", ".join(map(str, sorted(engine._parts[1])))
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(WorkerError) as caught:
            do(shared)
        assert str(caught.value).startswith(
            f"the worker process of rows {lost} ended unexpectedly with exit code -9"
        )
        assert "\n" not in str(caught.value)
        with pytest.raises(WorkerError, match="ended unexpectedly"):
            engine.read(engine._parts[1][0])
        shared.close()
        assert not any(process.is_alive() for process in processes)
        assert not multiprocessing.active_children()


def test_what_a_user_registered_is_known_to_the_workers() -> None:
    sys.modules.pop("tests.population.registered", None)
    importlib.import_module("tests.population.registered")
    try:
        population = make_population([TinyValues], 1, "workers", workers=1)
        with populations(population):
            population.reset()
            signals = do(population, germinate("self_registered"))
            assert bool(signals.last_success[0])
            assert int(signals.slot_params[0, 0]) > 0
    finally:
        BLUEPRINTS.unregister("self_registered")


def test_what_the_workers_cannot_know_is_one_clear_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with plugged_in(odd=Odd):
        population = make_population([TinyValues], 1, "workers", workers=1)
        with pytest.raises(WorkerError, match=r"not those of the population \(odd\)"):
            population.reset()
    assert "Traceback" in capfd.readouterr().err, "the whole story is in the log of the process"
    assert not multiprocessing.active_children()


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    class Local(TinyValues):
        """A task that lives in a function."""

    population = make_population([Local], 2, "workers", workers=2)
    with pytest.raises(StrategyError, match="cannot be sent to worker processes") as caught:
        population.reset()
    assert isinstance(caught.value, EsperError)
    assert not multiprocessing.active_children()
