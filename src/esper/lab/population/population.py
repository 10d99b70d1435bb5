"""`Population`: hundreds of evolving networks behind one interface.

    pop = esper.Population(task="digits", rows=64, seed=7)
    signals = pop.reset()
    signals = pop.step(actions)

Rows may belong to several tasks. Rows of one architecture run together, even if their tasks differ
otherwise. The caller sees one population, ordered by task, with as many slots as the task with the
most slots.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.lab.population.engine import (
    Condition,
    PopulationConfig,
    Roster,
    StackKey,
    Strategy,
    StrategyError,
    naming_rows_that_fit,
)
from esper.lab.population.stacked import StackedEngine
from esper.lab.population.strategy import (
    count_processes,
    find_tasks,
    make_engines,
    pick_strategy,
    place_data,
    share_out,
)
from esper.lab.population.task_group import (
    PopulationRows,
    TaskGroup,
    first_difference,
    join_rows,
    merge_signals,
    merge_views,
    take_rows,
)
from esper.lab.population.worker_pool import has_pool
from esper.lab.population.workers import WorkerClient
from esper.lab.tasks.dataset import TaskData
from esper.lab.tasks.splits import Split
from esper.lab.tasks.task import DataCache, Task
from esper.leyline.actions import Actions, decode_actions
from esper.leyline.errors import CheckpointError, UsageError, warn
from esper.leyline.rules import RuleView
from esper.leyline.signals import Signals
from esper.utils.manifest import restoring
from esper.utils.process import choose_device
from esper.utils.randomness import derive_seed
from esper.utils.storage import check_count

_log = logging.getLogger(__name__)

Tasks = str | Task | Sequence[str | Task]


class Population(PopulationRows):
    """Many networks that grow side by side; each is a row.

    Args:
        task: a task, or several; rows are shared out among them.
        rows: number of rows, or one number per task.
        seed: seed of the run; row i does not depend on other rows.
        device: 'auto', 'cpu' or 'cuda'.
        strategy: 'auto', 'sequential', 'stacked' or 'workers'; `strategy` and `reason` of the
            population say what runs and why.
        horizon: epochs of an episode; the task's by default.
        data: path of the data files, or the data itself, one per task.
        config: settings shared by all rows.
        row_seeds: seeds of the rows instead of 0, 1, 2, ...
    """

    def __init__(
        self,
        task: Tasks,
        rows: int | Sequence[int],
        seed: int = 0,
        device: str = "auto",
        strategy: Strategy = "auto",
        *,
        horizon: int | None = None,
        data: str | Path | Sequence[TaskData] | None = None,
        config: PopulationConfig | None = None,
        row_seeds: Sequence[int] | None = None,
    ) -> None:
        """Share rows out among tasks; networks are built by `reset`."""
        self.config = config or PopulationConfig()
        self.seed = seed
        self.device = choose_device(device)
        self._horizon = horizon
        self._shelf: DataCache | None = None
        given: Sequence[TaskData] | None = None
        if data is None or isinstance(data, str | Path):
            self._shelf = DataCache(data, self.device)
        else:
            given = data
        self.roster = self._enlist(task, rows, given)
        self.row_seeds = self.checked_seeds(range(self.rows) if row_seeds is None else row_seeds)
        self.num_slots = self._most_slots()
        self._groups: list[TaskGroup] = []
        self._parts: list[list[int]] = []
        """Row indices of every group."""
        self._stacks: dict[tuple[StackKey, int], list[StackedEngine]] = {}
        """Unused stacks, by architecture and number of rows."""
        self._is_midway = False
        """Whether a step is in progress."""
        self.meanwhile: Callable[[], None] | None = None
        """Called in every step after all epochs were queued, while devices train."""
        self._worker_client: WorkerClient | None = None
        self._asked: Strategy = strategy
        self._refusal: str | None = None
        self.strategy: Strategy
        self.reason: str
        self._pick()

    @property
    def groups(self) -> tuple[TaskGroup, ...]:
        """The groups of rows that run together."""
        return tuple(self._groups)

    def locate(self, row: int) -> tuple[TaskGroup, int]:
        """Return the group of a row, and the row's index in it."""
        self._need_rows()
        parts = zip(self._groups, self._parts, strict=True)
        return next((group, part.index(row)) for group, part in parts if row in part)

    def assign(
        self,
        tasks: Tasks,
        rows: int | Sequence[int] | None = None,
        data: Sequence[TaskData] | None = None,
    ) -> None:
        """Change the tasks of the rows at the next reset; row seeds start again at 0, 1, 2, ...

        Worker processes and data are kept. On a device, captured steps are kept for every
        architecture whose number of rows does not change.

        Args:
            tasks: a task, or several; rows are shared out among them.
            rows: number of rows, or one number per task; None keeps the number.
            data: the data itself, one per task; None reads it from the same place as before.
        """
        roster = self._enlist(tasks, self.rows if rows is None else rows, data)
        self._set_stacks_aside()
        self.roster, self.row_seeds = roster, list(range(roster.rows))
        self.num_slots = self._most_slots()
        if self._shelf is not None:
            self._shelf.forget_all_but(self.tasks)

    def reset(self, row_seeds: Sequence[int] | None = None) -> Signals:
        """Build every row, then train and validate the first epoch.

        Worker processes, loaded data and, on a device, captured steps are kept from one reset to
        the next.

        Args:
            row_seeds: new seeds of the rows, one for each; None keeps the seeds.
        """
        if row_seeds is not None:
            self.row_seeds = self.checked_seeds(row_seeds)
        self.build()
        self._is_midway = True
        for group in self._groups:
            with self._memory_of(group):
                group.start()
        return self._live()

    def build(self) -> None:
        """Build every row without training, before a saved state is restored."""
        self._set_stacks_aside()
        aside = [engine for engines in self._stacks.values() for engine in engines]
        try:
            self._make_groups()
        finally:
            used = {id(group.engine) for group in self._groups}
            for engine in aside:
                if id(engine) not in used:
                    engine.close()
            self._stacks = {}

    def step(self, actions: Actions) -> Signals:
        """Carry out one action per row, then train and measure one epoch."""
        self._need_rows()
        command = decode_actions({head: value.cpu() for head, value in actions.items()})
        if len(command.op) != self.rows:
            raise UsageError(f"{self.rows} rows need as many actions, got {len(command.op)}")
        self._is_midway = True
        for group, part in zip(self._groups, self._parts, strict=True):
            with self._memory_of(group):
                group.act(command.select(part))
        return self._live()

    def signals(self) -> Signals:
        """Return the current signals, on the population's device."""
        self._need_rows()
        parts = [group.signals() for group in self._groups]
        return merge_signals(parts, self.num_slots, self._order()).to(self.device)

    def panics(self) -> Tensor:
        """Return int64 [R], a `Panic`: why the governor rolled a row back in the last epoch."""
        self._need_rows()
        return torch.cat([group.panic for group in self._groups])[self._order()].to(self.device)

    def view(self) -> RuleView:
        """Return the inputs of the legality rules, for all rows."""
        self._need_rows()
        parts = [group.table.view() for group in self._groups]
        return merge_views(parts, self.num_slots, self._order())

    def results_on(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return scores in points and losses on a whole split, each float64 [R]."""
        self._need_rows()
        found = []
        for group in self._groups:
            with self._memory_of(group):
                found.append(group.engine.score(split))
        scores, losses = torch.cat(found)[self._order()].unbind(1)
        return scores, losses

    def keep_networks(self, which: Tensor) -> None:
        """Keep copies of the networks of rows, bool [R], in place of those kept before."""
        self._need_rows()
        for group, part in zip(self._groups, self._parts, strict=True):
            with self._memory_of(group):
                group.keep_networks(which[part])

    def bring_back(self) -> None:
        """Replace every network by its kept copy, to score it."""
        self._need_rows()
        for group in self._groups:
            with self._memory_of(group):
                group.bring_back()

    def snapshot(self) -> dict[str, Any]:
        """Return the state of every row as plain data and tensors."""
        self._need_rows()
        return {
            "made": self.made(),
            "seed": self.seed,
            "row_seeds": list(self.row_seeds),
            "rows": [
                join_rows([group.snapshot() for group in groups])
                for groups in self._groups_by_architecture()
            ],
        }

    def restore(self, saved: dict[str, Any]) -> Signals:
        """Restore a snapshot of a population with the same settings, of any strategy."""
        self.refuse_foreign(saved)
        with restoring("of the population"):
            seed = check_count(saved["seed"], "seed")
            seeds = [check_count(seed, "row_seeds") for seed in saved["row_seeds"]]
            self._clear()
            self.seed, self.row_seeds = seed, self.checked_seeds(seeds)
            try:
                self._fill(saved["rows"])
            except BaseException:
                # A population that was built in part is unusable.
                self._clear()
                raise
        return self.signals()

    def refuse_foreign(self, saved: dict[str, Any]) -> None:
        """Raise unless a snapshot is of a population with the same settings."""
        needed = {"made", "seed", "row_seeds", "rows"}
        if not isinstance(saved, Mapping) or not needed <= saved.keys():
            raise CheckpointError("this is no snapshot of a population; take one by snapshot()")
        difference = first_difference(saved["made"], self.made())
        if difference is not None:
            raise CheckpointError(
                f"the snapshot is of a population with {difference[0]}, this one has "
                f"{difference[1]}; make it the same way"
            )

    def snapshot_rows(self) -> list[dict[str, Any]]:
        """Return the state of each row separately, so that rows can be recombined."""
        self._need_rows()
        return [self._snapshot_of(row) for row in range(self.rows)]

    def restore_rows(
        self, seed: int, row_seeds: Sequence[int], rows: Sequence[dict[str, Any]]
    ) -> Signals:
        """Restore every row from states of `snapshot_rows`, with the seeds it was built from."""
        self.seed, self.row_seeds = seed, self.checked_seeds(row_seeds)
        self._clear()
        self._fill(
            [
                join_rows([rows[place] for place in places])
                for places in self.roster.architectures.values()
            ]
        )
        return self.signals()

    def fork(self, rows: Sequence[int]) -> Population:
        """Return a new population of copies of these rows, in exactly their state.

        A row may be named several times. Rows are in the given order, grouped by task. A fork
        shares data and processes with its population; close both.
        """
        self._need_rows()
        if not rows or min(rows) < 0 or max(rows) >= self.rows:
            raise UsageError(f"rows must be some of 0 to {self.rows - 1}, got {list(rows)}")
        twin = copy.copy(self)
        twin.roster, chosen = self.roster.take(rows)
        twin.row_seeds = [self.row_seeds[row] for row in chosen]
        twin._groups, twin._parts, twin._stacks = [], [], {}
        twin.meanwhile = None
        twin._worker_client = None if self._worker_client is None else self._worker_client.share()
        twin._pick()
        twin._fill(
            [
                join_rows([self._snapshot_of(chosen[place]) for place in places])
                for places in twin.roster.architectures.values()
            ]
        )
        return twin

    def close(self) -> None:
        """Free processes and threads; `reset` starts anew."""
        self._clear()
        if self._worker_client is not None:
            self._worker_client.release()
        self._worker_client = None

    def _clear(self) -> None:
        """Free the rows; processes stay."""
        stacks = [engine for engines in self._stacks.values() for engine in engines]
        for engine in [*stacks, *(group.engine for group in self._groups)]:
            engine.close()
        self._groups, self._parts, self._stacks = [], [], {}

    def _set_stacks_aside(self) -> None:
        """Free the rows, but keep stacks that can be reused."""
        for group in self._groups:
            # A step that an error interrupted may have left any state.
            if isinstance(group.engine, StackedEngine) and not self._is_midway:
                self._stacks.setdefault((group.architecture, group.rows), []).append(group.engine)
            else:
                group.engine.close()
        self._groups, self._parts, self._is_midway = [], [], False

    def _live(self) -> Signals:
        """Train and measure one epoch of all rows; asynchronous work starts for all tasks first."""
        self._is_midway = True
        for group in self._groups:
            with self._memory_of(group):
                group.begin()
        if self.meanwhile is not None:
            self.meanwhile()
        for group in self._groups:
            with self._memory_of(group):
                group.live()
        self._is_midway = False
        return self.signals()

    def _pick(self) -> None:
        """Choose the strategy of the rows, and log it."""
        if self._refusal is not None:
            self.strategy, self.reason = "sequential", self._refusal
            return
        samples = sum(
            self.conditions[index].horizon * self.conditions[index].data.samples_per_step
            for index in self.task_of_row
        )
        self.strategy, self.reason = pick_strategy(
            self._asked,
            self.device,
            self.config,
            rows=self.rows,
            samples=samples,
            has_processes=has_pool(),
        )
        _log.info("population of %d rows runs %s: %s", self.rows, self.strategy, self.reason)

    def _prepare_worker_client(self) -> WorkerClient | None:
        """Return worker processes with the tasks loaded, if the strategy uses processes."""
        if self.strategy != "workers":
            return None
        if self._worker_client is not None and not self._worker_client.is_usable:
            self._worker_client.release()
            self._worker_client = None
        if self._worker_client is None:
            count = count_processes(self.config, self.rows)
            try:
                self._worker_client = WorkerClient(self.conditions, count)
            except StrategyError as error:
                if self._asked != "auto":
                    raise
                self._refusal = str(error)
                self._pick()
                warn(f"rows run one after another: {error}")
        else:
            self._worker_client.use(self.conditions)
        return self._worker_client

    def _enlist(
        self, tasks: Tasks, rows: int | Sequence[int], data: Sequence[TaskData] | None
    ) -> Roster:
        """Return the roster of these tasks, without changing the population."""
        made = find_tasks(tasks, self._horizon)
        counts = share_out(rows, len(made))
        if data is not None:
            found = place_data(made, data, self.device)
        elif self._shelf is not None:
            found = [self._shelf.load(task) for task in made]
        else:
            raise UsageError("this population was given its data; give that of other tasks too")
        conditions = [Condition(task, each) for task, each in zip(made, found, strict=True)]
        return Roster.of(conditions, [i for i, count in enumerate(counts) for _ in range(count)])

    def checked_seeds(self, seeds: Sequence[int]) -> list[int]:
        """Return the seeds of the rows; raise if their number is wrong."""
        if len(seeds) != self.rows:
            raise UsageError(f"row_seeds must have {self.rows} entries, got {len(seeds)}")
        return list(seeds)

    def _most_slots(self) -> int:
        return max(len(task.slot_paths) for task in self.tasks)

    def _make_groups(self) -> None:
        """Build new rows; reuse stacks of the same architecture and size."""
        client = self._prepare_worker_client()
        groups: list[TaskGroup] = []
        parts: list[list[int]] = []
        for architecture, rows in self.roster.architectures.items():
            conditions = [self.roster.condition(row) for row in rows]
            keys = [derive_seed(self.seed, self.row_seeds[row], "row") for row in rows]

            def take(count: int, own: StackKey = architecture) -> StackedEngine | None:
                waiting = self._stacks.get((own, count))
                return waiting.pop(0) if waiting else None

            with naming_rows_that_fit(len(rows), at_once=False):
                engines = make_engines(
                    conditions, keys, self.strategy, self.config, client, take, len(groups)
                )
                for part, engine in engines:
                    groups.append(
                        TaskGroup(
                            architecture,
                            [conditions[place] for place in part],
                            [keys[place] for place in part],
                            engine,
                            self.config,
                        )
                    )
                    parts.append([rows[place] for place in part])
        self._groups, self._parts = groups, parts

    def _order(self) -> Tensor:
        """Return int64 [R]: index of each row in the concatenated groups."""
        return torch.tensor([row for part in self._parts for row in part]).argsort()

    def _groups_by_architecture(self) -> list[list[TaskGroup]]:
        """Return the groups of every architecture."""
        return [
            [group for group in self._groups if group.architecture == architecture]
            for architecture in self.roster.architectures
        ]

    def _fill(self, saved: Sequence[dict[str, Any]]) -> None:
        """Build every row and restore its saved state; `saved` is by architecture."""
        self._make_groups()
        for rows, groups in zip(saved, self._groups_by_architecture(), strict=True):
            start = 0
            for group in groups:
                with self._memory_of(group):
                    group.restore(take_rows(rows, start, start + group.rows))
                start += group.rows

    def _snapshot_of(self, row: int) -> dict[str, Any]:
        group, place = self.locate(row)
        return group.snapshot([place])

    def _memory_of(self, group: TaskGroup) -> AbstractContextManager[None]:
        """Return a context in which an out-of-memory error says how many rows would fit."""
        resident = 0
        if self.device.type == "cuda":
            resident = torch.cuda.memory_allocated(self.device)
        return naming_rows_that_fit(group.rows, at_once=group.engine.is_stacked, resident=resident)

    def _need_rows(self) -> None:
        if not self._groups:
            raise UsageError("the population has no rows yet; call reset() first")
