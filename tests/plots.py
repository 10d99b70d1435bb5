"""Small gardens that grow within a second, and the hands to raise seeds in them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from esper.growth.config import GardenerConfig, GrowthConfig
from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.contribution import Contributions, Measured
from esper.kasmina.engine import Moments, take_samples
from esper.kasmina.evaluation import BatchEvaluator, evaluate_contributions
from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import GardenConfig, LifecycleConfig
from esper.kasmina.slot_table import OperationResult
from esper.kasmina.state import GateConfig
from esper.kasmina.training import per_sample_classification
from esper.leyline.actions import Actions, LifecycleOp, decode_actions
from esper.leyline.records import EpochRecord
from esper.leyline.rules import Masks, RulesConfig
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.registry import WAIT, Choice, pack_choices

FEATURES, WIDTH, CLASSES = 4, 6, 3
SLOTS = ("stem", "body", "neck")

Batch = tuple[Tensor, Tensor]

EAGER = GardenConfig(
    lifecycle=LifecycleConfig(
        gates=GateConfig(min_training_epochs=0, min_gradient_health=0.0),
        rules=RulesConfig(min_prune_age=0),
        embargo_ticks=1,
    )
)
"""A garden in which a seed may pass every gate at once."""


class TinyNet(nn.Module):
    """Features [B, 4] to class scores [B, 3], with three places to grow."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh())
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.neck = nn.Tanh()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.neck(self.body(self.stem(x)))
        scores: Tensor = self.head(self.dropout(hidden))
        return scores


class TinyConv(nn.Module):
    """Images [B, 1, 8, 8] to class scores [B, 10]."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(images)))
        scores: Tensor = self.head(torch.relu(self.second(hidden)).mean((-2, -1)))
        return scores


def make_net(seed: int = 0, dropout: float = 0.0) -> TinyNet:
    torch.manual_seed(seed)
    return TinyNet(dropout)


def make_garden(seed: int = 0, config: GardenConfig = EAGER) -> Garden:
    return Garden(make_net(seed), SLOTS, torch.zeros(2, FEATURES), config=config)


def make_batches(count: int = 4, size: int = 16, seed: int = 5) -> list[Batch]:
    """Three classes that a small network can tell apart, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1))
    batches = []
    for _ in range(count):
        y = torch.randint(CLASSES, (size,), generator=generator)
        batches.append((centres[y] + torch.randn(size, FEATURES, generator=generator), y))
    return batches


def make_evaluator(batches: Sequence[Batch] | None = None) -> BatchEvaluator:
    return BatchEvaluator(batches or make_batches(2, 32, seed=9), per_sample_classification)


