"""The Engine protocol: owns the modules, weights and optimizer state of rows.

An engine owns those and nothing else. Lifecycle, measurement, governor and signals belong to the
row group (`esper.kasmina.row_group`); they are the same functions whatever the engine. Here is also
the form in which a row's weights travel between engines, and how a garden's are read and written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from esper.kasmina.budget import Portion
from esper.kasmina.contribution import GradientSample
from esper.kasmina.garden import Garden
from esper.kasmina.state import SlotState, empty_state
from esper.utils.process import Pending
from esper.utils.storage import check_count, check_tensors

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpochResult:
    """Result of training one epoch; tensors on the row group's device."""

    loss: Tensor
    """float64 [R], mean training loss; NaN where unknown."""
    gradients: GradientSample
    """[R, S], of the last sampled batch."""
    sampled: Tensor
    """bool [R, S], where `gradients` holds."""
    samples: Tensor | None = None
    """int64 [R], training samples, where an owner has counted them; None for those asked for."""


@dataclass(slots=True)
class Moments:
    """Optimizer state of some parameters, by name; empty for parameters at rest."""

    momentum: dict[str, Tensor] = field(default_factory=dict)
    """Momentum of SGD; the mean of gradients of AdamW."""
    squares: dict[str, Tensor] = field(default_factory=dict)
    """The mean of squared gradients of AdamW; SGD has none."""
    steps: dict[str, int] = field(default_factory=dict)
    """How many steps of AdamW were taken; SGD does not count."""

    @property
    def are_at_rest(self) -> bool:
        """Whether there is no state."""
        return not self.momentum

    def under(self, prefix: str) -> Moments:
        """Return the state of parameters under a prefix, without the prefix."""
        return Moments(*(without_prefix(prefix, part) for part in self._parts()))

    def behind(self, prefix: str) -> Moments:
        """Return the state with a prefix in front of all names."""
        return Moments(*({prefix + k: v for k, v in part.items()} for part in self._parts()))

    def update(self, other: Moments) -> None:
        """Add the state of other parameters."""
        for mine, theirs in zip(self._parts(), other._parts(), strict=True):
            mine.update(theirs)

    def to_tree(self) -> dict[str, Any]:
        """Return plain data and tensors for a checkpoint."""
        return {"momentum": self.momentum, "squares": self.squares, "steps": self.steps}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Moments:
        """Rebuild what `to_tree` returned."""
        return cls(
            check_tensors(tree["momentum"], "momentum"),
            check_tensors(tree["squares"], "squares"),
            {str(name): check_count(steps, "steps") for name, steps in tree["steps"].items()},
        )

    def _parts(self) -> tuple[dict[str, Any], ...]:
        return self.momentum, self.squares, self.steps


