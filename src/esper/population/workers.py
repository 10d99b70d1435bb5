"""The workers strategy: CPU processes with one thread each, each running a slice of the rows.

Every process holds a plain sequential engine; what travels between them is lifecycle state,
per-sample results and, when asked for, a row's weights.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from esper.kasmina.gradients import GradientSample
from esper.kasmina.state import SlotState
from esper.leyline.errors import EsperError
from esper.population.config import PopulationConfig
from esper.population.engine import EpochResult, RowWeights, SlotSpec
from esper.tasks.dataset import TaskData
from esper.tasks.task import Task


class WorkerError(EsperError, RuntimeError):
    """A worker process failed or went away."""


class WorkersEngine:
    """Rows shared out among processes; the same numbers as one after another."""

    def __init__(
        self, task: Task, data: TaskData, keys: Sequence[int], config: PopulationConfig
    ) -> None:
        """Start the processes and wait until each has built its rows."""
        count = min(config.workers or os.cpu_count() or 1, len(keys))
        bounds = [len(keys) * number // count for number in range(count + 1)]
        self._parts = [range(a, b) for a, b in pairwise(bounds)]
        context = mp.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for part in self._parts:
            ours, theirs = context.Pipe()
            mine = [keys[row] for row in part]
            process = context.Process(
                target=_work,
                args=(theirs, type(task), task.config, data, mine, config),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.slots: tuple[SlotSpec, ...]
        self.host_params: int
        described = [self._receive(connection) for connection in self._connections]
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
        number, place = self._place(row)
        self._connections[number].send(("read", (place,)))
        weights: RowWeights = self._receive(self._connections[number])
        return weights

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace a row; `state` [1, S] says what lives in its slots."""
        number, place = self._place(row)
        self._connections[number].send(("write", (place, weights, state)))
        self._receive(self._connections[number])

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            try:
                connection.send(None)
                connection.close()
            except (OSError, ValueError):
                continue  # it is gone already
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()
        self._connections, self._processes = [], []

    def _place(self, row: int) -> tuple[int, int]:
        for number, part in enumerate(self._parts):
            if row in part:
                return number, row - part.start
        raise IndexError(f"there is no row {row}")

    def _all(self, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call a method in every process at once and wait for all answers."""
        for connection, given in zip(self._connections, arguments, strict=True):
            connection.send((name, given))
        return [self._receive(connection) for connection in self._connections]

    def _receive(self, connection: Connection) -> Any:
        try:
            status, value = connection.recv()
        except (EOFError, OSError):
            raise WorkerError(
                "a worker process ended unexpectedly (out of memory?); "
                "use fewer rows or strategy='sequential'"
            ) from None
        if status == "error":
            raise WorkerError(f"a worker process failed: {value}")
        return value


def _work(
    connection: Connection,
    task_class: type[Task],
    task_config: Any,
    data: TaskData,
    keys: list[int],
    config: PopulationConfig,
) -> None:
    """Serve one slice of rows until told to stop."""
    from esper.population.strategy import make_sequential

    torch.set_num_threads(1)
    try:
        engine = make_sequential(task_class(task_config), data, keys, config)
        connection.send(("done", (engine.slots, engine.host_params)))
        while (message := connection.recv()) is not None:
            name, arguments = message
            connection.send(("done", getattr(engine, name)(*arguments)))
    except EOFError:
        return
    except Exception as error:
        # A process border: the parent gets one line, the log of this process the whole story.
        traceback.print_exc()
        connection.send(("error", " ".join(str(error).split()) or type(error).__name__))
