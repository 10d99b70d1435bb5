"""The rows of one task that run together: their test scores, and several groups put together.

The test split is for the end of an evaluation; nothing that learns or decides may see it. Any
engine can hand out a row's weights, so no engine needs to know about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.contribution import values_in_points
from esper.kasmina.costs import NOT_FOR_THE_SLOT, slot_costs
from esper.kasmina.row_group import RowGroup, measure_by_ablation
from esper.kasmina.signals import RateTable, RowFacts, row_facts
from esper.leyline.alpha import AlphaMode
from esper.leyline.rules import RuleView
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from esper.population.engine import PopulationConfig, PopulationEngine, SlotSpec
from esper.population.strategy import make_sequential
from esper.tasks.dataset import TaskData
from esper.tasks.task import Task
from esper.tasks.training import rate_factor


class TaskGroup(RowGroup):
    """Rows of one task on one engine.

    Args:
        task: what the rows are networks for.
        data: what they are trained on.
        keys: names of the rows' random streams.
        engine: trains the rows.
        config: the settings of the population.
    """

    engine: PopulationEngine
    config: PopulationConfig

    def __init__(
        self,
        task: Task,
        data: TaskData,
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
            facts=task_facts(task, data, engine.slots, len(keys)),
            rates=task_rates(task, len(keys)),
        )
        self.task = task


def task_facts(task: Task, data: TaskData, slots: Sequence[SlotSpec], rows: int) -> RowFacts:
    """Return what is known beforehand of rows of a task."""
    config = task.config
    return row_facts(
        rows,
        slot_costs(slots),
        horizon=config.horizon,
        budget=config.param_budget,
        chance_loss=config.baseline_loss,
        train_samples=data.size("train"),
        samples_per_epoch=data.samples_per_step,
        num_classes=config.num_classes or 0,
        host_flops=task.host_flops,
        param_limit=task.param_limit,
        flop_limit=task.flop_limit,
    )


def task_rates(task: Task, rows: int) -> RateTable:
    """Return the learning rates of rows of a task."""
    config = task.config
    factors = [rate_factor(config, epoch + 1, config.horizon) for epoch in range(config.horizon)]
    return RateTable(
        factors=torch.tensor(factors).expand(rows, -1),
        peak=torch.tensor(config.learning_rate).expand(rows),
    )


def score_test_split(group: TaskGroup, data: TaskData) -> Tensor:
    """Return float64 [R]: the score in points of every row on the whole test split."""
    engine = make_sequential(group.task, _in_place_of_val(data), group.keys[:1], group.config)
    everything = torch.ones((1, group.state.num_slots), dtype=torch.bool)
    scores = []
    for row in range(group.rows):
        state = group.state.select([row])
        engine.sync(state)
        engine.write(0, group.engine.read(row), state)
        loss, correct = engine.measure([everything])
        scores.append(values_in_points(loss, correct).mean().to(torch.float64).cpu())
    return torch.stack(scores)


def _in_place_of_val(data: TaskData) -> TaskData:
    """Return the data with the whole test split where engines look for validation samples."""
    return dataclasses.replace(
        data,
        samples={**data.samples, "val": data.samples["test"]},
        targets=data.targets if not data.targets else {**data.targets, "val": data.targets["test"]},
        subset=torch.arange(data.size("test"), device=data.device),
    )


_ABSENT = {
    "stage": -1,
    "blueprint": -1,
    "alpha_mode": -1,
    "algorithm": -1,
    "epochs_in_stage": -1,
    "age": -1,
    "counterfactual_age": -1,
    "contribution": torch.nan,
    "contribution_se": torch.nan,
    "contribution_velocity": torch.nan,
    "slot_topology": -1,
}
"""What a slot that a row does not have looks like; every other field is 0 or False."""

_PER_SLOT = tuple(
    field.name
    for field in dataclasses.fields(Signals)
    if field.name
    in {
        "enabled",
        "occupied",
        "alpha",
        "alpha_target",
        "alpha_velocity",
        "time_to_target",
        "grad_norm",
        "grad_health",
        "grad_health_prev",
        "vanishing",
        "exploding",
        "slot_params",
        "slot_flops",
        "slot_channels",
        "slot_positions",
        *_ABSENT,
    }
)


def merge_signals(parts: Sequence[Signals], slots: int) -> Signals:
    """Return the signals of all rows, each padded to `slots` slots."""
    if len(parts) == 1 and parts[0].num_slots == slots:
        return parts[0]
    merged = {}
    for field in dataclasses.fields(Signals):
        tensors = [getattr(part, field.name) for part in parts]
        if field.name in _PER_SLOT:
            tensors = [_pad(t, slots, _ABSENT.get(field.name, 0)) for t in tensors]
        elif field.name == "interaction":
            tensors = [_pad(_pad(t, slots, 0).mT, slots, 0).mT for t in tensors]
        elif field.name in ("seed_params", "seed_flops"):
            tensors = [_pad(t.mT, slots, NOT_FOR_THE_SLOT).mT for t in tensors]
        merged[field.name] = torch.cat(tensors)
    return Signals(**merged)


def merge_views(parts: Sequence[RuleView], slots: int) -> RuleView:
    """Return what legality depends on for all rows, each padded to `slots` slots."""

    def joined(name: str, value: int | bool) -> Tensor:
        return torch.cat([_pad(getattr(part, name), slots, value) for part in parts])

    fits = torch.cat([_pad(part.fits.mT, slots, False).mT for part in parts])
    return RuleView(
        stage=joined("stage", int(SeedStage.DORMANT)),
        alpha_mode=joined("alpha_mode", int(AlphaMode.HOLD)),
        age=joined("age", 0),
        enabled=joined("enabled", False),
        fits=fits,
    )


def _pad(tensor: Tensor, width: int, value: float) -> Tensor:
    """Widen the last dimension with a value."""
    missing = width - tensor.shape[-1]
    if missing == 0:
        return tensor
    filler = torch.full((*tensor.shape[:-1], missing), value, dtype=tensor.dtype)
    return torch.cat([tensor, filler.to(tensor.device)], -1)


def join_rows(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put snapshots together, one after another."""
    return {name: _join([part[name] for part in parts]) for name in parts[0]}


def take_rows(saved: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Return the snapshot of some of its rows."""
    return {
        name: take_rows(value, start, stop) if isinstance(value, Mapping) else value[start:stop]
        for name, value in saved.items()
    }


def first_difference(one: Any, other: Any, name: str = "") -> tuple[str, str] | None:
    """Return how two plain trees differ first, as "name value" of each; None when they do not."""
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
