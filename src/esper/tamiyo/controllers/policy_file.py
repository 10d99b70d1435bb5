"""Policies: a network with its observation statistics and blueprint table, saved and loaded.

`save_policy` writes one folder by `utils.storage`: with checksums, a version, and no code that runs
when it is loaded. The names of the features are saved too, so that a policy that reads other
features is refused. A policy of the documents' layout serves up to its number of slots and knows
its blueprints by name. A `travelling` policy serves any number of both; `Policy.fitted` adapts it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
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
from esper.utils.manifest import MANIFEST_FILE, UNFIT
from esper.utils.randomness import seeded
from esper.utils.storage import load_tree, save_tree

POLICY_KIND = "policy"
POLICY_VERSION = 3
CHECKPOINT_POLICY = "policy"
"""Folder of the policy within a checkpoint of a training run."""

UNUSABLE = (*UNFIT, MemoryError)
"""Errors raised when a policy is built from damaged values; sizes may exceed the memory."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A network with everything that is needed to act by it."""

    network: Network
    normalizer: ObservationNormalizer
    """Statistics of the observation; frozen while the policy acts."""
    blueprint_names: tuple[str, ...] = BUILTIN_BLUEPRINTS
    """Name of every blueprint at the index that is its id in the network."""
    blueprint_kinds: tuple[BlueprintKind, ...] = BUILTIN_KINDS
    """Their kinds."""
    limits: GrowthLimits = field(default_factory=GrowthLimits)
    """Limits that it was trained under."""
    horizon: int = 0
    """Epochs of the shortest runs that it was trained on; 0 if not known."""

    def __post_init__(self) -> None:
        """Check that the parts fit each other."""
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
        """The layout of its observation."""
        return self.network.config.observation

    @property
    def slot_config(self) -> SlotConfig:
        """The slots its observation is laid out for."""
        return SlotConfig.of(self.network.config.num_slots)

    @property
    def travels(self) -> bool:
        """Whether it serves any number of slots and any blueprints."""
        return self.network.config.layout != "documents"

    def fitted(self, context: ControllerContext) -> Policy:
        """Return the policy for a host: itself if it fits, else a copy with other sizes.

        Blueprints that copy the host's blocks are left out unless it was trained with them.

        Raises:
            UsageError: It has the documents' layout, and the host has more slots than it serves.
        """
        served = [
            (name, kind)
            for name, kind in zip(context.blueprint_names, context.kinds, strict=True)
            if name in self.blueprint_names or name not in context.copies
        ]
        names, kinds = tuple(name for name, _ in served), tuple(kind for _, kind in served)
        config = self.network.config.fitted(len(context.slot_names), len(names))
        if not self.travels:
            return self
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
        """Load what `state_dict` returned."""
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
    """Return an untrained policy; equal seeds give equal weights.

    Args:
        config: the configuration of the network.
        blueprint_names: name of every blueprint at the index that is its id.
        blueprint_kinds: their kinds; by default those of the built-in ones, 'other' for the rest.
        seed: seed of the weights.
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
    """Save a policy as a folder, atomically replacing an earlier one.

    Args:
        folder: where to save; see `save_tree`.
        policy: what to save.
        meta: plain data about it, such as how it was trained, readable without its weights.
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
    """Return the folder of a policy.

    The path may be a saved policy, a checkpoint of a training run, or a run: then it is the run's
    best policy, or its latest if it has no best one yet.
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
    """Return the policy that `save_policy` wrote; `find_policy` says which paths are possible.

    Raises:
        CheckpointError: It is missing, damaged, of another kind or version, or reads other
            features than this version computes.
    """
    folder = find_policy(folder)
    tree, _ = load_tree(folder, kind=POLICY_KIND, version=POLICY_VERSION, device=device)
    try:
        config = PolicyConfig.from_mapping(tree["config"])
        difference = describe_difference(tree["features"], read_features(config))
        if difference:
            raise CheckpointError(
                f"the policy in {folder} reads {difference}; use it with the Esper that saved it"
            )
        policy = new_policy(
            config,
            blueprint_names=tuple(tree["blueprints"]),
            blueprint_kinds=tuple(tree["kinds"]),
        )
        policy.load_state_dict({**tree, "network": tree["weights"]})
        # Policies of earlier versions have neither limits nor a horizon.
        limits = GrowthLimits(**tree.get("limits", {}))
        policy = replace(policy, limits=limits, horizon=read_horizon(tree))
    except UNUSABLE as error:
        reason = reason_of(error)
        raise CheckpointError(
            f"the policy in {folder} cannot be used: {reason}; use another copy of it"
        ) from error
    return policy.to(device)


def read_horizon(saved: Mapping[str, Any]) -> int:
    """Return the epochs of the shortest runs that a saved policy was trained on; 0 if not known.

    Raises:
        ValueError: It is not a number of epochs.
    """
    horizon = saved.get("horizon", 0)
    if type(horizon) is not int or not 0 <= horizon < 2**31:
        raise ValueError(f"its horizon must be a number of epochs, got {horizon!r}"[:200])
    return horizon


def read_features(config: PolicyConfig) -> list[str]:
    """Return the names of everything that a policy reads: features and kinds of blueprints."""
    kinds = BLUEPRINT_KINDS if config.layout != "documents" else ()
    return [*config.observation.signature, *(f"kind.{kind}" for kind in kinds)]


def describe_difference(theirs: Sequence[str], ours: Sequence[str]) -> str:
    """Return the first difference of two lists of names, empty if they are equal."""
    for one, other in zip(theirs, ours, strict=False):
        if one != other:
            return f"{one!r} where this Esper has {other!r}"
    same = len(theirs) == len(ours)
    return "" if same else f"{len(theirs)} entries where this Esper has {len(ours)}"


def controller_fingerprint(spec: str) -> str | None:
    """Return a checksum of the file or policy that a controller is read from, None without one."""
    name, colon, argument = spec.partition(":")
    path = Path(argument) if name == "schedule" and colon else find_policy(spec) / MANIFEST_FILE
    try:
        return hashlib.blake2b(read_regular(path), digest_size=16).hexdigest()
    except OSError:
        # If the file is missing, building the controller raises a better error.
        return None
