"""The workers strategy: CPU processes with one thread each, each running a slice of the rows.

Every process holds a plain sequential engine; what travels between them is lifecycle state,
per-sample results and, when asked for, a row's weights. A process that has trained its rows goes
on to evaluate them before it is asked to: what will be asked follows from their state, and the
others may still be training.
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
        self._parts = [range(a, b) for a, b in pairwise(bounds)]
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
        return torch.cat(self._all("sync", [(state.select(list(p)),) for p in self._parts]))

    def train(self, epochs: Sequence[int]) -> EpochResult:
        """Train one epoch of every row."""
        results: list[EpochResult] = self._all(
            "train", [([epochs[row] for row in part],) for part in self._parts]
        )
        names = ("norm", "health", "vanishing", "exploding", "ratio")
        gradients = GradientSample(
            *(torch.cat([getattr(r.gradients, name) for r in results]) for name in names)
        )
        return EpochResult(
            torch.cat([r.loss for r in results]), gradients, torch.cat([r.sampled for r in results])
        )

    def measure(self, plans: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Evaluate every configuration of every row."""
        results = self._all("measure", [([plans[row] for row in part],) for part in self._parts])
        correct = [right for _, right in results if right is not None]
        return torch.cat([loss for loss, _ in results]), torch.cat(correct) if correct else None

    def read(self, row: int) -> RowWeights:
        """Return copies of everything a worker knows about a row."""
        weights: RowWeights = self._one(row, "read")
        return weights

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace a row; `state` [1, S] says what lives in its slots."""
        self._one(row, "write", weights, state)

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
                self._ask(number, (name, (row - part.start, *arguments)))
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
        process, part = self._processes[number], self._parts[number]
        process.join(timeout=_PATIENCE_S)
        return WorkerError(
            f"the worker process of rows {part.start} to {part.stop - 1} ended unexpectedly with "
            f"exit code {process.exitcode} (out of memory?); close the population, then use fewer "
            "rows or strategy='sequential'"
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
                _send(connection, ("done", ahead[1]))
            else:
                _send(connection, ("done", getattr(engine, name)(*arguments)))
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
