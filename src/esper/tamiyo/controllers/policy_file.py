"""A policy as a thing to keep: network, frozen observation statistics and blueprint table.

`save_policy` writes one folder by `leyline.storage`: checksummed, versioned, and without any code
to run when it is loaded. What a policy knows of the world travels with it, so that it is refused
where it does not fit: its blueprints by name, the features it reads, and how many slots it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esper.leyline.blueprints import BUILTIN_BLUEPRINTS, NOOP
from esper.leyline.errors import CheckpointError, ConfigError, UsageError
from esper.leyline.manifest import MANIFEST_FILE
from esper.leyline.randomness import seeded
from esper.leyline.slots import SlotConfig
from esper.leyline.storage import load_tree, save_tree
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.policy.layout import feature_names, get_feature_size
from esper.tamiyo.policy.normalizer import ObservationNormalizer

POLICY_KIND = "policy"
POLICY_VERSION = 2
CHECKPOINT_POLICY = "policy"
"""Folder of the policy within a checkpoint of a training run."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A network with all that is needed to act by it."""

    network: FactoredRecurrentActorCriticV2
    normalizer: ObservationNormalizer
    """Statistics of the observation; frozen while it acts."""
    blueprint_names: tuple[str, ...] = BUILTIN_BLUEPRINTS
    """Name of every blueprint at the index that the network knows it by."""

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
        size = get_feature_size(self.slot_config)
        if config.observation_dim != size or len(self.normalizer.mean) != size:
            raise UsageError(
                f"an observation of {config.num_slots} slots has {size} features; the network "
                f"reads {config.observation_dim}, the normalizer {len(self.normalizer.mean)}"
            )

    @property
    def slot_config(self) -> SlotConfig:
        """The slots its observation is laid out for."""
        return SlotConfig.of(self.network.config.num_slots)


def new_policy(
    config: PolicyConfig | None = None,
    *,
    blueprint_names: tuple[str, ...] = BUILTIN_BLUEPRINTS,
    seed: int = 0,
) -> Policy:
    """Return a policy that has learned nothing; equal seeds give equal weights."""
    config = config or PolicyConfig(num_blueprints=len(blueprint_names))
    with seeded(seed, "policy weights"):
        network = FactoredRecurrentActorCriticV2.from_config(config)
    normalizer = ObservationNormalizer(SlotConfig.of(config.num_slots))
    return Policy(network, normalizer, tuple(blueprint_names))


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
        "features": list(feature_names(policy.slot_config)),
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
    return next((place for place in places if (place / MANIFEST_FILE).is_file()), path)


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
        policy = new_policy(config, blueprint_names=tuple(tree["blueprints"]))
        policy.network.load_state_dict(tree["weights"])
        policy.normalizer.load_state_dict(tree["normalizer"])
    except (ConfigError, KeyError, RuntimeError, TypeError, UsageError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the policy in {folder} cannot be used: {reason}; use another copy of it"
        ) from error
    policy.network.to(device)
    policy.normalizer.to(device)
    return policy


def _refuse_other_features(folder: Path, config: PolicyConfig, saved: list[str]) -> None:
    own = feature_names(SlotConfig.of(config.num_slots))
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
