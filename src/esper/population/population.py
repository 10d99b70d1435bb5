"""`Population`: hundreds of evolving networks behind one interface.

    pop = esper.Population(task="digits", rows=64, seed=7)
    signals = pop.reset()
    signals = pop.step(actions)

Rows may belong to several tasks; the caller sees one population whose slots are those of the task
with the most of them.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import blueprint_names
from esper.leyline.actions import Actions, decode_actions
from esper.leyline.errors import CheckpointError, EsperWarning, UsageError
from esper.leyline.process import choose_device
from esper.leyline.randomness import derive_seed
from esper.leyline.rules import Masks, RuleView, build_masks
from esper.leyline.signals import Signals
from esper.leyline.storage import load_tree, save_tree
from esper.population.device import naming_rows_that_fit
from esper.population.engine import EXECUTION_SETTINGS, PopulationConfig, Strategy, StrategyError
from esper.population.stacked import StackedEngine
from esper.population.strategy import (
    count_processes,
    load_data,
    make_engines,
    pick_strategy,
    share_out,
)
from esper.population.task_group import (
    TaskGroup,
    first_difference,
    join_rows,
    merge_signals,
    merge_views,
    score_test_split,
    take_rows,
)
from esper.population.workers.client import WorkerClient
from esper.population.workers.pool import has_pool
from esper.tasks.dataset import TaskData
from esper.tasks.task import Task, get_task

KIND = "population"
VERSION = 4

_log = logging.getLogger(__name__)


class Population:
    """Rows of evolving networks.

    Args:
        task: a task, or several; rows are shared out among them.
        rows: how many rows, or one number per task.
        seed: seed of the run; row i of it is the same network whatever else runs beside it.
        device: 'auto', 'cpu' or 'cuda'.
        strategy: 'auto', 'sequential', 'stacked' or 'workers'; `strategy` and `reason` of the
            population say what runs and why.
        horizon: epochs of an episode; the task's by default.
        data: where data files lie, or the data itself, once for every task.
        config: settings shared by all rows.
        row_seeds: seeds of the rows instead of 0, 1, 2, ...
    """

    def __init__(
        self,
        task: str | Task | Sequence[str | Task],
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
        tasks = [task] if isinstance(task, str | Task) else list(task)
        self.tasks = [get_task(each) if isinstance(each, str) else each for each in tasks]
        if horizon is not None:
            # Schedules of the learning rate follow the horizon too.
            self.tasks = [type(t)(t.config.replace(horizon=horizon)) for t in self.tasks]
        counts = share_out(rows, len(self.tasks))
        self.rows = sum(counts)
        seeds = list(range(self.rows)) if row_seeds is None else list(row_seeds)
        if len(seeds) != self.rows:
            raise UsageError(f"row_seeds must have {self.rows} entries, got {len(seeds)}")
        self.row_seeds = seeds
        self._task_of_row = [index for index, count in enumerate(counts) for _ in range(count)]
        self._data = load_data(self.tasks, data, self.device)
        self.num_slots = max(len(each.slot_paths) for each in self.tasks)
        self._groups: list[TaskGroup] = []
        self._is_midway = False
        """Whether a step has begun and not ended."""
        self._worker_client: WorkerClient | None = None
        self._asked: Strategy = strategy
        self._refusal: str | None = None
        self.strategy: Strategy
        self.reason: str
        self._pick()

    @staticmethod
    def known_blueprints() -> tuple[str, ...]:
        """Return the name of every blueprint at the index that is its id."""
        return blueprint_names()

    @property
    def groups(self) -> tuple[TaskGroup, ...]:
        """The groups of rows that run together."""
        return tuple(self._groups)

    def reset(self, row_seeds: Sequence[int] | None = None) -> Signals:
        """Build every row afresh, train and validate the first epoch.

        Worker processes, loaded data and, on a device, captured steps are kept from one reset to
        the next.

        Args:
            row_seeds: seeds of the rows from now on, one for each; the same as before if None.
        """
        if row_seeds is not None:
            if len(row_seeds) != self.rows:
                raise UsageError(f"row_seeds must have {self.rows} entries, got {len(row_seeds)}")
            self.row_seeds = list(row_seeds)
        self.build()
        self._is_midway = True
        for group in self._groups:
            with self._memory_of(group):
                group.assume(group.state)
        return self._live()

    def build(self) -> None:
        """Build every row afresh and train nothing yet, for whoever has a state for them."""
        stacks: list[list[StackedEngine]] = [[] for _ in self.tasks]
        for mine, groups in zip(stacks, self._groups_by_task(), strict=True):
            for engine in (group.engine for group in groups):
                # What an error broke off may have left anything behind.
                if isinstance(engine, StackedEngine) and not self._is_midway:
                    mine.append(engine)
                else:
                    engine.close()
        self._groups, self._is_midway = [], False
        try:
            self._groups = self._make_groups(stacks)
        except BaseException:
            for engine in (each for mine in stacks for each in mine):
                engine.close()
            raise

    def step(self, actions: Actions) -> Signals:
        """Carry out one action per row and live through the epoch that follows."""
        self._need_rows()
        command = decode_actions({head: value.cpu() for head, value in actions.items()})
        if len(command.op) != self.rows:
            raise UsageError(f"{self.rows} rows need as many actions, got {len(command.op)}")
        start, self._is_midway = 0, True
        for group in self._groups:
            part = slice(start, start + group.rows)
            own = {
                field.name: getattr(command, field.name)[part]
                for field in dataclasses.fields(command)
            }
            with self._memory_of(group):
                group.act(dataclasses.replace(command, **own))
            start += group.rows
        return self._live()

    def signals(self) -> Signals:
        """Return what controllers see now, on the population's device."""
        self._need_rows()
        return merge_signals([c.signals() for c in self._groups], self.num_slots).to(self.device)

    def panics(self) -> Tensor:
        """Return int64 [R]: why the governor took a row back in the last epoch, a `Panic`."""
        self._need_rows()
        return torch.cat([group.panic.to(self.device) for group in self._groups])

    def view(self) -> RuleView:
        """Return what legality depends on, for all rows."""
        self._need_rows()
        return merge_views([group.view() for group in self._groups], self.num_slots)

    def masks(self) -> Masks:
        """Return what is legal now."""
        return build_masks(self.view(), self.config.lifecycle.effective_rules)

    def test_scores(self) -> Tensor:
        """Return float64 [R]: every row's score on the untouched test split, in points."""
        self._need_rows()
        return torch.cat(
            [
                score_test_split(group, data)
                for groups, data in zip(self._groups_by_task(), self._data, strict=True)
                for group in groups
            ]
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the state of every row as plain data and tensors."""
        self._need_rows()
        return {
            "made": self._made(),
            "seed": self.seed,
            "row_seeds": list(self.row_seeds),
            "rows": [
                join_rows([group.snapshot() for group in groups])
                for groups in self._groups_by_task()
            ],
        }

    def restore(self, saved: dict[str, Any]) -> Signals:
        """Go back to a snapshot of a population made the same way, by whichever strategy."""
        if not {"made", "seed", "row_seeds", "rows"} <= saved.keys():
            raise CheckpointError("this is no snapshot of a population; take one by snapshot()")
        difference = first_difference(saved["made"], self._made())
        if difference is not None:
            raise CheckpointError(
                f"the snapshot is of a population with {difference[0]}, this one has "
                f"{difference[1]}; make it the same way"
            )
        self.seed, self.row_seeds = saved["seed"], list(saved["row_seeds"])
        self._clear()
        self._fill(saved["rows"])
        return self.signals()

    def fork(self, rows: Sequence[int]) -> Population:
        """Return a new population of copies of these rows, in exactly their state.

        A row may be named several times. Rows come in the order given, task by task. A fork shares
        data and processes with the population it comes from; both are to be closed.
        """
        self._need_rows()
        if not rows or min(rows) < 0 or max(rows) >= self.rows:
            raise UsageError(f"rows must be some of 0 to {self.rows - 1}, got {list(rows)}")
        chosen = sorted(rows, key=lambda row: self._task_of_row[row])
        kept = sorted({self._task_of_row[row] for row in chosen})
        twin = copy.copy(self)
        twin.tasks = [self.tasks[index] for index in kept]
        twin._data = [self._data[index] for index in kept]
        twin._task_of_row = [kept.index(self._task_of_row[row]) for row in chosen]
        twin.rows = len(chosen)
        twin.row_seeds = [self.row_seeds[row] for row in chosen]
        twin._groups = []
        twin._worker_client = None if self._worker_client is None else self._worker_client.share()
        twin._pick()
        parts = [[row for row in chosen if self._task_of_row[row] == index] for index in kept]
        twin._fill([join_rows([self._snapshot_of(row) for row in part]) for part in parts])
        return twin

    def save(self, folder: str | Path) -> None:
        """Write the state of every row into a folder."""
        save_tree(Path(folder), self.snapshot(), kind=KIND, version=VERSION)

    def load(self, folder: str | Path) -> Signals:
        """Go back to what `save` wrote."""
        saved, _ = load_tree(Path(folder), kind=KIND, version=VERSION)
        return self.restore(saved)

    def close(self) -> None:
        """Free processes and threads; `reset` starts anew."""
        self._clear()
        if self._worker_client is not None:
            self._worker_client.release()
        self._worker_client = None

    def _clear(self) -> None:
        """Free the rows; processes stay."""
        for group in self._groups:
            group.engine.close()
        self._groups = []

    def _live(self) -> Signals:
        """Let all rows live through an epoch; what runs elsewhere begins for all tasks at once."""
        self._is_midway = True
        for group in self._groups:
            group.announce()
        for group in self._groups:
            with self._memory_of(group):
                group.live()
        self._is_midway = False
        return self.signals()

    def _pick(self) -> None:
        """Decide how the rows run, and say so."""
        if self._refusal is not None:
            self.strategy, self.reason = "sequential", self._refusal
            return
        samples = sum(
            self.tasks[index].config.horizon * self._data[index].samples_per_step
            for index in self._task_of_row
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
        """Return processes that know the tasks, where rows run in some; start them if need be."""
        if self.strategy != "workers":
            return None
        if self._worker_client is not None and not self._worker_client.is_usable:
            self._worker_client.release()
            self._worker_client = None
        if self._worker_client is None:
            count = count_processes(self.config, self.rows)
            try:
                self._worker_client = WorkerClient(self.tasks, self._data, self.config, count)
            except StrategyError as error:
                if self._asked != "auto":
                    raise
                self._refusal = str(error)
                self._pick()
                warnings.warn(f"rows run one after another: {error}", EsperWarning, stacklevel=5)
        return self._worker_client

    def _made(self) -> dict[str, Any]:
        """Return what a snapshot depends on: everything but how the rows are executed."""
        config = {
            name: value
            for name, value in self.config.to_mapping().items()
            if name not in EXECUTION_SETTINGS
        }
        rows = [self._task_of_row.count(index) for index in range(len(self.tasks))]
        return {
            "tasks": [task.name for task in self.tasks],
            "rows": rows,
            "settings": config,
            "task settings": [task.config.to_mapping() for task in self.tasks],
            "blueprints": list(blueprint_names()),
        }

    def _make_groups(self, stacks: Sequence[Sequence[StackedEngine]] = ()) -> list[TaskGroup]:
        """Return new rows; `stacks` that held them before, by task, begin again."""
        groups = []
        client = self._prepare_worker_client()
        for index, (task, data) in enumerate(zip(self.tasks, self._data, strict=True)):
            mine = [row for row in range(self.rows) if self._task_of_row[row] == index]
            keys = [derive_seed(self.seed, self.row_seeds[row], "row") for row in mine]
            with naming_rows_that_fit(len(mine), at_once=False):
                old = stacks[index] if stacks else ()
                engines = make_engines(task, data, keys, self.strategy, self.config, client, old)
                for part, engine in engines:
                    groups.append(TaskGroup(task, data, part, engine, self.config))
        return groups

    def _groups_by_task(self) -> list[list[TaskGroup]]:
        """Return the groups of every task."""
        groups: list[list[TaskGroup]] = [[] for _ in self.tasks]
        row = 0
        for group in self._groups:
            groups[self._task_of_row[row]].append(group)
            row += group.rows
        return groups

    def _fill(self, saved: Sequence[dict[str, Any]]) -> None:
        """Build every row and bring it into its saved state; `saved` is by task."""
        self._groups = self._make_groups()
        for rows, groups in zip(saved, self._groups_by_task(), strict=True):
            start = 0
            for group in groups:
                with self._memory_of(group):
                    group.restore(take_rows(rows, start, start + group.rows))
                start += group.rows

    def _snapshot_of(self, row: int) -> dict[str, Any]:
        for group in self._groups:
            if row < group.rows:
                return group.snapshot([row])
            row -= group.rows
        raise IndexError(f"there is no row {row}")

    def _memory_of(self, group: TaskGroup) -> AbstractContextManager[None]:
        """Return a block in which running out of memory names the rows that would fit."""
        resident = 0
        if self.device.type == "cuda":
            resident = torch.cuda.memory_allocated(self.device)
        return naming_rows_that_fit(group.rows, at_once=group.engine.is_stacked, resident=resident)

    def _need_rows(self) -> None:
        if not self._groups:
            raise UsageError("the population has no rows yet; call reset() first")
