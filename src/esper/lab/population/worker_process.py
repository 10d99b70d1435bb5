"""What runs in a worker process: it keeps tasks with their data, and rows of networks on them.

`pool` starts `serve` in every process; requests are the public methods of `_Worker`, by name.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import blueprint_names
from esper.lab.population.engine import Condition, PopulationConfig, StrategyError
from esper.lab.population.sequential import SequentialEngine
from esper.lab.population.strategy import make_sequential
from esper.lab.population.worker_handle import (
    PARENTS_SIGNALS,
    receive_message,
    send_message,
    unpack_message,
)
from esper.lab.population.workers import unpack_condition
from esper.lab.tasks.splits import Split, Splits
from esper.leyline.errors import EsperError, reason_of


def serve(connection: Connection) -> None:
    """Answer requests until told to stop."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        # They were held back while the process started.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    torch.set_num_threads(1)
    worker = _Worker()
    try:
        send_message(connection, (0, "done", None))
        while (message := receive_message(connection)) is not None:
            send_message(connection, worker.answer(*message))
            worker.go_on()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # nobody listens any more
    # Taking an interpreter with all its modules apart takes longer than many an epoch.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Worker:
    """Tasks and engines of one process; public methods but `answer` and `go_on` are requests."""

    def __init__(self) -> None:
        self._sources: dict[int, Splits] = {}
        self._conditions: dict[int, Condition] = {}
        self._engines: dict[int, SequentialEngine] = {}
        self._ahead: dict[int, tuple[list[Tensor], tuple[Tensor, Tensor | None]]] = {}
        self._trained: list[int] = []

    def answer(self, serial: int, name: str, arguments: tuple[Any, ...]) -> tuple[int, str, Any]:
        """Do what a request asks for; return its number, "done" or "error", and what came of it."""
        try:
            return serial, "done", getattr(self, name)(*arguments)
        except Exception as error:
            # A process border: the parent gets one line, the log of this process the story.
            if not isinstance(error, EsperError):
                traceback.print_exc()
            return serial, "error", reason_of(error)

    def again(
        self, told: list[tuple[bytes, bool]], forgotten: list[int]
    ) -> list[tuple[int, str, Any]]:
        """Do what a process before this one was asked for; return the answers that are awaited.

        Args:
            told: the requests, in their order, with whether somebody waits for the answer.
            forgotten: what was unloaded since, but rows here were built from.
        """
        answers = [(self.answer(*unpack_message(packed)), awaited) for packed, awaited in told]
        self._trained.clear()
        self.unload(forgotten, forgotten)
        return [answer for answer, is_awaited in answers if is_awaited]

    def load_source(self, number: int, splits: Splits) -> None:
        """Keep a source of data under a number; its tensors are shared, not copied."""
        self._sources[number] = splits

    def load(
        self, number: int, source: int, path: list[str], blueprints: tuple[str, ...], packed: bytes
    ) -> None:
        """Keep a task and its data, which are of a source, under a number."""
        sys.path[:] = path
        try:
            # Classes travel by name: to unpickle them is to import the modules that register them.
            (task_class, *_), task_config, data = unpack_condition(packed, self._sources[source])
        except (AttributeError, ImportError) as error:
            raise StrategyError(str(error)) from error
        if blueprint_names() != blueprints:
            unknown = set(blueprints) ^ set(blueprint_names()) or set(blueprints)
            raise StrategyError(
                "the blueprints registered here are not those of the population "
                f"({', '.join(sorted(unknown))}); register them where their modules are imported"
            )
        self._conditions[number] = Condition(task_class(task_config), data)

    def unload(self, conditions: list[int], sources: list[int]) -> None:
        """Forget tasks, and sources that nothing else uses; rows that have them keep them."""
        for number in conditions:
            self._conditions.pop(number, None)
        for number in sources:
            self._sources.pop(number, None)

    def open(
        self, engine: int, conditions: list[int], keys: list[int], config: PopulationConfig
    ) -> Any:
        """Build rows under a number; return their slots and the size of their host."""
        chosen = [self._conditions[number] for number in conditions]
        made = self._engines[engine] = make_sequential(chosen, keys, config)
        return made.slots, made.host_params

    def close(self, engine: int) -> None:
        """Forget rows."""
        self._engines.pop(engine, None)
        self._ahead.pop(engine, None)

    def train(self, engine: int, epochs: list[int]) -> Any:
        """Train one epoch of an engine's rows."""
        result = self._engines[engine].train(epochs)()
        self._trained.append(engine)
        return result

    def measure(self, engine: int, plans: list[Tensor]) -> Any:
        """Return what the rows' configurations give, and what every row cost."""
        rows, ahead = self._engines[engine], self._ahead.pop(engine, None)
        known = ahead is not None and _equal(ahead[0], plans)
        result = ahead[1] if known and ahead is not None else rows.measure(plans)
        return (*result, rows.row_seconds)

    def score(self, engine: int, split: Split) -> Tensor:
        """Return the scores and losses of an engine's rows on a whole split."""
        return self._engines[engine].score(split)

    def read(self, engine: int, rows: list[int]) -> Any:
        """Return everything about some rows."""
        return [self._engines[engine].read(row) for row in rows]

    def change(self, engine: int, name: str, *arguments: Any) -> Any:
        """Call a method that changes rows: `sync` or `write`."""
        self._ahead.pop(engine, None)
        return getattr(self._engines[engine], name)(*arguments)

    def adopt(self, engine: int, row: int, condition: int, *network: Any) -> None:
        """Put another network, (key, weights, state), in the place of a row."""
        self._ahead.pop(engine, None)
        key, weights, state = network
        self._engines[engine].adopt(row, key, self._conditions[condition], weights, state)

    def go_on(self) -> None:
        """Evaluate an epoch just trained: what will be asked follows from the rows' state."""
        while self._trained:
            engine = self._trained.pop()
            rows = self._engines[engine]
            plans = rows.usual_plans()
            try:
                self._ahead[engine] = plans, rows.measure(plans)
            except Exception:
                # It will be asked for, and fail where somebody hears of it.
                self._ahead.pop(engine, None)


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
