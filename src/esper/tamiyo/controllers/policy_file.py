"""A policy as a thing to keep: network, frozen observation statistics and blueprint table.

`save_policy` writes one folder by `leyline.storage`: checksummed, versioned, and without any code
to run when it is loaded. What a policy knows of the world travels with it, so that it is refused
where it does not fit: the features it reads, and of the documents' layout how many slots it
serves. Blueprints of that layout are known by name; one that was installed later is never chosen.
A travelling policy takes any number of either; `Policy.fitted` lays it out for a host.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline.controller import ControllerContext, GrowthLimits
from esper.leyline.errors import CheckpointError, UsageError, reason_of
from esper.leyline.slots import (
    BLUEPRINT_KINDS,
    BUILTIN_BLUEPRINTS,
    BUILTIN_KINDS,
    NOOP,
    BlueprintKind,
    SlotConfig,
    kinds_of,
)
from esper.tamiyo.networks import Network, make_network
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.policy.observation import ObservationLayout, ObservationNormalizer
from esper.utils.files import read_regular
from esper.utils.manifest import MANIFEST_FILE
from esper.utils.randomness import seeded
from esper.utils.storage import load_tree, save_tree

POLICY_KIND = "policy"
POLICY_VERSION = 3
CHECKPOINT_POLICY = "policy"

UNUSABLE = (
    AttributeError,
    LookupError,
    MemoryError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What is raised where a policy is made of values that belong to none."""

