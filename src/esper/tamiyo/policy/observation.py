"""The two observation layouts, and the running statistics that standardise observations.

An observation is two tensors: features, float32 [R, features], and the blueprint of every slot,
int64 [R, S], -1 where there is none. `documents` is Observation V3. `travelling` has task-relative
features: the same ones for the host, for every slot, and for every blueprint at every slot, so that
one policy serves any number of slots and blueprints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline.config import is_checking_stages
from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.policy.layout import (
    FEEDBACK_FEATURES,
    NUM_BASE,
    NUM_FEEDBACK,
    FeatureSpec,
    check_finite,
    check_signals,
    feature_names,
    feature_specs,
    get_feature_size,
)
from esper.tamiyo.policy.ratios import FEATURE_SETS, FeatureSet
from esper.tamiyo.policy.travelling import observe_host, observe_pairs, observe_slots

# ---- ObservationNormalizer: running statistics by which observations are standardised


MOMENTUM = 0.99
LEAST_VARIANCE = 1e-8
"""Variance below which a feature counts as constant and is not scaled."""

CLIP = 10.0


class ObservationNormalizer(nn.Module):
    """Standardises the continuous features of an observation.

    Features that a layout repeats, such as those of slots, share their statistics, and only
    repetitions that exist are counted. `state_dict` does not depend on their number.

    Args:
        layout: the layout of the observation.
        momentum: largest share of the old statistics that an update keeps.
    """

    mean: Tensor
    """float32 [D], 0 where a feature is not standardised."""
    scale: Tensor
    """float32 [D], what a feature is multiplied by."""

    def __init__(self, layout: ObservationLayout, momentum: float = MOMENTUM) -> None:
        """Start with statistics that change nothing."""
        super().__init__()
        self.layout = layout
        self.parts = nn.ModuleDict(
            {part.name: RunningMoments(part.specs, momentum) for part in layout.parts}
        )
        self.register_buffer("mean", torch.zeros(layout.size), persistent=False)
        self.register_buffer("scale", torch.ones(layout.size), persistent=False)
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    def normalize(self, observation: Tensor) -> Tensor:
        """Return the observation [..., D] standardised and clipped to +-10."""
        return ((observation - self.mean) * self.scale).clamp(-CLIP, CLIP)

    def forward(self, observation: Tensor) -> Tensor:
        """Return `normalize(observation)`."""
        return self.normalize(observation)

    def update(self, batch: Tensor) -> None:
        """Update the statistics with the raw observations [..., D] of a whole round."""
        if batch.shape[-1] != self.layout.size or batch.numel() == 0:
            raise UsageError(
                f"update needs one or more observations of {self.layout.size} features, "
                f"got {list(batch.shape)}"
            )
        rows = batch.reshape(-1, self.layout.size)
        _refuse_non_finite(rows, self.layout)
        for part in self.layout.parts:
            own = part.of(rows)
            if part.presence is not None:
                own = own[own[..., part.presence] > 0]
            if own.numel():
                self.moments(part.name).update(own)
        self.spread()

    def moments(self, part: str) -> RunningMoments:
        """Return the statistics of a part of the layout."""
        found = self.parts[part]
        assert isinstance(found, RunningMoments)
        return found

    @torch.no_grad()
    def spread(self) -> None:
        """Copy the statistics of every part to all its repetitions."""
        for part in self.layout.parts:
            own, place = self.moments(part.name), slice(part.start, part.start + part.size)
            # In place, because captured CUDA graphs and views hold these tensors.
            self.mean[place].copy_(own.mean.repeat(part.repeats))
            self.scale[place].copy_(own.scale.repeat(part.repeats))


class RunningMoments(nn.Module):
    """Running mean and variance of every continuous feature.

    At first they are the exact statistics of all values so far. Once a batch's share of all values
    is below 1 - `momentum`, they become exponential averages that take this share from each batch.

    Args:
        specs: the features.
        momentum: largest share of the old statistics that an update keeps.
    """

    mean: Tensor
    """float32 [D], 0 where a feature is not standardised."""
    var: Tensor
    """float32 [D], 1 where a feature is not standardised."""
    count: Tensor
    """float64, number of observations so far."""
    momentum: Tensor
    """float64."""
    continuous: Tensor
    """bool [D], what is standardised."""

    def __init__(self, specs: Sequence[FeatureSpec], momentum: float = MOMENTUM) -> None:
        """Start with statistics that change nothing."""
        super().__init__()
        if not 0.0 <= momentum < 1.0:
            raise UsageError(f"momentum must be 0 or more and below 1, got {momentum}")
        continuous = [spec.kind == "continuous" for spec in specs]
        size = len(continuous)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("momentum", torch.tensor(momentum, dtype=torch.float64))
        self.register_buffer("continuous", torch.tensor(continuous), persistent=False)

    @property
    def scale(self) -> Tensor:
        """float32 [D], what a feature is multiplied by."""
        varies = self.continuous & (self.var > LEAST_VARIANCE)
        return torch.where(varies, self.var.rsqrt(), 1.0)

    @torch.no_grad()
    def update(self, batch: Tensor) -> None:
        """Update the statistics with values [..., D]."""
        rows = batch.reshape(-1, len(self.mean)).to(self.mean)
        var, mean = torch.var_mean(rows, dim=0, correction=0)
        share = rows.shape[0] / (self.count + rows.shape[0])
        take = torch.maximum(share, 1 - self.momentum).to(self.mean.dtype)
        keep = 1 - take
        between = keep * take * (mean - self.mean).square()
        new_var = keep * self.var + take * var + between
        new_mean = keep * self.mean + take * mean
        self.var.copy_(torch.where(self.continuous, new_var, self.var))
        self.mean.copy_(torch.where(self.continuous, new_mean, self.mean))
        self.count += rows.shape[0]


def _refuse_non_finite(rows: Tensor, layout: ObservationLayout) -> None:
    finite = torch.isfinite(rows).all(0)
    if not bool(finite.all()):
        index = int((~finite).nonzero()[0])
        raise NonFiniteError(
            f"feature {index} ({layout.names[index]}) of an observation is not finite; "
            "the statistics are left as they were"
        )


def _after_loading(normalizer: nn.Module, _: Any) -> None:
    assert isinstance(normalizer, ObservationNormalizer)
    normalizer.spread()


LayoutName = Literal["documents", "travelling", "ratios"]
"""Observation V3 of the design documents, or task-relative features for any host: all of them, or
those that tell no size or count."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the observation in which the same features repeat."""

    name: str
    """host, slot or pair."""
    start: int
    specs: tuple[FeatureSpec, ...]
    repeats: int
    presence: int | None
    """Index of the flag that says whether a repetition exists; None if all of them do."""

    @property
    def size(self) -> int:
        """Number of features of all repetitions."""
        return self.repeats * len(self.specs)

    def of(self, observation: Tensor) -> Tensor:
        """Return this part of observations [..., features] as [..., repeats, own features]."""
        flat = observation[..., self.start : self.start + self.size]
        return flat.reshape(*flat.shape[:-1], self.repeats, len(self.specs))


