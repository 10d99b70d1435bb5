"""The workers strategy: CPU processes with one thread each train shares of the rows."""

from __future__ import annotations

import copy
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import blueprint_names
from esper.kasmina.budget import Portion
from esper.kasmina.contribution import GradientSample
from esper.kasmina.engine import EpochResult, RowWeights
from esper.kasmina.state import SlotState
from esper.lab.population.engine import Condition, PopulationConfig, SlotSpec
from esper.lab.population.worker_handle import WorkerError
from esper.lab.population.worker_pool import (
    WorkerPool,
    check_classes,
    lease_pool,
    pack_condition,
    refused_task,
)
from esper.lab.tasks.splits import Split, Splits
from esper.utils.process import Pending

# ---- Tasks and sources that are loaded in worker processes, each as long as it is used


class WorkerShelf:
    """The tasks and sources that the first `count` processes of a pool have loaded."""

    def __init__(self, pool: WorkerPool, count: int) -> None:
        """Start with nothing loaded."""
        self._pool, self._count = pool, count
        self._conditions: dict[int, tuple[Condition, int]] = {}
        self._users: Counter[int] = Counter()
        self._sources: dict[int, tuple[Splits, int]] = {}

    def number_of(self, condition: Condition) -> int:
        """Return the number of a task and its data in the processes."""
        return self._conditions[id(condition)][1]

    def use(self, conditions: Iterable[Condition]) -> None:
        """Count one more user of every condition, and load missing ones."""
        wanted = {id(condition): condition for condition in conditions}
        new = [condition for name, condition in wanted.items() if name not in self._conditions]
        for condition in new:
            check_classes(condition.task)
        self._users.update(wanted.keys())
        try:
            self._load(new)
        except BaseException:
            with suppress(WorkerError):  # a dead process has nothing loaded
                self.drop(wanted.values())
            raise

    def drop(self, conditions: Iterable[Condition]) -> None:
        """Count one user less of every condition, and unload unused ones."""
        self._users.subtract({id(condition) for condition in conditions})
        self._users = +self._users
        unused = [name for name in self._conditions if name not in self._users]
        numbers = [self._conditions.pop(name)[1] for name in unused]
        needed = {id(condition.data.splits) for condition, _ in self._conditions.values()}
        sources = [name for name in self._sources if name not in needed]
        gone = [self._sources.pop(name)[1] for name in sources]
        if numbers or gone:
            asked = [
                self._pool.ask(process, "unload", numbers, gone) for process in range(self._count)
            ]
            self._pool.answers(dict(enumerate(asked)))

    def _load(self, conditions: Sequence[Condition]) -> None:
        for splits in {id(each.data.splits): each.data.splits for each in conditions}.values():
            if id(splits) not in self._sources:
                self._load_source(splits)
        asked = []
        for condition in conditions:
            number = self._pool.next_serial()
            self._conditions[id(condition)] = condition, number
            asked.append((condition.task, self._ask_to_load(condition, number)))
        for task, serials in asked:
            try:
                self._pool.answers(serials)
            except WorkerError as error:
                if not self._pool.is_usable:
                    raise
                raise refused_task(task, error) from error

    def _load_source(self, splits: Splits) -> None:
        number = self._pool.next_serial()
        self._sources[id(splits)] = splits, number
        self._pool.answers(
            {p: self._pool.ask(p, "load_source", number, splits) for p in range(self._count)}
        )

    def _ask_to_load(self, condition: Condition, number: int) -> dict[int, int]:
        source = self._sources[id(condition.data.splits)][1]
        words = (number, source, list(sys.path), blueprint_names(), pack_condition(condition))
        return {p: self._pool.ask(p, "load", *words) for p in range(self._count)}


# ---- The workers strategy in the parent: rows divided among CPU processes


class WorkerClient:
    """Processes of the pool in which the tasks of a population are loaded.

    Args:
        conditions: the tasks of the rows, with their data.
        count: number of processes.
    """

    def __init__(self, conditions: Sequence[Condition], count: int) -> None:
        """Lease the processes and load the tasks."""
        self.count = count
        self.rows: dict[int, list[int]] = {}
        """By engine: number of rows in every process."""
        self.seconds: dict[int, list[float]] = {}
        """By engine: seconds of these rows in every process, once measured."""
        self.pool: WorkerPool = lease_pool(count)
        self._shelf = WorkerShelf(self.pool, count)
        self._conditions: list[Condition] = []
        self._users = [1]
        try:
            self.use(conditions)
        except BaseException:
            self.release()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether no process is known to be unusable."""
        return self._users[0] > 0 and self.pool.is_usable

    def number_of(self, condition: Condition) -> int:
        """Return the number of a task and its data in the processes."""
        return self._shelf.number_of(condition)

    def use(self, conditions: Sequence[Condition]) -> None:
        """Load these tasks instead of the current ones; common ones stay loaded."""
        self._shelf.use(conditions)
        before, self._conditions = self._conditions, list(conditions)
        self._shelf.drop(before)

    def share(self) -> WorkerClient:
        """Return a client of the same processes for another population."""
        other = copy.copy(self)
        other.rows, other.seconds = {}, {}
        other._conditions = []
        self._users[0] += 1
        return other

    def release(self) -> None:
        """Release the processes, and unload what only this client used."""
        self._users[0] -= 1
        with suppress(WorkerError):  # a dead process has nothing loaded
            self._shelf.drop(self._conditions)
        self._conditions = []
        if not self._users[0]:
            self.pool.release()


_WORTH_MOVING = 0.02
"""Share of an epoch that the slowest process must gain before rows are exchanged."""

_LEAST_GAIN_S = 0.003

_EPOCHS_SEEN = 3
"""Epochs whose median is the cost of a row; a single epoch depends on the machine's load."""