def train(garden: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> list[float]:
    """One pass of plain training, as a user would write it."""
    losses = []
    garden.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(garden(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def raise_seed(
    garden: Garden,
    slot: str,
    stage: str = "BLENDING",
    *,
    blueprint: str = "mlp_small",
    style: str = "sigmoid_add",
    ticks: int = 3,
) -> None:
    """Grow a seed in an empty slot up to a stage; its alpha reaches the target in three ticks."""
    assert garden.germinate(slot, blueprint, style=style, tempo=3)
    if stage == "GERMINATED":
        return
    assert garden.advance(slot)
    if stage == "TRAINING":
        return
    assert garden.advance(slot)
    for _ in range(ticks):
        garden.tick()
    if stage == "BLENDING":
        return
    assert garden.advance(slot)
    if stage == "HOLDING":
        return
    # Nothing is fossilized that is as it was drawn, or makes no difference.
    with torch.no_grad():
        for parameter in garden.slot_parameters(slot):
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    record_contributions(garden, evaluate_contributions(garden, make_evaluator(), fossils=False))
    assert garden.fossilize(slot)
    assert stage == "FOSSILIZED"


def contribution_tensors(
    result: Contributions, names: Sequence[str]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return worth [1, S], error [1, S] and interaction [1, S, S] of one network."""
    worth = torch.full((1, len(names)), math.nan, dtype=torch.float64)
    error = worth.clone()
    interaction = torch.zeros((1, len(names), len(names)), dtype=torch.float64)
    for name, estimate in result.leave_one_out.items():
        worth[0, names.index(name)] = estimate.value
        error[0, names.index(name)] = estimate.se
    for (first, second), estimate in result.interactions.items():
        i, j = names.index(first), names.index(second)
        interaction[0, i, j] = interaction[0, j, i] = estimate.value
    return worth, error, interaction


def record_epoch(garden: Garden, score: float) -> None:
    """Count an epoch with the gradients sampled in it, as the step of growth does."""
    points = torch.tensor([score], dtype=torch.float64)
    garden.table.record_epoch(points, *take_samples([garden]))


def record_contributions(garden: Garden, found: Contributions) -> None:
    """Take over what was measured of the seeds that are there."""
    nothing = torch.full((1,), math.nan, dtype=torch.float64)
    measured = Measured(nothing, nothing, *contribution_tensors(found, garden.slot_names))
    members = torch.isfinite(measured.worth) & garden.state.has_module
    garden.table.record_contributions(measured, members, torch.tensor([True]))


def carry_out(garden: Garden, actions: Actions) -> OperationResult:
    """Do what a controller chose, legal or not."""
    return garden.carry_out(decode_actions(actions))


def shake(garden: Garden) -> None:
    """Give every seed weights of its own, so that it makes a difference."""
    with torch.no_grad():
        for name in garden.slot_names:
            for parameter in garden.slot_parameters(name):
                parameter.add_(torch.randn_like(parameter), alpha=0.5)


class Script:
    """A controller that does what it is told: {epoch: choice}, and waits otherwise."""

    def __init__(self, choices: Mapping[int, Choice]) -> None:
        self.choices = dict(choices)
        self.seen: list[Signals] = []

    def reset(self, rows: int, device: torch.device | str) -> None:
        self.seen = []

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        self.seen.append(signals)
        return pack_choices([self.choices.get(int(signals.epoch[0]), WAIT)], masks)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def germinate(slot: int = 0, blueprint: str = "mlp_small", style: int = 0) -> Choice:
    return {
        "op": LifecycleOp.GERMINATE,
        "slot": slot,
        "blueprint": BLUEPRINTS.get(blueprint).id,
        "style": style,
        "tempo": 0,
    }


def advance(slot: int = 0) -> Choice:
    return {"op": LifecycleOp.ADVANCE, "slot": slot}


GROW_ONE: dict[int, Choice] = {2: germinate(), 3: advance(), 4: advance()}
"""Germinate after epoch 2 in the first slot, train it, and blend it in from epoch 5 on."""


def fossilize(slot: int = 0) -> Choice:
    return {**advance(slot), "op": int(LifecycleOp.FOSSILIZE)}


def growth_config(epochs: int, **changes: Any) -> GrowthConfig:
    gardener = changes.pop("gardener", GardenerConfig())
    return GrowthConfig(
        **{
            "epochs": epochs,
            "garden": EAGER,
            "gardener": gardener,
            "seed": 3,
            "keep": "last",
            **changes,
        }
    )


def plain_history(history: Sequence[EpochRecord]) -> list[dict[str, Any]]:
    """Records without the time they took, which is all that may differ between equal runs."""
    return [{**record.to_mapping(), "seconds": None} for record in history]


def frozen(tree: Any) -> Any:
    """Return an independent copy of a state."""
    return copy.deepcopy(tree)


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal bit for bit, NaN included."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and bool(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)))
            and bool(torch.equal(torch.isnan(one), torch.isnan(other)))
        )
    if isinstance(one, Moments) and isinstance(other, Moments):
        return same(one.to_tree(), other.to_tree())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def parameters_by_name(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def halves(batch: Batch) -> Iterator[Batch]:
    x, y = batch
    middle = len(y) // 2
    yield x[:middle], y[:middle]
    yield x[middle:], y[middle:]