@dataclass(slots=True)
class RowWeights:
    """Weights, buffers and optimizer state of one row, in a form that every engine reads."""

    host: dict[str, Tensor]
    host_moments: Moments = field(default_factory=Moments)
    seeds: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """By slot: parameters of the seed under 'seed.' and of its gate under 'gate.'."""
    seed_moments: dict[int, Moments] = field(default_factory=dict)
    """By slot, for every one that has a seed."""
    host_buffers: dict[str, Tensor] = field(default_factory=dict)
    """Buffers of the host, such as running statistics."""
    seed_buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    germinations: int = 0

    def at_rest(self, seeds: Sequence[bool]) -> RowWeights:
        """Return the same without optimizer state, and with only the seeds that are named."""

        def kept(values: dict[int, Any]) -> dict[int, Any]:
            return {slot: value for slot, value in values.items() if seeds[slot]}

        own = kept(self.seeds)
        return replace(
            self,
            host_moments=Moments(),
            seeds=own,
            seed_moments={slot: Moments() for slot in own},
            seed_buffers=kept(self.seed_buffers),
        )

    def to_tree(self) -> dict[str, Any]:
        """Return plain data and tensors for a checkpoint."""
        moments = {str(slot): each.to_tree() for slot, each in self.seed_moments.items()}
        return {
            "host": self.host,
            "host_moments": self.host_moments.to_tree(),
            "seeds": {str(slot): values for slot, values in self.seeds.items()},
            "seed_moments": moments,
            "host_buffers": self.host_buffers,
            "seed_buffers": {str(slot): values for slot, values in self.seed_buffers.items()},
            "germinations": self.germinations,
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> RowWeights:
        """Rebuild what `to_tree` returned."""
        moments = {int(slot): Moments.from_tree(m) for slot, m in tree["seed_moments"].items()}

        def by_slot(name: str) -> dict[int, dict[str, Tensor]]:
            return {int(slot): check_tensors(part, name) for slot, part in tree[name].items()}

        return cls(
            host=check_tensors(tree["host"], "host"),
            host_moments=Moments.from_tree(tree["host_moments"]),
            seeds=by_slot("seeds"),
            seed_moments=moments,
            host_buffers=check_tensors(tree["host_buffers"], "host_buffers"),
            seed_buffers=by_slot("seed_buffers"),
            germinations=check_count(tree["germinations"], "germinations"),
        )


class Engine(Protocol):
    """Trains rows that share host architecture and data, and owns their weights."""

    @property
    def host_params(self) -> int:
        """Trainable parameters of the host of every row."""

    @property
    def slots(self) -> Sequence[Any]:
        """One entry for every slot of the host."""

    def sync(self, state: SlotState) -> Tensor:
        """Build, free and re-aim seeds as the state says; return their sizes, int64 [R, S]."""

    def train(self, portions: Sequence[Portion]) -> Pending[EpochResult]:
        """Train one epoch; `portions` says which one it is for every row, and on which samples.

        An engine on a device or in processes only starts the epoch. Later calls, such as `measure`,
        are queued behind it.
        """

    def read(self, row: int) -> RowWeights:
        """Return copies of a row's weights, buffers and optimizer state."""

    def read_at_rest(self, rows: Sequence[int], seeds: Tensor) -> list[RowWeights]:
        """Return copies of some rows without optimizer state, with their `seeds`, bool [R, S].

        They may share memory with each other, not with the engine.
        """

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace a row; `state` [1, S] is the state of its slots."""


class EvaluatedEngine(Engine, Protocol):
    """An engine whose rows are measured by evaluating them."""

    def measure(self, plans: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Evaluate plans[r] (bool [K_r, S]) of every row; return loss and correct [sum K, M].

        A row whose plan is empty is left out.
        """


@runtime_checkable
class RemoteEngine(Protocol):
    """An engine whose rows are in other processes."""

    def read_rows(self, rows: Sequence[int]) -> list[RowWeights]:
        """Do what `read` does, for several rows at once."""


def empty_sample(rows: int, slots: int) -> tuple[GradientSample, Tensor]:
    """Return an empty gradient sample and the mask of what was sampled."""

    def none() -> Tensor:
        return torch.zeros((rows, slots), dtype=torch.bool)

    def zero() -> Tensor:
        return torch.zeros((rows, slots), dtype=torch.float64)

    return GradientSample(zero(), zero() + 1, none(), none(), zero()), none()


def take_samples(gardens: Sequence[Garden]) -> tuple[GradientSample, Tensor]:
    """Return the gradients sampled since the last call, and where, [R, S]."""
    sample, sampled = empty_sample(len(gardens), len(gardens[0].slot_names))
    for row, garden in enumerate(gardens):
        for slot, one in garden.take_gradients().items():
            sampled[row, slot] = True
            sample.put((row, slot), one)
    return sample, sampled


def read_weights(garden: Garden, optimizer: Optimizer | None) -> RowWeights:
    """Return copies of a garden's weights and buffers, with the state of SGD or AdamW."""
    host = dict(garden.model.named_parameters())
    weights = RowWeights(
        {name: value.detach().clone() for name, value in host.items()},
        read_moments(optimizer, host),
        host_buffers={name: value.clone() for name, value in garden.model.named_buffers()},
        germinations=garden.seedbed.germinations,
    )
    for index, slot in enumerate(garden.seedbed):
        own = dict(slot.named_parameters())
        if slot.seed is not None:
            weights.seeds[index] = {n: p.detach().clone() for n, p in own.items()}
            weights.seed_moments[index] = read_moments(optimizer, own)
            buffers = {name: value.clone() for name, value in slot.seed.named_buffers()}
            if buffers:
                weights.seed_buffers[index] = buffers
    return weights


def read_moments(optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]) -> Moments:
    """Return copies of the state of SGD or AdamW; empty without an optimizer."""
    if optimizer is None:
        return Moments()

    def found(key: str) -> dict[str, Tensor]:
        kept = {name: optimizer.state.get(p, {}).get(key) for name, p in parameters.items()}
        # No buffer yet is a buffer of zeros.
        return {
            name: torch.zeros_like(p) if kept[name] is None else kept[name].clone()
            for name, p in parameters.items()
        }

    if not isinstance(optimizer, AdamW):
        return Moments(found("momentum_buffer"))
    steps = {n: int(optimizer.state.get(p, {}).get("step", 0)) for n, p in parameters.items()}
    return Moments(found("exp_avg"), found("exp_avg_sq"), steps)


