"""The layouts of an observation: what a policy is shown, in which order, and how to tell it apart.

An observation is always two tensors: numbers, float32 [R, features], and the blueprint of every
slot, int64 [R, S], -1 where there is none. `documents` is Observation V3; `travelling` means the
same on every task and has parts of the same shape for every slot and every blueprint at a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.errors import UsageError
from esper.leyline.process import is_checking_stages
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
from esper.tamiyo.policy.travelling import observe_host, observe_pairs, observe_slots
from esper.tamiyo.policy.travelling_layout import (
    HOST_FEATURES,
    HOST_INDEX,
    NUM_HOST,
    NUM_PAIR,
    NUM_SLOT,
    PAIR_FEATURES,
    PAIR_INDEX,
    SLOT_FEATURES,
    SLOT_INDEX,
)

LayoutName = Literal["documents", "travelling"]
"""Observation V3 of the design documents, or numbers that mean the same on every task."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the observation that repeats the same features."""

    name: str
    """host, slot or pair; the only part of an observation that repeats nothing is 'host'."""
    start: int
    specs: tuple[FeatureSpec, ...]
    repeats: int
    presence: int | None
    """Index within a repetition of the flag that says whether it is there; None always is."""

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
        """All features: with another number of slots it is another observation."""
        return self.names

    @property
    def parts(self) -> tuple[Part, ...]:
        """One: every feature of every slot has its own statistics."""
        return (Part("host", 0, self.specs, 1, None),)

    @property
    def feedback(self) -> slice:
        """Where the features about the previous action lie."""
        return slice(NUM_BASE, NUM_BASE + NUM_FEEDBACK)

    def labels(self, slot_names: Sequence[str], blueprint_names: Sequence[str]) -> list[str]:
        """Return the name of every feature; slots that the host does not have are unused."""
        return list(feature_names(SlotConfig(padded_slots(slot_names, self.num_slots))))

    def observe(
        self, signals: Signals, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return Observation V3 of every row."""
        return batch_obs_to_features(signals, self.slot_config, device)


@dataclass(frozen=True, slots=True)
class TravellingLayout:
    """Task-relative numbers: of the host, of every slot, and of every blueprint at every slot."""

    num_slots: int
    num_blueprints: int

    @property
    def parts(self) -> tuple[Part, ...]:
        """Host, slots and pairs of slot and blueprint."""
        pairs = self.num_slots * self.num_blueprints
        slots_end = NUM_HOST + self.num_slots * NUM_SLOT
        return (
            Part("host", 0, HOST_FEATURES, 1, None),
            Part("slot", NUM_HOST, SLOT_FEATURES, self.num_slots, SLOT_INDEX["exists"]),
            Part("pair", slots_end, PAIR_FEATURES, pairs, PAIR_INDEX["fits"]),
        )

    @property
    def size(self) -> int:
        """Number of features."""
        return NUM_HOST + self.num_slots * (NUM_SLOT + self.num_blueprints * NUM_PAIR)

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
        """Every kind of feature once: the number of slots and blueprints does not matter."""
        return tuple(f"{part.name}.{spec.name}" for part in self.parts for spec in part.specs)

    @property
    def feedback(self) -> slice:
        """Where the features about the previous action lie."""
        start = HOST_INDEX[FEEDBACK_FEATURES[0].name]
        return slice(start, start + NUM_FEEDBACK)

    def labels(self, slot_names: Sequence[str], blueprint_names: Sequence[str]) -> list[str]:
        """Return the name of every feature on a host with these slots and blueprints."""
        slots = padded_slots(slot_names, self.num_slots)
        return [
            *(spec.name for spec in HOST_FEATURES),
            *(f"{slot}.{spec.name}" for slot in slots for spec in SLOT_FEATURES),
            *(
                f"{slot}.{blueprint}.{spec.name}"
                for slot in slots
                for blueprint in blueprint_names
                for spec in PAIR_FEATURES
            ),
        ]

    def observe(
        self, signals: Signals, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the travelling observation of every row; slots that are missing do not exist."""
        missing = self.num_slots - signals.num_slots
        unknown = signals.seed_params.shape[-1] - self.num_blueprints
        if missing < 0 or unknown:
            raise UsageError(
                f"the signals have {signals.num_slots} slots and "
                f"{signals.seed_params.shape[-1]} blueprints, but the observation is laid out for "
                f"{self.num_slots} and {self.num_blueprints}; lay it out for the host"
            )
        pairs = observe_pairs(signals)
        slots = observe_slots(signals, pairs)
        active = signals.occupied & signals.enabled
        blueprints = torch.where(active, signals.blueprint, -1)
        if missing:
            slots = F.pad(slots, (0, 0, 0, missing))
            pairs = F.pad(pairs, (0, 0, 0, 0, 0, missing))
            blueprints = F.pad(blueprints, (0, missing), value=-1)
        numbers = torch.cat([observe_host(signals), slots.flatten(1), pairs.flatten(1)], dim=1)
        if is_checking_stages():
            check_signals(signals)
            check_finite(numbers, self.names)
        if device is not None:
            return numbers.to(device), blueprints.to(device)
        return numbers, blueprints


ObservationLayout = DocumentsLayout | TravellingLayout
"""What a policy is shown: which features, in which parts, and how they are made of signals.

`signature` is what a saved policy must agree with to be used: the features it was trained on.
"""


def make_layout(name: LayoutName, num_slots: int, num_blueprints: int) -> ObservationLayout:
    """Return a layout by its name, for so many slots and blueprints."""
    if name == "documents":
        return DocumentsLayout(num_slots)
    return TravellingLayout(num_slots, num_blueprints)


def padded_slots(slot_names: Sequence[str], slots: int) -> tuple[str, ...]:
    """Return the names of so many slots; those that the host does not have are called unused."""
    unused = [f"(unused slot {index})" for index in range(len(slot_names), slots)]
    return (*slot_names, *unused)
