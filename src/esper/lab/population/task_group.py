"""Groups of rows on one engine, and functions that merge the results of several groups."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import blueprint_kinds, immediate_table
from esper.kasmina.costs import NOT_FOR_THE_SLOT, RowCosts, row_costs, slot_costs, with_copies
from esper.kasmina.engine import RowWeights
from esper.kasmina.row_group import RowGroup, keep_rows, measure_by_ablation
from esper.kasmina.signals import RateTable, RowFacts, row_facts
from esper.kasmina.slot_table import SlotTable
from esper.kasmina.training import rate_factor
from esper.lab.population.engine import (
    EXECUTION_SETTINGS,
    Condition,
    PopulationConfig,
    PopulationEngine,
    Roster,
    StackKey,
)
from esper.lab.tasks.splits import Split
from esper.lab.tasks.task import Task
from esper.leyline.rules import Masks, RuleView, build_masks
from esper.leyline.signals import Signals
from esper.leyline.slots import BlueprintKind
from esper.leyline.stages import AlphaMode, SeedStage

# ---- Snapshots of rows as plain trees: join, take, compare


def join_rows(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate snapshots."""
    return {name: _join([part[name] for part in parts]) for name in parts[0]}


def take_rows(saved: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Return the snapshot of some rows."""
    return {
        name: take_rows(value, start, stop) if isinstance(value, Mapping) else value[start:stop]
        for name, value in saved.items()
    }


def first_difference(one: Any, other: Any, name: str = "") -> tuple[str, str] | None:
    """Return the first difference of two plain trees, as "name value" of each; None if equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in [*one, *(key for key in other if key not in one)]:
            inner = f"{name}.{key}" if name else str(key)
            found = first_difference(one.get(key), other.get(key), inner)
            if found is not None:
                return found
        return None
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            inner = f"{name}[{index}]" if isinstance(pair[0], Mapping) else name
            found = first_difference(*pair, inner)
            if found is not None:
                return found if isinstance(pair[0], Mapping) else _told(name, one, other)
        return None
    return None if one == other else _told(name, one, other)


def _told(name: str, one: Any, other: Any) -> tuple[str, str]:
    return f"{name} {one!r}", f"{name} {other!r}"


def _join(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return join_rows(values)
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    return [item for value in values for item in value]


class TaskGroup(RowGroup):
    """Rows of one architecture on one engine.

    Args:
        architecture: key that the rows share.
        conditions: condition of each row.
        keys: names of the rows' random streams.
        engine: trains the rows.
        config: the settings of the population.
    """

    engine: PopulationEngine
    config: PopulationConfig

    def __init__(
        self,
        architecture: StackKey,
        conditions: Sequence[Condition],
        keys: Sequence[int],
        engine: PopulationEngine,
        config: PopulationConfig,
    ) -> None:
        """Start at epoch 0."""
        super().__init__(
            engine,
            keys,
            config,
            measure=lambda members, which: measure_by_ablation(self.engine, members, which),
            table=SlotTable(
                condition_costs(conditions, engine, config),
                config.lifecycle,
                # All parameters of a task's host are trained.
                immediate_table(
                    [(slot.topology, False) for slot in engine.slots],
                    config.lifecycle.immediate,
                    config.blueprints,
                ),
            ),
            facts=condition_facts(conditions),
            rates=condition_rates(conditions),
            rests_at_horizon=True,
        )
        self.architecture = architecture
        self.conditions = list(conditions)
        self._kept: dict[int, RowWeights] = {}
        """Networks by row, without optimizer state."""
        self._kept_state = self.state
        """The state of their slots."""

    def keep_networks(self, which: Tensor) -> None:
        """Keep copies of the networks of rows, bool [R], in place of those kept before."""
        rows, which = which.nonzero().flatten().tolist(), which.to(self.device)
        if rows:
            weights = self.engine.read_at_rest(rows, self.state.occupied)
            self._kept |= dict(zip(rows, weights, strict=True))
            self._kept_state = keep_rows(~which, self._kept_state, self.state)

    def bring_back(self) -> None:
        """Replace every network by its kept copy, to score it; it cannot be trained further."""
        which = torch.tensor([row in self._kept for row in range(self.rows)], device=self.device)
        self.table.state = keep_rows(~which, self.state, self._kept_state)
        for row, weights in self._kept.items():
            self.engine.write(row, weights, self.state.select([row]))
        self._build()


def _each(conditions: Sequence[Condition], value: Callable[[Condition], float]) -> Tensor:
    """Return [R]: a value of every row's condition, computed once per condition."""
    known = {id(condition): value(condition) for condition in conditions}
    return torch.tensor([known[id(condition)] for condition in conditions])


def condition_costs(
    conditions: Sequence[Condition], engine: PopulationEngine, config: PopulationConfig
) -> RowCosts:
    """Return what rows of one architecture cost, and how far they may grow."""
    each = partial(_each, conditions)
    seeds = slot_costs(engine.slots, config.blueprints)
    if config.copies:
        seeds = with_copies(seeds, [slot.kin for slot in engine.slots])
    return row_costs(
        len(conditions),
        seeds,
        host_params=engine.host_params,
        host_flops=conditions[0].task.host_flops,
        param_limit=each(lambda c: c.task.param_limit),
        flop_limit=each(lambda c: c.task.flop_limit),
    )


def condition_facts(conditions: Sequence[Condition]) -> RowFacts:
    """Return the facts about the tasks of rows under these conditions."""
    each = partial(_each, conditions)
    return row_facts(
        len(conditions),
        horizon=each(lambda c: c.horizon),
        budget=each(lambda c: c.task.config.param_budget),
        chance_loss=each(lambda c: c.task.config.baseline_loss),
        train_samples=each(lambda c: c.data.size("train")),
        samples_per_epoch=each(lambda c: c.data.samples_per_step),
        num_classes=each(lambda c: c.task.config.num_classes or 0),
        compute=each(lambda c: c.compute_budget),
        batch_samples=each(lambda c: c.task.config.batch_size),
        val_samples=each(lambda c: len(c.data.subset)),
    )


def condition_rates(conditions: Sequence[Condition]) -> RateTable:
    """Return the learning rates of rows; after the end of a schedule its last rate stays."""
    epochs = max(condition.horizon for condition in conditions)
    configs = {id(condition): condition.task.config for condition in conditions}
    known = {
        name: [rate_factor(config, epoch + 1, config.horizon) for epoch in range(epochs)]
        for name, config in configs.items()
    }
    return RateTable(
        factors=torch.tensor([known[id(condition)] for condition in conditions]),
        peak=torch.tensor([condition.task.config.learning_rate for condition in conditions]),
    )


_NONE = ("stage", "blueprint", "alpha_mode", "algorithm", "slot_topology")
_NEVER = ("epochs_in_stage", "age", "counterfactual_age")
_UNKNOWN = ("contribution", "contribution_se", "contribution_velocity")
_ABSENT = {**dict.fromkeys((*_NONE, *_NEVER), -1), **dict.fromkeys(_UNKNOWN, torch.nan)}
"""Values of the fields at a slot that a row lacks; other fields are 0 or False."""

_HISTORIES = ("loss_history", "score_history")
"""The fields with a second dimension that is not the slots."""


def merge_signals(parts: Sequence[Signals], slots: int, order: Tensor) -> Signals:
    """Return the signals of all rows, each padded to `slots` slots.

    Row r of the result is row order[r], int64, of the parts one after another.
    """
    if len(parts) == 1 and parts[0].num_slots == slots:
        return parts[0]
    merged = {}
    for field in dataclasses.fields(Signals):
        tensors = [getattr(part, field.name) for part in parts]
        if field.name == "interaction":
            tensors = [_pad(_pad(t, slots, 0).mT, slots, 0).mT for t in tensors]
        elif field.name in ("seed_params", "seed_flops"):
            tensors = [_pad(t.mT, slots, NOT_FOR_THE_SLOT).mT for t in tensors]
        elif tensors[0].dim() == 2 and field.name not in _HISTORIES:
            tensors = [_pad(t, slots, _ABSENT.get(field.name, 0)) for t in tensors]
        merged[field.name] = torch.cat(tensors)[order]
    return Signals(**merged)


def merge_views(parts: Sequence[RuleView], slots: int, order: Tensor) -> RuleView:
    """Return the inputs of the legality rules for all rows, in the order of `merge_signals`."""

    def joined(name: str, value: int | bool) -> Tensor:
        return torch.cat([_pad(getattr(part, name), slots, value) for part in parts])[order]

    fits = torch.cat([_pad(part.fits.mT, slots, False).mT for part in parts])[order]
    return RuleView(
        stage=joined("stage", int(SeedStage.DORMANT)),
        alpha_mode=joined("alpha_mode", int(AlphaMode.HOLD)),
        age=joined("age", 0),
        enabled=joined("enabled", False),
        copies=joined("copies", 0),
        fits=fits,
    )


def _pad(tensor: Tensor, width: int, value: float) -> Tensor:
    """Pad the last dimension with a value."""
    missing = width - tensor.shape[-1]
    if missing == 0:
        return tensor
    filler = torch.full((*tensor.shape[:-1], missing), value, dtype=tensor.dtype)
    return torch.cat([tensor, filler.to(tensor.device)], -1)


# ---- The common base of populations in this process and in a cluster


class PopulationRows(ABC):
    """Rows of growing networks, in this process or in a cluster."""

    config: PopulationConfig
    """Settings shared by all rows."""
    roster: Roster
    """The rows and their conditions."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.roster.rows

    @property
    def tasks(self) -> list[Task]:
        """The tasks of the rows, in order."""
        return [condition.task for condition in self.conditions]

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The tasks with their data."""
        return self.roster.conditions

    @property
    def task_of_row(self) -> tuple[int, ...]:
        """Index of every row's task."""
        return self.roster.task_of_row

    def known_blueprints(self) -> tuple[str, ...]:
        """Return the name of every blueprint at the index that is its id."""
        return self.config.blueprints

    def known_kinds(self) -> tuple[BlueprintKind, ...]:
        """Return the kind of every blueprint at the index that is its id."""
        return blueprint_kinds(self.known_blueprints())

    def made(self) -> dict[str, Any]:
        """Return all settings that a snapshot depends on, without execution settings."""
        config = {
            name: value
            for name, value in self.config.to_mapping().items()
            if name not in EXECUTION_SETTINGS
        }
        rows = [self.task_of_row.count(index) for index in range(len(self.tasks))]
        return {
            "tasks": [task.name for task in self.tasks],
            "rows": rows,
            "settings": config,
            "task settings": [task.config.to_mapping() for task in self.tasks],
            "blueprints": list(self.known_blueprints()),
        }

    @abstractmethod
    def view(self) -> RuleView:
        """Return the inputs of the legality rules, for all rows."""

    def masks(self) -> Masks:
        """Return the masks of legal actions."""
        return build_masks(self.view(), self.config.lifecycle.effective_rules)

    @abstractmethod
    def results_on(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return scores in points and losses on a whole split, each float64 [R]."""

    @abstractmethod
    def keep_networks(self, which: Tensor) -> None:
        """Keep copies of the networks of rows, bool [R], in place of those kept before."""

    @abstractmethod
    def bring_back(self) -> None:
        """Replace every network by its kept copy, to score it.

        Optimizer state is not kept: afterwards rows can only be scored or reset.
        """

    def test_scores(self) -> Tensor:
        """Return float64 [R]: every row's score on the test split, in points."""
        return self.results_on("test")[0]