"""Folder of the policy within a checkpoint of a training run."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A network with all that is needed to act by it."""

    network: Network
    normalizer: ObservationNormalizer
    """Statistics of the observation; frozen while it acts."""
    blueprint_names: tuple[str, ...] = BUILTIN_BLUEPRINTS
    """Name of every blueprint at the index that the network knows it by."""
    blueprint_kinds: tuple[BlueprintKind, ...] = BUILTIN_KINDS
    """Their kinds."""
    limits: GrowthLimits = field(default_factory=GrowthLimits)
    """Under which it learned, as far as that was said."""
    horizon: int = 0
    """Epochs of the shortest runs that it learned in; 0 where nobody said."""

    def __post_init__(self) -> None:
        """Refuse parts that do not belong together."""
        config = self.network.config
        names = self.blueprint_names
        if len(names) != config.num_blueprints or len(set(names)) != len(names):
            raise UsageError(
                f"the network knows {config.num_blueprints} blueprints, so the table must have "
                f"as many different names; got {len(names)}: {', '.join(names)}"
            )
        if names[NOOP] != BUILTIN_BLUEPRINTS[NOOP]:
            raise UsageError(
                f"the first blueprint must be {BUILTIN_BLUEPRINTS[NOOP]!r}, got {names[NOOP]!r}"
            )
        if len(self.blueprint_kinds) != len(names):
            raise UsageError(f"{len(names)} blueprints need as many kinds: {self.blueprint_kinds}")
        size = self.layout.size
        if config.observation_dim != size or self.normalizer.layout != self.layout:
            raise UsageError(
                f"an observation of {config.num_slots} slots has {size} features; the network "
                f"reads {config.observation_dim}, the normalizer {self.normalizer.layout.size}"
            )

    @property
    def layout(self) -> ObservationLayout:
        """What it is shown."""
        return self.network.config.observation

    @property
    def slot_config(self) -> SlotConfig:
        """The slots its observation is laid out for."""
        return SlotConfig.of(self.network.config.num_slots)

    @property
    def travels(self) -> bool:
        """Whether it serves any number of slots and any blueprints."""
        return self.network.config.layout == "travelling"

    def fitted(self, context: ControllerContext) -> Policy:
        """Return the policy laid out for a host: a copy, or itself where that is what it is.

        Blueprints that copy the host's blocks are left out, unless it has learned with them.

        Raises:
            UsageError: It does not travel, and the host has more slots than it serves.
        """
        if not self.travels:
            _refuse_misfit(self, context)
            return self
        served = [
            (name, kind)
            for name, kind in zip(context.blueprint_names, context.kinds, strict=True)
            if name in self.blueprint_names or name not in context.copies
        ]
        names, kinds = tuple(name for name, _ in served), tuple(kind for _, kind in served)
        config = self.network.config.fitted(len(context.slot_names), len(names))
        known = (self.network.config, self.blueprint_names, self.blueprint_kinds)
        if known == (config, names, kinds):
            return self
        other = new_policy(config, blueprint_names=names, blueprint_kinds=kinds)
        other.load_state_dict(self.state_dict())
        same = replace(other, limits=self.limits, horizon=self.horizon)
        return same.to(self.network.floors.device)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the network's weights and of the normalizer's statistics."""
        parts = {"network": self.network, "normalizer": self.normalizer}
        return {
            name: {key: value.clone() for key, value in part.state_dict().items()}
            for name, part in parts.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.network.load_state_dict(state["network"])
        self.normalizer.load_state_dict(state["normalizer"])

    def to(self, device: torch.device | str) -> Policy:
        """Move it to a device, and return it."""
        self.network.to(device)
        self.normalizer.to(device)
        return self


def new_policy(
    config: PolicyConfig | None = None,
    *,
    blueprint_names: tuple[str, ...] = BUILTIN_BLUEPRINTS,
    blueprint_kinds: tuple[BlueprintKind, ...] | None = None,
    seed: int = 0,
) -> Policy:
    """Return a policy that has learned nothing; equal seeds give equal weights.

    Args:
        config: of the network.
        blueprint_names: name of every blueprint at the index that is its id.
        blueprint_kinds: their kinds; by default what is known by name.
        seed: of the weights.
    """
    config = config or PolicyConfig(num_blueprints=len(blueprint_names))
    kinds = kinds_of(blueprint_names) if blueprint_kinds is None else blueprint_kinds
    with seeded(seed, "policy weights"):
        network = make_network(config, kinds)
    normalizer = ObservationNormalizer(config.observation)
    return Policy(network, normalizer, tuple(blueprint_names), tuple(kinds))


def save_policy(
    folder: str | Path, policy: Policy, *, meta: Mapping[str, Any] | None = None
) -> None:
    """Save a policy as a folder, replacing an earlier one atomically.

    Args:
        folder: where to; see `save_tree`.
        policy: what to save.
        meta: plain data about it, readable without its weights, such as how it was trained.
    """
    tree = {
        "config": policy.network.config.to_mapping(),
        "blueprints": list(policy.blueprint_names),
        "kinds": list(policy.blueprint_kinds),
        "limits": asdict(policy.limits),
        "horizon": policy.horizon,
        "features": read_features(policy.network.config),
        "normalizer": dict(policy.normalizer.state_dict()),
        "weights": dict(policy.network.state_dict()),
    }
    save_tree(Path(folder), tree, kind=POLICY_KIND, version=POLICY_VERSION, meta=meta)


def find_policy(path: str | Path) -> Path:
    """Return the folder of the policy that a path means.

    A path may be a saved policy, a checkpoint of a training run, or the run itself, which means its
    best policy, or its latest where it has no best yet.
    """
    path = Path(path)
    places = (
        path,
        path / CHECKPOINT_POLICY,
        path / "checkpoints" / "best",
        path / "checkpoints" / "latest" / CHECKPOINT_POLICY,
    )
    return next((place for place in places if os.path.isfile(place / MANIFEST_FILE)), path)


def load_policy(folder: str | Path, *, device: torch.device | str = "cpu") -> Policy:
    """Return the policy that `save_policy` wrote; see `find_policy` for what may be given.

    Raises:
        CheckpointError: It is missing, damaged, of another kind or version, or reads other
            features than this version computes.
    """
    folder = find_policy(folder)
    tree, _ = load_tree(folder, kind=POLICY_KIND, version=POLICY_VERSION, device=device)
    try:
        config = PolicyConfig.from_mapping(tree["config"])
        _refuse_other_features(folder, config, tree["features"])
        policy = new_policy(
            config,
            blueprint_names=tuple(tree["blueprints"]),
            blueprint_kinds=tuple(tree["kinds"]),
        )
        policy.load_state_dict({**tree, "network": tree["weights"]})
        # One that was saved before it was asked how it learned says nothing.
        limits = GrowthLimits(**tree.get("limits", {}))
        policy = replace(policy, limits=limits, horizon=read_horizon(tree))
    except UNUSABLE as error:
        reason = reason_of(error)
        raise CheckpointError(
            f"the policy in {folder} cannot be used: {reason}; use another copy of it"
        ) from error
    return policy.to(device)


def read_horizon(saved: Mapping[str, Any]) -> int:
    """Return the epochs of the shortest runs that a saved policy learned in; 0 if it does not say.

    Raises:
        ValueError: It says something else than a number of epochs.
    """
    horizon = saved.get("horizon", 0)
    if type(horizon) is not int or not 0 <= horizon < 2**31:
        raise ValueError(f"its horizon must be a number of epochs, got {horizon!r}"[:200])
    return horizon


def read_features(config: PolicyConfig) -> list[str]:
    """Return all that a policy reads, by name: its features, and the kinds that it tells apart."""
    kinds = BLUEPRINT_KINDS if config.layout == "travelling" else ()
    return [*config.observation.signature, *(f"kind.{kind}" for kind in kinds)]


def _refuse_misfit(policy: Policy, context: ControllerContext) -> None:
    served = policy.network.config.num_slots
    if len(context.slot_names) > served:
        raise UsageError(
            f"this policy serves hosts of 1 to {served} slots, and this one has "
            f"{len(context.slot_names)}; choose up to {served} of them"
        )


def _refuse_other_features(folder: Path, config: PolicyConfig, saved: list[str]) -> None:
    own = read_features(config)
    for index, (theirs, ours) in enumerate(zip(saved, own, strict=False)):
        if theirs != ours:
            raise CheckpointError(
                f"the policy in {folder} reads {theirs!r} as feature {index}, which is {ours!r} "
                "here; use it with the Esper that saved it"
            )
    if len(saved) != len(own):
        raise CheckpointError(
            f"the policy in {folder} reads {len(saved)} features, this Esper computes {len(own)}; "
            "use it with the Esper that saved it"
        )


def controller_fingerprint(spec: str) -> str | None:
    """Return a checksum of the file or the policy that a controller is read from, if it is."""
    name, colon, argument = spec.partition(":")
    path = Path(argument) if name == "schedule" and colon else find_policy(spec) / MANIFEST_FILE
    try:
        return hashlib.blake2b(read_regular(path), digest_size=16).hexdigest()
    except OSError:
        # It is no file, or the controller itself says what is wrong with it.
        return None