def write_weights(
    garden: Garden, optimizer: Optimizer | None, weights: RowWeights, state: SlotState
) -> None:
    """Put weights into a garden; `state` [1, S] is the state of its slots.

    The optimizer's state is replaced by the given one.
    """
    # Through the empty state: another blueprint may live in the same slot by now.
    garden.sync(empty_state(1, len(garden.slot_names)))
    garden.sync(state)
    garden.seedbed.germinations = weights.germinations
    parts = [(dict(garden.model.named_parameters()), weights.host, weights.host_moments)]
    for index, slot in enumerate(garden.seedbed):
        if index in weights.seeds:
            own = dict(slot.named_parameters())
            parts.append((own, weights.seeds[index], weights.seed_moments[index]))
            # How the seed was trained is unknown: do not warn.
            slot.was_shadowed = True
    with torch.no_grad():
        _copy_buffers(garden.model, weights.host_buffers)
        for index, values in weights.seed_buffers.items():
            _copy_buffers(garden.seedbed[index].seed, values)
        for parameters, values, moments in parts:
            for name, parameter in parameters.items():
                parameter.copy_(_fitting(values[name], parameter, name))
                if optimizer is not None:
                    optimizer.state.pop(parameter, None)
            if optimizer is not None:
                write_moments(optimizer, parameters, moments)


def write_moments(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], moments: Moments
) -> None:
    """Give SGD or AdamW copies of this state."""
    for name, momentum in moments.momentum.items():
        parameter = parameters[name]
        mine = _fitting(momentum, parameter, name).to(parameter, copy=True)
        if name not in moments.steps:
            # Zeros are no buffer yet: to PyTorch the two are the same.
            if bool((momentum != 0).any()):
                optimizer.state[parameter] = {"momentum_buffer": mine}
        elif moments.steps[name]:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(moments.steps[name])),
                "exp_avg": mine,
                "exp_avg_sq": _fitting(moments.squares[name], parameter, name).to(
                    parameter, copy=True
                ),
            }


def _fitting(value: Tensor, like: Tensor, name: str) -> Tensor:
    """Return the value if its shape fits; `copy_` alone would broadcast a smaller one."""
    if value.shape != like.shape:
        raise ValueError(f"{name} has shape {list(value.shape)} instead of {list(like.shape)}")
    return value


def without_prefix(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return the entries under a prefix, without the prefix."""
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }


def _copy_buffers(module: nn.Module | None, values: dict[str, Tensor]) -> None:
    """Copy buffers; those that are the same in every row may be missing."""
    for name, buffer in () if module is None else module.named_buffers():
        if name in values:
            buffer.copy_(_fitting(values[name], buffer, name))
