"""The workers strategy: CPU processes with one thread each, each running a slice of the rows.

Every process holds a plain sequential engine; what travels between them is lifecycle state,
per-sample results and, when asked for, a row's weights. A process that has trained its rows goes
on to evaluate them before it is asked to: what will be asked follows from their state, and the
others may still be training. Rows grow apart and so does their cost; processes exchange rows when
one of them has become the slowest by far.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import traceback
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from esper.kasmina.blueprints.registry import BLUEPRINTS, blueprint_names
from esper.kasmina.gradients import GradientSample
from esper.kasmina.hosts import HOSTS
from esper.kasmina.state import SlotState
from esper.leyline.errors import EsperError
from esper.population.config import PopulationConfig
from esper.population.engine import EpochResult, RowWeights, SlotSpec, StrategyError
from esper.tasks.dataset import TaskData
from esper.tasks.task import Task

_PATIENCE_S = 5.0

_WORTH_MOVING = 0.03
"""Share of an epoch that the slowest process must gain before rows are exchanged."""

_LEAST_GAIN_S = 0.005


class WorkerError(EsperError, RuntimeError):
    """A worker process failed or went away."""


class WorkersEngine:
    """Rows shared out among processes; the same numbers as one after another."""

    def __init__(
        self, task: Task, data: TaskData, keys: Sequence[int], config: PopulationConfig
    ) -> None:
        """Start the processes and wait until each has built its rows."""
        self.is_stacked = False
        count = min(config.workers or os.cpu_count() or 1, len(keys))
        bounds = [len(keys) * number // count for number in range(count + 1)]
        self._keys = list(keys)
        self._parts = [list(range(a, b)) for a, b in pairwise(bounds)]
        """The rows of every process, by their place in it."""
        self._state: SlotState | None = None
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        try:
            for part in self._parts:
                self._start(task, data, [keys[row] for row in part], config)
            described = self._answers()
        except BaseException:
            self.close()
            raise
        self.slots: tuple[SlotSpec, ...]
        self.host_params: int
        self.slots, self.host_params = described[0]

    def sync(self, state: SlotState) -> Tensor:
        """Build, free and re-aim seeds as the state says; return their sizes, int64 [R, S]."""
        self._state = state
        sizes = self._all("sync", [(state.select(part),) for part in self._parts])
        return torch.cat(sizes)[self._order()]

    def train(self, epochs: Sequence[int]) -> EpochResult:
        """Train one epoch of every row."""
        results: list[EpochResult] = self._all(
            "train", [([epochs[row] for row in part],) for part in self._parts]
        )
        order = self._order()
        names = ("norm", "health", "vanishing", "exploding", "ratio")
        gradients = GradientSample(
            *(torch.cat([getattr(r.gradients, name) for r in results])[order] for name in names)
        )
        return EpochResult(
            torch.cat([r.loss for r in results])[order],
            gradients,
            torch.cat([r.sampled for r in results])[order],
        )

    def measure(self, plans: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Evaluate every configuration of every row."""
        results = self._all("measure", [([plans[row] for row in part],) for part in self._parts])
        losses: list[Tensor] = [torch.empty(0)] * len(self._keys)
        corrects: list[Tensor] = []
        seconds = [0.0] * len(self._keys)
        order = [row for part in self._parts for row in part]
        counts = [len(plans[row]) for row in order]
        for row, loss in zip(order, torch.cat([r[0] for r in results]).split(counts), strict=True):
            losses[row] = loss
        found = [correct for _, correct, _ in results if correct is not None]
        if found:
            corrects = [torch.empty(0)] * len(self._keys)
            for row, correct in zip(order, torch.cat(found).split(counts), strict=True):
                corrects[row] = correct
        for row, spent in zip(order, (each for r in results for each in r[2]), strict=True):
            seconds[row] = spent
        self._balance(seconds)
        return torch.cat(losses), torch.cat(corrects) if corrects else None

    def read(self, row: int) -> RowWeights:
        """Return copies of everything a worker knows about a row."""
        weights: RowWeights = self._one(row, "read")
        return weights

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace a row; `state` [1, S] says what lives in its slots."""
        self._state = None
        self._one(row, "write", weights, state)

    def _balance(self, seconds: Sequence[float]) -> None:
        """Let the slowest and the fastest process exchange rows while that pays."""
        for _ in self._parts:
            loads = [sum(seconds[row] for row in part) for part in self._parts]
            heavy, light = loads.index(max(loads)), loads.index(min(loads))
            gap = loads[heavy] - loads[light]
            pairs = [(i, j) for i in self._parts[heavy] for j in self._parts[light]]
            if self._state is None or heavy == light:
                return
            one, other = min(pairs, key=lambda p: abs(gap / 2 - (seconds[p[0]] - seconds[p[1]])))
            moved = seconds[one] - seconds[other]
            if min(moved, gap - moved) < max(_WORTH_MOVING * loads[heavy], _LEAST_GAIN_S):
                return
            self._exchange((heavy, one), (light, other))

    def _exchange(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        """Let two processes exchange rows, given as (process, row)."""
        assert self._state is not None
        weights = {row: self.read(row) for _, row in (one, other)}
        places = [self._parts[number].index(row) for number, row in (one, other)]
        for place, (number, _), (_, row) in zip(places, (one, other), (other, one), strict=True):
            state = self._state.select([row])
            self._ask(number, ("adopt", (place, self._keys[row], weights[row], state)))
            self._answer(number)
            self._parts[number][place] = row

    def _order(self) -> Tensor:
        """Return int64 [R]: where each row stands when the answers are put side by side."""
        order = torch.tensor([row for part in self._parts for row in part])
        return order.argsort()

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            try:
                _send(connection, None)
                connection.close()
            except (OSError, ValueError):
                continue  # it is gone already
        for process in self._processes:
            process.join(timeout=_PATIENCE_S)
            if process.is_alive():
                process.terminate()
                process.join(timeout=_PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._connections, self._processes = [], []

    def _start(self, task: Task, data: TaskData, keys: list[int], config: PopulationConfig) -> None:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        # Classes travel by name: to unpickle them is to import the modules that register them.
        plugins = [BLUEPRINTS.get(name).module for name in blueprint_names()]
        plugins.append(HOSTS.get(task.config.host).host_class)
        process = context.Process(
            target=_work,
            args=(theirs, plugins, blueprint_names(), type(task), task.config, data, keys, config),
            daemon=True,
        )
        try:
            process.start()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            ours.close()
            raise StrategyError(
                f"task {task.name!r} cannot be sent to worker processes: {error}; define its "
                "classes in a module of their own or use strategy='sequential'"
            ) from error
        finally:
            theirs.close()
        self._connections.append(ours)
        self._processes.append(process)

    def _one(self, row: int, name: str, *arguments: Any) -> Any:
        """Call a method for one row in the process that has it."""
        for number, part in enumerate(self._parts):
            if row in part:
                self._ask(number, (name, (part.index(row), *arguments)))
                return self._answer(number)
        raise IndexError(f"there is no row {row}")

    def _all(self, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call a method in every process at once and wait for all answers."""
        for number, given in enumerate(arguments):
            self._ask(number, (name, given))
        return self._answers()

    def _answers(self) -> list[Any]:
        """Return what every process answers; take all answers in before one is a failure."""
        answers, failure = [], None
        for number in range(len(self._connections)):
            try:
                answers.append(self._answer(number))
            except WorkerError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return answers

    def _ask(self, number: int, message: tuple[str, tuple[Any, ...]]) -> None:
        try:
            _send(self._connections[number], message)
        except OSError:
            raise self._gone(number) from None

    def _answer(self, number: int) -> Any:
        try:
            status, value = _receive(self._connections[number])
        except (EOFError, OSError):
            raise self._gone(number) from None
        if status == "error":
            raise WorkerError(f"a worker process failed: {value}")
        return value

    def _gone(self, number: int) -> WorkerError:
        process, rows = self._processes[number], sorted(self._parts[number])
        process.join(timeout=_PATIENCE_S)
        return WorkerError(
            f"the worker process of rows {', '.join(map(str, rows))} ended unexpectedly with exit "
            f"code {process.exitcode} (out of memory?); close the population, then use fewer rows "
            "or strategy='sequential'"
        )


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays: fast, copied, and no shared memory stays open."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.dtype != torch.bfloat16:
            return torch.from_numpy, (obj.detach().cpu().numpy(),)
        return NotImplemented


