"""The rows of one stack, and what several groups of them say put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import drawn_names
from esper.kasmina.costs import NOT_FOR_THE_SLOT, slot_costs
from esper.kasmina.row_group import RowGroup, measure_by_ablation
from esper.kasmina.signals import RateTable, RowFacts, row_facts
from esper.leyline.alpha import AlphaMode
from esper.leyline.rules import RuleView
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from esper.population.conditions import Condition, StackKey
from esper.population.engine import PopulationConfig, PopulationEngine, SlotSpec
from esper.tasks.training import rate_factor


class TaskGroup(RowGroup):
    """Rows of one architecture on one engine.

    Args:
        architecture: what the rows agree in.
        conditions: what each row trains under.
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
            facts=condition_facts(conditions, engine.slots),
            rates=condition_rates(conditions),
            rests_at_horizon=True,
        )
        self.architecture = architecture
        self.conditions = list(conditions)


def condition_facts(conditions: Sequence[Condition], slots: Sequence[SlotSpec]) -> RowFacts:
    """Return what is known beforehand of rows of one architecture under these conditions."""

    def each(value: Callable[[Condition], float]) -> Tensor:
        known = {id(condition): value(condition) for condition in conditions}
        return torch.tensor([known[id(condition)] for condition in conditions])

    return row_facts(
        len(conditions),
        slot_costs(slots, drawn_names()),
        horizon=each(lambda c: c.horizon),
        budget=each(lambda c: c.task.config.param_budget),
        chance_loss=each(lambda c: c.task.config.baseline_loss),
        train_samples=each(lambda c: c.data.size("train")),
        samples_per_epoch=each(lambda c: c.data.samples_per_step),
        num_classes=each(lambda c: c.task.config.num_classes or 0),
        host_flops=conditions[0].task.host_flops,
        param_limit=each(lambda c: c.task.param_limit),
        flop_limit=each(lambda c: c.task.flop_limit),
    )


def condition_rates(conditions: Sequence[Condition]) -> RateTable:
    """Return the learning rates of rows; where a schedule has ended, its last holds on."""
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
"""What a slot that a row does not have looks like; every other field is 0 or False."""

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
    """Return what legality depends on for all rows, in the order that `merge_signals` has."""

    def joined(name: str, value: int | bool) -> Tensor:
        return torch.cat([_pad(getattr(part, name), slots, value) for part in parts])[order]

    fits = torch.cat([_pad(part.fits.mT, slots, False).mT for part in parts])[order]
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