@dataclass(frozen=True, slots=True)
class DocumentsLayout:
    """Observation V3 for a number of slots."""

    num_slots: int

    @property
    def slot_config(self) -> SlotConfig:
        """The slots it is laid out for."""
        return SlotConfig.of(self.num_slots)

    @property
    def size(self) -> int:
        """Number of features."""
        return get_feature_size(self.slot_config)

    @property
    def specs(self) -> tuple[FeatureSpec, ...]:
        """The spec of every feature."""
        return feature_specs(self.slot_config)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every feature."""
        return feature_names(self.slot_config)

    @property
    def signature(self) -> tuple[str, ...]:
        """All features: another number of slots is another observation."""
        return self.names

    @property
    def parts(self) -> tuple[Part, ...]:
        """A single part: every feature of every slot has its own statistics."""
        return (Part("host", 0, self.specs, 1, None),)

    @property
    def feedback(self) -> slice:
        """Position of the features about the previous action."""
        return slice(NUM_BASE, NUM_BASE + NUM_FEEDBACK)

    def labels(self, slot_names: Sequence[str], blueprint_names: Sequence[str]) -> list[str]:
        """Return the name of every feature on a host with these slots."""
        return list(feature_names(SlotConfig(padded_slots(slot_names, self.num_slots))))

    def observe(
        self, signals: Signals, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return Observation V3 of every row."""
        return batch_obs_to_features(signals, self.slot_config, device)


