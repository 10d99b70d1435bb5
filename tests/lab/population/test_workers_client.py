"""Rows shared out among processes: the same numbers, and no process left behind."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.budget import Portion
from esper.kasmina.contribution import participating, plan_ablations
from esper.kasmina.state import empty_state
from esper.lab.population import strategy
from esper.lab.population.engine import StrategyError
from esper.lab.population.worker_handle import WorkerError
from esper.lab.population.worker_pool import lease_pool
from esper.lab.population.workers import WorkersEngine, split_rows
from esper.leyline.errors import EsperError, EsperWarning
from tests.lab.population.plugins import Odd, plugged_in
from tests.lab.population.tiny_tasks import (
    TinyImages,
    TinyText,
    TinyValues,
    advance,
    do,
    germinate,
    make_population,
    populations,
    row_tree,
)
from tests.plots import same

NINTH = [Portion(9, 8 * TinyValues.defaults.samples_per_step, TinyValues.defaults.samples_per_step)]
NINTH *= 3
"""The ninth epoch of three rows."""


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0


def watch_exchanges(engine: WorkersEngine) -> list[Any]:
    """Let rows be exchanged after every epoch, whatever they cost; return where it is noted."""
    noted: list[Any] = []
    exchange = engine._exchange

    def note(one: tuple[int, int], other: tuple[int, int]) -> None:
        noted.append((one, other))
        exchange(one, other)

    def at_once() -> None:
        assert min(seen[-1] for seen in engine._costs) > 0
        if engine._state is not None:
            first, second = engine._parts
            engine._exchange((0, first[len(noted) % 2]), (1, second[0]))

    engine._exchange = note  # type: ignore[method-assign]
    engine._balance = at_once  # type: ignore[method-assign]
    return noted


class Loads(WorkersEngine):
    """Two processes of three rows that only say who would exchange what."""

    def __init__(self, others: list[float] | None = None) -> None:
        self._number = 1
        self._parts = [[0, 1, 2], [3, 4, 5]]
        self._costs = [deque(maxlen=3) for _ in range(6)]
        self._client = SimpleNamespace(seconds={2: others or [0.0, 0.0]})  # type: ignore[assignment]
        self._state = empty_state(6, 1)
        self.exchanged: list[tuple[int, int]] = []

    def see(self, *epochs: list[float]) -> list[tuple[int, int]]:
        """Measure rows in these epochs and return what was exchanged then."""
        for seconds in epochs:
            for seen, spent in zip(self._costs, seconds, strict=True):
                seen.append(spent)
            self._balance()
        return self.exchanged

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
    assert not engine.see(seconds, seconds), "two epochs are not enough to know what a row costs"
    assert engine.see(seconds)[:1] == exchanged
    after = max(sum(seconds[row] for row in part) for part in engine._parts)
    assert after < before or not exchanged
    engine = Loads()
    engine._state = None
    assert not engine.see(*[seconds] * 3), "a row that was replaced is not known well enough"


def test_one_slow_epoch_moves_no_row() -> None:
    even, slow = [1.0] * 6, [3.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    assert not Loads().see(even, even, slow, even, even, slow, even)
    assert Loads().see(even, slow, slow) == [(0, 3)]


def test_what_rows_of_other_tasks_cost_counts() -> None:
    seconds = [2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    assert not Loads([0.0, 2.0]).see(*[seconds] * 3)
    assert Loads([2.0, 0.0]).see(*[seconds] * 3) == [(0, 3), (1, 4)]


@pytest.mark.parametrize(
    ("rows", "processes", "others", "dealt"),
    [
        (5, 2, [], [[0, 1, 2], [3, 4]]),
        (1, 3, [], [[0], [], []]),
        (1, 3, [[1, 0, 0], [0, 1, 0]], [[], [], [0]]),
        (3, 2, [[2, 1]], [[0], [1, 2]]),
        (2, 2, [[4, 0]], [[], [0, 1]]),
    ],
)
def test_rows_are_dealt_so_that_processes_have_as_many(
    rows: int, processes: int, others: list[list[int]], dealt: list[list[int]]
) -> None:
    assert split_rows(rows, processes, others) == dealt


@pytest.mark.slow
def test_workers_give_the_numbers_of_rows_one_after_another_though_one_is_killed() -> None:
    plain = make_population([TinyValues], 3)
    shared = make_population([TinyValues], 3, "workers", workers=2)
    with populations(plain, shared):
        expected, found = plain.reset(), shared.reset()
        engine = shared.groups[0].engine
        assert isinstance(engine, WorkersEngine)
        processes = multiprocessing.active_children()
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
        assert engine._parts != [[0, 1], [2]]
        for row in range(3):
            assert same(row_tree(plain, row), row_tree(shared, row))
        saved = shared.snapshot()
        ahead = do(shared)
        plain.restore(saved)
        assert same(do(plain).val_loss, ahead.val_loss)
        assert open_files() <= files, "a row that was read holds no file open"
        state = shared.groups[0].state
        plans = [plan_ablations(row) for row in participating(state).tolist()]
        spoiled = engine.read(2)
        spoiled.host["head.weight"].fill_(float("nan"))
        engine.train(NINTH)
        engine.write(2, spoiled, state.select([2]))
        loss, _ = engine.measure(plans)
        assert loss.isfinite().all(1).tolist() == [True] * (len(loss) - len(plans[2])) + [
            False
        ] * len(plans[2]), "what was evaluated ahead is forgotten when a row is replaced"
        assert do(shared).rolled_back.tolist() == [False, False, True]

        # A process that dies is replaced, whatever it was doing, and nobody can tell.
        plain.restore(shared.snapshot())
        victim = engine._pool.process_ids[1]
        os.kill(victim, signal.SIGKILL)
        with pytest.warns(EsperWarning, match="worker process 1 ended unexpectedly with exit code"):
            found = do(shared, germinate("lora"))
        assert same(do(plain, germinate("lora")).val_loss, found.val_loss)
        training = engine.train(NINTH)
        os.kill(engine._pool.process_ids[0], signal.SIGKILL)
        alone, nothing = plain.groups[0].engine, [plan[:0] for plan in plans]
        with pytest.warns(EsperWarning, match="-9; another one plays its rows again"):
            # Rows are measured after the epoch that has begun, whether anybody has waited for it.
            engine.measure(nothing)
        assert same(alone.train(NINTH)().loss, training().loss)
        for row in range(3):
            assert same(row_tree(plain, row), row_tree(shared, row))
        assert victim not in {process.pid for process in multiprocessing.active_children()}
        assert len(multiprocessing.active_children()) == 2
    assert not any(process.is_alive() for process in processes)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_rows_that_were_given_up_begin_again_in_new_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("esper.lab.population.worker_handle.MOST_REPLACEMENTS", 1)
    plain = make_population([TinyValues], 1)
    shared = make_population([TinyValues], 1, "workers", workers=1)
    with populations(plain, shared):
        shared.reset()
        engine = shared.groups[0].engine
        assert isinstance(engine, WorkersEngine)
        os.kill(engine._pool.process_ids[0], signal.SIGKILL)
        with pytest.warns(EsperWarning, match="another one plays its rows again"):
            do(shared)
        os.kill(engine._pool.process_ids[0], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(WorkerError) as caught:
                engine.read(0)
            said = str(caught.value)
            assert said.startswith("worker process 0 ended unexpectedly 2 times on the same rows")
            assert "exit code -9" in said
            assert "\n" not in said
        # Other rows have other processes.
        assert same(shared.reset().val_loss, plain.reset().val_loss)
    assert not multiprocessing.active_children()


def test_processes_outlive_resets_and_serve_forks_and_other_populations() -> None:
    mixed = [TinyImages, TinyText, TinyValues]
    lease = lease_pool()
    plain = make_population(mixed, (2, 1, 1))
    shared = make_population(mixed, (2, 1, 1), "workers", workers=2)
    with populations(plain, shared):
        plain.reset(), shared.reset()
        ids = {process.pid for process in multiprocessing.active_children()}
        assert len(ids) == 2
        parts = [group.engine._parts for group in shared.groups]  # type: ignore[attr-defined]
        assert parts == [[[0], [1]], [[0], []], [[], [0]]], "tasks of one row run side by side"
        for seeds in ([5, 6, 7, 8], [9, 9, 1, 2], None):
            expected, found = plain.reset(seeds), shared.reset(seeds)
            assert same(expected.val_loss, found.val_loss)
            assert shared.row_seeds == plain.row_seeds
            choices = [germinate("norm"), {"op": 0}, germinate("lora")]
            assert same(do(plain, *choices).val_loss, do(shared, *choices).val_loss)
            assert {process.pid for process in multiprocessing.active_children()} == ids
        saved = shared.snapshot()
        fork, twin = shared.fork([0, 3]), plain.fork([0, 3])
        other = make_population([TinyValues], 2, "workers", workers=2, row_seeds=[5, 6])
        with populations(fork, twin, other):
            assert same(do(fork, advance()).val_loss, do(twin, advance()).val_loss)
            assert bool(other.reset().val_loss.isfinite().all())
            shared.close()
            assert same(do(fork).val_loss, do(twin).val_loss)
            assert {process.pid for process in multiprocessing.active_children()} == ids
            shared.restore(saved)
            assert same(do(shared).val_loss, do(plain).val_loss)
    # Whoever makes populations one after another holds a lease of its own.
    assert {*lease.process_ids} == ids
    wrong = lease.ask(0, "read", 99, [0])
    with pytest.raises(WorkerError, match="a worker process failed: 99"):
        lease.answer(0, wrong)
    assert lease.is_usable, "a request that fails ends nothing"
    with populations(make_population([TinyValues], 2, "workers", workers=2)) as (last,):
        last.reset()
        assert {process.pid for process in multiprocessing.active_children()} == ids
    lease.release()
    assert not multiprocessing.active_children()


def test_what_a_user_registered_is_known_to_the_workers() -> None:
    sys.modules.pop("tests.lab.population.registered", None)
    importlib.import_module("tests.lab.population.registered")
    try:
        population = make_population([TinyValues], 1, "workers", workers=1)
        with populations(population):
            population.reset()
            signals = do(population, germinate("self_registered"))
            assert bool(signals.last_success[0])
            assert int(signals.slot_params[0, 0]) > 0
    finally:
        BLUEPRINTS.unregister("self_registered")


def test_what_the_workers_cannot_know_is_one_clear_error() -> None:
    with plugged_in(odd=Odd):
        population = make_population([TinyValues], 1, "workers", workers=1)
        with pytest.raises(StrategyError, match=r"not those of the population \(odd\)"):
            population.reset()
    assert not multiprocessing.active_children()


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    class Local(TinyValues):
        """A task that lives in a function."""

    population = make_population([Local], 2, "workers", workers=1)
    with pytest.raises(StrategyError, match="cannot be sent to worker processes") as caught:
        population.reset()
    assert isinstance(caught.value, EsperError)
    assert not multiprocessing.active_children()


def test_where_processes_were_not_asked_for_rows_run_without_them_and_say_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Local(TinyValues):
        """A task that lives in a function."""

    monkeypatch.setattr(strategy, "_SAMPLES_WORTH_PROCESSES", 1)
    population = make_population([Local], 2, "auto", workers=2)
    assert population.strategy == "workers"
    with populations(population), populations(make_population([TinyValues], 2)) as (plain,):
        with pytest.warns(EsperWarning, match="rows run one after another: task 'tiny_values' can"):
            found = population.reset()
        assert population.strategy == "sequential"
        assert "cannot be sent to worker processes" in population.reason
        assert same(found.val_loss, plain.reset().val_loss)
        with populations(population.fork([0, 1])) as (fork,):
            assert (fork.strategy, fork.reason) == ("sequential", population.reason)
            assert same(do(fork).val_loss, do(plain).val_loss)
    assert not multiprocessing.active_children()


def test_a_class_of_the_script_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyValues, "__module__", "__main__")
    population = make_population([TinyValues], 2, "workers", workers=1)
    with pytest.raises(StrategyError, match="TinyValues is defined in the script itself; define"):
        population.reset()
    assert not multiprocessing.active_children()


SCRIPT = """
import multiprocessing
import esper
import esper.lab.population.engine
from tests.lab.population.tiny_tasks import TinyValues

config = esper.lab.population.engine.PopulationConfig(workers=1)
population = esper.Population(TinyValues(), 2, device="cpu", strategy="workers", config=config)
print(population.strategy, bool(population.reset().val_loss.isfinite().all()))
print(*(process.pid for process in multiprocessing.active_children()))
"""


def test_a_script_needs_no_guard_and_ends_without_closing_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    root = Path(__file__).parents[3]
    here = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    done = subprocess.run(
        [sys.executable, str(path)], env=here, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    *said, worker = done.stdout.split()
    assert said == ["workers", "True"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(worker), 0)