def _send(connection: Connection, message: Any) -> None:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    connection.send_bytes(buffer.getbuffer())


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _work(
    connection: Connection,
    plugins: list[type],
    blueprints: tuple[str, ...],
    task_class: type[Task],
    task_config: Any,
    data: TaskData,
    keys: list[int],
    config: PopulationConfig,
) -> None:
    """Serve one slice of rows until told to stop."""
    from esper.population.strategy import make_sequential

    # An interrupt from the keyboard reaches every process; what to do then is the parent's affair.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        if blueprint_names() != blueprints:
            known = ", ".join(sorted(set(blueprints) - set(blueprint_names())))
            raise StrategyError(
                f"the blueprints registered here are not those of the population ({known}); "
                "register them where their modules are imported"
            )
        engine = make_sequential(task_class(task_config), data, keys, config)
        _send(connection, ("done", (engine.slots, engine.host_params)))
        ahead: tuple[list[Tensor], tuple[Tensor, Tensor | None]] | None = None
        while (message := _receive(connection)) is not None:
            name, arguments = message
            if name == "measure" and ahead is not None and _equal(ahead[0], arguments[0]):
                result: Any = ahead[1]
            else:
                result = getattr(engine, name)(*arguments)
            if name == "measure":
                result = (*result, engine.row_seconds)
            _send(connection, ("done", result))
            ahead = None
            if name == "train":
                plans = engine.usual_plans()
                ahead = plans, engine.measure(plans)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # nobody listens any more
    except Exception as error:
        # A process border: the parent gets one line, the log of this process the whole story.
        traceback.print_exc()
        _send(connection, ("error", " ".join(str(error).split()) or type(error).__name__))


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