@dataclass(frozen=True, slots=True)
class TravellingLayout:
    """Task-relative features of the host, of every slot, and of every blueprint at every slot."""

    num_slots: int
    num_blueprints: int
    name: str = "travelling"
    """Which features it has, a key of `FEATURE_SETS`."""

    @property
    def features(self) -> FeatureSet:
        """The features of its parts."""
        return FEATURE_SETS[self.name]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Host, slots and pairs of slot and blueprint."""
        own, pairs = self.features, self.num_slots * self.num_blueprints
        slots_end = len(own.host) + self.num_slots * len(own.slot)
        return (
            Part("host", 0, own.host, 1, None),
            Part("slot", len(own.host), own.slot, self.num_slots, own.index("slot", "exists")),
            Part("pair", slots_end, own.pair, pairs, own.index("pair", "fits")),
        )

    @property
    def size(self) -> int:
        """Number of features."""
        return sum(part.size for part in self.parts)

    @property
    def specs(self) -> tuple[FeatureSpec, ...]:
        """The spec of every feature."""
        return tuple(spec for part in self.parts for spec in part.specs * part.repeats)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every feature, with slots and blueprints by number."""
        blueprints = [str(index) for index in range(self.num_blueprints)]
        return tuple(self.labels(SlotConfig.of(self.num_slots).slot_ids, blueprints))

    @property
    def signature(self) -> tuple[str, ...]:
        """Every kind of feature once, whatever the number of slots and blueprints."""
        return tuple(f"{part.name}.{spec.name}" for part in self.parts for spec in part.specs)

    @property
    def feedback(self) -> slice:
        """Position of the features about the previous action."""
        start = self.features.index("host", FEEDBACK_FEATURES[0].name)
        return slice(start, start + NUM_FEEDBACK)

    def labels(self, slot_names: Sequence[str], blueprint_names: Sequence[str]) -> list[str]:
        """Return the name of every feature on a host with these slots and blueprints."""
        slots = padded_slots(slot_names, self.num_slots)
        return [
            *(spec.name for spec in self.features.host),
            *(f"{slot}.{spec.name}" for slot in slots for spec in self.features.slot),
            *(
                f"{slot}.{blueprint}.{spec.name}"
                for slot in slots
                for blueprint in blueprint_names
                for spec in self.features.pair
            ),
        ]

    def observe(
        self, signals: Signals, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the observation of every row; missing slots read as not existing."""
        missing = self.num_slots - signals.num_slots
        unknown = signals.seed_params.shape[-1] - self.num_blueprints
        if missing < 0 or unknown:
            raise UsageError(
                f"the signals have {signals.num_slots} slots and "
                f"{signals.seed_params.shape[-1]} blueprints, but the observation is laid out for "
                f"{self.num_slots} and {self.num_blueprints}; lay it out for the host"
            )
        own = self.features
        pairs = observe_pairs(signals, own.pair)
        slots = observe_slots(signals, pairs, own.slot)
        active = signals.occupied & signals.enabled
        blueprints = torch.where(active, signals.blueprint, -1)
        if missing:
            slots = F.pad(slots, (0, 0, 0, missing))
            pairs = F.pad(pairs, (0, 0, 0, 0, 0, missing))
            blueprints = F.pad(blueprints, (0, missing), value=-1)
        numbers = torch.cat(
            [observe_host(signals, own.host), slots.flatten(1), pairs.flatten(1)], dim=1
        )
        if is_checking_stages():
            check_signals(signals)
            check_finite(numbers, self.names)
        if device is not None:
            return numbers.to(device), blueprints.to(device)
        return numbers, blueprints


ObservationLayout = DocumentsLayout | TravellingLayout
"""Which features a policy reads, in which parts, and how they are computed from signals.

A saved policy is refused unless its `signature`, the features it was trained on, is the same.
"""


def make_layout(name: LayoutName, num_slots: int, num_blueprints: int) -> ObservationLayout:
    """Return a layout by its name, for so many slots and blueprints."""
    if name == "documents":
        return DocumentsLayout(num_slots)
    return TravellingLayout(num_slots, num_blueprints, name)


def padded_slots(slot_names: Sequence[str], slots: int) -> tuple[str, ...]:
    """Return the names of `slots` slots; those that the host does not have are called unused."""
    unused = [f"(unused slot {index})" for index in range(len(slot_names), slots)]
    return (*slot_names, *unused)