class WorkersEngine:
    """Rows divided among the processes of a pool; same numbers as the sequential strategy."""

    def __init__(
        self,
        client: WorkerClient,
        conditions: Sequence[Condition],
        keys: Sequence[int],
        config: PopulationConfig,
    ) -> None:
        """Build the rows in the processes."""
        self.is_stacked = False
        self._client = client
        self._pool = client.pool
        self._number = self._pool.next_serial()
        self._keys = list(keys)
        self._numbers = [client.number_of(condition) for condition in conditions]
        self._parts = split_rows(len(keys), client.count, list(client.rows.values()))
        """The rows of every process, in its order."""
        self._costs: list[deque[float]] = [deque(maxlen=_EPOCHS_SEEN) for _ in keys]
        self._state: SlotState | None = None
        self._training: Pending[EpochResult] | None = None
        """The epoch in progress."""
        client.rows[self._number] = [len(part) for part in self._parts]
        asked = {
            process: self._pool.ask(
                process,
                "open",
                self._number,
                [self._numbers[row] for row in part],
                [self._keys[row] for row in part],
                config,
            )
            for process, part in self._busy()
        }
        self.slots: tuple[SlotSpec, ...]
        self.host_params: int
        self.slots, self.host_params = next(iter(self._pool.answers(asked).values()))

    def sync(self, state: SlotState) -> Tensor:
        """Build, free and update seeds to match the state; return their sizes, int64 [R, S]."""
        self._state = state
        sizes = self._all("change", "sync", argument=state.select)
        return torch.cat(sizes)[self._order()]

    def train(self, portions: Sequence[Portion]) -> Pending[EpochResult]:
        """Start one epoch of training in every process."""
        asked = self._ask("train", argument=lambda part: [portions[row] for row in part])
        self._training = cache(lambda: self._trained(asked))
        return self._training

    def _trained(self, asked: dict[int, int]) -> EpochResult:
        """Wait for the end of an epoch."""
        results: list[EpochResult] = list(self._pool.answers(asked).values())
        order = self._order()
        return EpochResult(
            torch.cat([r.loss for r in results])[order],
            GradientSample.join([r.gradients for r in results]).select(order),
            torch.cat([r.sampled for r in results])[order],
        )

    def measure(self, plans: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Evaluate every configuration of every row."""
        training, self._training = self._training, None
        if training is not None:
            # Errors of the epoch are raised first, before rows are exchanged.
            training()
        results = self._all("measure", argument=lambda part: [plans[row] for row in part])
        order = [row for part in self._parts for row in part]
        counts = [len(plans[row]) for row in order]

        def by_row(parts: list[Tensor]) -> Tensor:
            """Return the processes' results in the order of the rows."""
            found = dict(zip(order, torch.cat(parts).split(counts), strict=True))
            return torch.cat([found[row] for row in sorted(found)])

        losses = by_row([loss for loss, _, _ in results])
        found = [correct for _, correct, _ in results if correct is not None]
        for row, spent in zip(order, (each for r in results for each in r[2]), strict=True):
            self._costs[row].append(spent)
        self._balance()
        return losses, by_row(found) if found else None

    def score(self, split: Split) -> Tensor:
        """Return float64 [R, 2]: score in points and loss of every row on a whole split."""
        asked = {p: self._pool.ask(p, "score", self._number, split) for p, _ in self._busy()}
        scores = list(self._pool.answers(asked).values())
        return torch.cat(scores)[self._order()]

    def read(self, row: int) -> RowWeights:
        """Return copies of the whole state of a row."""
        return self.read_rows([row])[0]

    def read_rows(self, rows: Sequence[int]) -> list[RowWeights]:
        """Return the result of `read` for several rows, from all processes at once."""
        wanted = [[row for row in part if row in rows] for part in self._parts]
        serials = {
            process: self._pool.ask(
                process, "read", self._number, [self._parts[process].index(row) for row in part]
            )
            for process, part in enumerate(wanted)
            if part
        }
        found: dict[int, RowWeights] = {}
        for process, weights in self._pool.answers(serials).items():
            found.update(zip(wanted[process], weights, strict=True))
        return [found[row] for row in rows]

    def read_at_rest(self, rows: Sequence[int], seeds: Tensor) -> list[RowWeights]:
        """Return copies of some rows without optimizer state, with these `seeds`, bool [R, S]."""
        found = zip(rows, self.read_rows(rows), strict=True)
        return [weights.at_rest(seeds[row].tolist()) for row, weights in found]

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace a row; `state` [1, S] is the state of its slots."""
        self._state = None
        process, position = self._find(row)
        serial = self._pool.ask(process, "change", self._number, "write", position, weights, state)
        self._pool.answer(process, serial)

    def close(self) -> None:
        """Remove these rows from the processes, which belong to the pool."""
        self._client.rows.pop(self._number, None)
        self._client.seconds.pop(self._number, None)
        try:
            self._pool.answers(
                {
                    process: self._pool.ask(process, "close", self._number)
                    for process, _ in self._busy()
                }
            )
        except WorkerError:
            return  # a dead process has no rows

    def _balance(self) -> None:
        """Exchange rows between the slowest and the fastest process while this saves time."""
        if self._state is None or any(len(seen) < _EPOCHS_SEEN for seen in self._costs):
            return
        cost = [median(seen) for seen in self._costs]
        for _ in self._parts:
            own = [sum(cost[row] for row in part) for part in self._parts]
            self._client.seconds[self._number] = own
            loads = [sum(column) for column in zip(*self._client.seconds.values(), strict=True)]
            heavy, light = loads.index(max(loads)), loads.index(min(loads))
            gap = loads[heavy] - loads[light]
            pairs = [(i, j) for i in self._parts[heavy] for j in self._parts[light]]
            if heavy == light or not pairs:
                return
            one, other = min(pairs, key=lambda p: abs(gap / 2 - (cost[p[0]] - cost[p[1]])))
            moved = cost[one] - cost[other]
            if min(moved, gap - moved) < max(_WORTH_MOVING * loads[heavy], _LEAST_GAIN_S):
                return
            self._exchange((heavy, one), (light, other))

    def _exchange(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        """Exchange two rows, given as (process, row)."""
        assert self._state is not None
        weights = dict(zip((one[1], other[1]), self.read_rows([one[1], other[1]]), strict=True))
        serials = {}
        for (process, old), (_, row) in ((one, other), (other, one)):
            position = self._parts[process].index(old)
            state = self._state.select([row])
            serials[process] = self._pool.ask(
                process,
                "adopt",
                self._number,
                position,
                self._numbers[row],
                self._keys[row],
                weights[row],
                state,
            )
        self._pool.answers(serials)
        here, there = (self._parts[process].index(row) for process, row in (one, other))
        self._parts[one[0]][here], self._parts[other[0]][there] = other[1], one[1]

    def _order(self) -> Tensor:
        """Return int64 [R]: index of each row in the concatenated answers."""
        order = torch.tensor([row for part in self._parts for row in part])
        return order.argsort()

    def _busy(self) -> list[tuple[int, list[int]]]:
        """Return (process, its rows) for all processes with rows."""
        return [(process, part) for process, part in enumerate(self._parts) if part]

    def _find(self, row: int) -> tuple[int, int]:
        """Return the process of a row, and the row's index there."""
        for process, part in self._busy():
            if row in part:
                return process, part.index(row)
        raise IndexError(f"there is no row {row}")

    def _ask(self, *words: str, argument: Callable[[list[int]], Any]) -> dict[int, int]:
        """Send a request to every process; `argument` makes its last argument from its rows."""
        name, *rest = words
        return {
            process: self._pool.ask(process, name, self._number, *rest, argument(part))
            for process, part in self._busy()
        }

    def _all(self, *words: str, argument: Callable[[list[int]], Any]) -> list[Any]:
        """Send a request to all processes, then wait for all answers."""
        return list(self._pool.answers(self._ask(*words, argument=argument)).values())


def split_rows(rows: int, processes: int, others: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the rows of every process.

    Args:
        rows: number of rows.
        processes: number of processes.
        others: rows of other engines in every process, one sequence per engine.
    """
    taken = [sum(column) for column in zip(*others, strict=True)] or [0] * processes
    counts = [0] * processes
    for _ in range(rows):
        counts[min(range(processes), key=lambda p: taken[p] + counts[p])] += 1
    bounds = [0, *accumulate(counts)]
    return [list(range(start, stop)) for start, stop in pairwise(bounds)]
