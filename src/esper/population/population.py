"""`Population`: hundreds of evolving networks behind one interface.

    pop = esper.Population(task="digits", rows=64, seed=7)
    signals = pop.reset()
    signals = pop.step(actions)

Rows may belong to several tasks; the caller sees one population whose slots are those of the task
with the most of them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import blueprint_names, selectable
from esper.leyline.actions import Actions, decode_actions
from esper.leyline.errors import CheckpointError, UsageError
from esper.leyline.masks import Masks, build_masks
from esper.leyline.randomness import derive_seed
from esper.leyline.rules import RuleView
from esper.leyline.signals import Signals
from esper.leyline.storage import load_tree, save_tree
from esper.population.cohort import Cohort
from esper.population.config import PopulationConfig, Strategy
from esper.population.merging import merge_signals, merge_views
from esper.population.strategy import make_engines, pick_strategy
from esper.tasks.registry import get_task
from esper.tasks.task import Task

KIND = "population"
VERSION = 1

_log = logging.getLogger(__name__)


class Population:
    """Rows of evolving networks.

    Args:
        task: a task, or several; rows are shared out among them.
        rows: how many rows, or one number per task.
        seed: seed of the run; row i of it is the same network whatever else runs beside it.
        device: 'auto', 'cpu' or 'cuda'.
        strategy: 'auto', 'sequential', 'stacked' or 'workers'.
        horizon: epochs of an episode; the task's by default.
        data: where data files lie.
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
        data: str | Path | None = None,
        config: PopulationConfig | None = None,
        row_seeds: Sequence[int] | None = None,
    ) -> None:
        """Share rows out among tasks; networks are built by `reset`."""
        self.config = config or PopulationConfig()
        self.seed = seed
        self.device = _choose_device(device)
        tasks = [task] if isinstance(task, str | Task) else list(task)
        self.tasks = [get_task(each) if isinstance(each, str) else each for each in tasks]
        counts = _share_out(rows, len(self.tasks))
        self.rows = sum(counts)
        seeds = list(range(self.rows)) if row_seeds is None else list(row_seeds)
        if len(seeds) != self.rows:
            raise UsageError(f"row_seeds must have {self.rows} entries, got {len(seeds)}")
        self.row_seeds = seeds
        self._task_of_row = [index for index, count in enumerate(counts) for _ in range(count)]
        self._horizon = horizon
        self._data_path = data
        self._data = [each.load(data, device=self.device) for each in self.tasks]
        self.strategy, self.reason = pick_strategy(strategy, self.device, self.config)
        _log.info("population of %d rows runs %s: %s", self.rows, self.strategy, self.reason)
        self.num_slots = max(len(each.slot_paths) for each in self.tasks)
        self._cohorts: list[Cohort] = []

    @property
    def cohorts(self) -> tuple[Cohort, ...]:
        """The groups of rows that run together."""
        return tuple(self._cohorts)

    def reset(self) -> Signals:
        """Build every row afresh, train and validate the first epoch."""
        self.close()
        self._cohorts = self._make_cohorts()
        for cohort in self._cohorts:
            cohort.start()
        return self.signals()

    def step(self, actions: Actions) -> Signals:
        """Carry out one action per row and live through the epoch that follows."""
        self._need_rows()
        command = decode_actions({head: value.cpu() for head, value in actions.items()})
        if len(command.op) != self.rows:
            raise UsageError(f"{self.rows} rows need as many actions, got {len(command.op)}")
        start = 0
        for cohort in self._cohorts:
            part = slice(start, start + cohort.rows)
            cohort.step(
                dataclasses.replace(
                    command,
                    **{
                        field.name: getattr(command, field.name)[part]
                        for field in dataclasses.fields(command)
                    },
                )
            )
            start += cohort.rows
        return self.signals()

    def signals(self) -> Signals:
        """Return what controllers see now, on the population's device."""
        self._need_rows()
        return merge_signals([c.signals() for c in self._cohorts], self.num_slots).to(self.device)

    def view(self) -> RuleView:
        """Return what legality depends on, for all rows."""
        self._need_rows()
        return merge_views([cohort.view() for cohort in self._cohorts], self.num_slots)

    def masks(self) -> Masks:
        """Return what is legal now."""
        return build_masks(self.view(), self.config.lifecycle.effective_rules)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of every row as plain data and tensors."""
        self._need_rows()
        return {
            "tasks": [task.name for task in self.tasks],
            "row_seeds": list(self.row_seeds),
            "cohorts": [cohort.snapshot() for cohort in self._cohorts],
        }

    def restore(self, saved: dict[str, Any]) -> Signals:
        """Go back to a snapshot of a population made the same way."""
        names = [task.name for task in self.tasks]
        if saved["tasks"] != names or len(saved["row_seeds"]) != self.rows:
            raise CheckpointError(
                f"the snapshot is of {len(saved['row_seeds'])} rows of {saved['tasks']}, this "
                f"population has {self.rows} rows of {names}; make it the same way"
            )
        self.row_seeds = list(saved["row_seeds"])
        self.close()
        self._cohorts = self._make_cohorts()
        for cohort, state in zip(self._cohorts, saved["cohorts"], strict=True):
            cohort.restore(state)
        return self.signals()

    def fork(self, rows: Sequence[int]) -> Population:
        """Return a new population of copies of these rows, in exactly their state."""
        self._need_rows()
        rows = sorted(rows)
        if not rows or rows[0] < 0 or rows[-1] >= self.rows:
            raise UsageError(f"rows must be some of 0 to {self.rows - 1}, got {rows}")
        chosen = [index for index in range(len(self.tasks)) if index in self._tasks_of(rows)]
        copy = Population(
            [self.tasks[index] for index in chosen],
            [sum(self._task_of_row[row] == index for row in rows) for index in chosen],
            self.seed,
            str(self.device),
            self.strategy,
            horizon=self._horizon,
            data=self._data_path,
            config=self.config,
            row_seeds=[self.row_seeds[row] for row in rows],
        )
        copy._cohorts = copy._make_cohorts()
        parts = self._snapshots_of(rows)
        start = 0
        for cohort in copy._cohorts:
            cohort.restore(_join_snapshots(parts[start : start + cohort.rows]))
            start += cohort.rows
        return copy

    def save(self, folder: str | Path) -> None:
        """Write the state of every row into a folder."""
        save_tree(Path(folder), self.snapshot(), kind=KIND, version=VERSION)

    def load(self, folder: str | Path) -> Signals:
        """Go back to what `save` wrote."""
        saved, _ = load_tree(Path(folder), kind=KIND, version=VERSION)
        return self.restore(saved)

    def close(self) -> None:
        """Free processes and threads; `reset` starts anew."""
        for cohort in self._cohorts:
            cohort.engine.close()
        self._cohorts = []

    def _make_cohorts(self) -> list[Cohort]:
        cohorts = []
        for index, (task, data) in enumerate(zip(self.tasks, self._data, strict=True)):
            mine = [row for row in range(self.rows) if self._task_of_row[row] == index]
            keys = [derive_seed(self.seed, self.row_seeds[row], "row") for row in mine]
            fits = _fitting(task)
            for part, engine in make_engines(task, data, keys, self.strategy, self.config):
                horizon = self._horizon or task.config.horizon
                cohorts.append(Cohort(task, part, engine, fits, self.config, horizon))
        return cohorts

    def _tasks_of(self, rows: Sequence[int]) -> set[int]:
        return {self._task_of_row[row] for row in rows}

    def _snapshots_of(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return one snapshot per row, in order."""
        found, start = [], 0
        for cohort in self._cohorts:
            for row in range(cohort.rows):
                if start + row in rows:
                    found.append(cohort.snapshot([row]))
            start += cohort.rows
        return found

    def _need_rows(self) -> None:
        if not self._cohorts:
            raise UsageError("the population has no rows yet; call reset() first")


def _fitting(task: Task) -> Tensor:
    """Return bool [S, B]: the blueprints that may be germinated in each slot of a task."""
    fits = torch.zeros((len(task.slot_paths), len(blueprint_names())), dtype=torch.bool)
    fits[:, list(selectable(task.topology))] = True
    return fits


def _share_out(rows: int | Sequence[int], tasks: int) -> list[int]:
    counts = (
        list(rows)
        if not isinstance(rows, int)
        else [rows // tasks + (index < rows % tasks) for index in range(tasks)]
    )
    if len(counts) != tasks or min(counts, default=0) < 1:
        raise UsageError(f"every one of {tasks} tasks needs at least one row, got rows={rows!r}")
    return counts


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device; use device='cpu'")
    return torch.device(name)


def _join_snapshots(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put snapshots of single rows together."""
    first = parts[0]

    def joined(name: str) -> Any:
        if isinstance(first[name], dict):
            return {key: torch.cat([part[name][key] for part in parts]) for key in first[name]}
        if isinstance(first[name], Tensor):
            return torch.cat([part[name] for part in parts])
        return [item for part in parts for item in part[name]]

    return {name: joined(name) for name in first}
