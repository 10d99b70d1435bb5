"""Hosts that begin as what another host became: its seeds are part of it from the first epoch.

They are what growing is compared with: the final architecture, trained from scratch. A seed sits
behind the submodule of its slot, fully blended, as a fossil does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from esper.kasmina.blending import GateNetwork, blend
from esper.kasmina.blueprints.registry import blueprint_by_id, blueprint_names, copied_names
from esper.kasmina.hosts.registry import (
    build_host,
    check_host_options,
    host_slots,
    read_host_options,
    register_host,
)
from esper.leyline.alpha import AlphaAlgorithm
from esper.leyline.blueprints import Topology
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, unknown_name


@dataclass(frozen=True, kw_only=True)
class BuiltInSeed(Config):
    """A seed of a grown host."""

    slot: str = option(help="Slot it sits in.")
    blueprint: str = option(help="Name of its blueprint.")
    channels: int = option(help="Width of the activation at the slot.", minimum=1)
    algorithm: str = option("ADD", "How it is blended: ADD, MULTIPLY or GATE.")

    def __post_init__(self) -> None:
        """Check the names."""
        super().__post_init__()
        known = [name for name in blueprint_names() if name not in copied_names()]
        if self.blueprint not in known:
            raise unknown_name("blueprint", self.blueprint, known)
        if self.algorithm not in AlphaAlgorithm.__members__:
            raise unknown_name("algorithm", self.algorithm, AlphaAlgorithm.__members__)


@dataclass(frozen=True, kw_only=True)
class GrownConfig(Config):
    """A host, and the seeds that are built into it."""

    host: str = option(help="Name of the host that was grown.")
    host_options: Config = option(help="Its options, in its own class.")
    seeds: tuple[BuiltInSeed, ...] = option((), "What it has grown, at most one seed for a slot.")

    def __post_init__(self) -> None:
        """Check the rules that span several fields."""
        super().__post_init__()
        check_host_options("GrownConfig", self.host, self.host_options)
        slots = [seed.slot for seed in self.seeds]
        if len(set(slots)) != len(slots):
            raise ConfigError(f"GrownConfig.seeds must be in different slots, got {slots}")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Build the configuration from plain data; the host's own class reads its options."""
        return super().from_mapping(read_host_options(mapping))


class SeededModule(nn.Module):
    """A submodule of a host with a seed behind it."""

    def __init__(self, module: nn.Module, seed: BuiltInSeed, topology: Topology) -> None:
        """Build the seed; its weights come from torch's current random state."""
        super().__init__()
        self.module = module
        blueprint = blueprint_by_id(blueprint_names().index(seed.blueprint))
        self.seed = blueprint.build(seed.channels, topology)
        self.algorithm = int(AlphaAlgorithm[seed.algorithm])
        is_gated = self.algorithm == AlphaAlgorithm.GATE
        self.gate = GateNetwork(seed.channels, topology) if is_gated else None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the submodule's output with the seed's blended in."""
        h: Tensor = self.module(*args, **kwargs)
        return blend(h, self.seed(h), torch.ones((), device=h.device), self.algorithm, self.gate)


class _GrownHost(nn.Module):
    config_class: ClassVar[type[Config]] = GrownConfig
    topology: ClassVar[Topology]

    def __init__(self, config: GrownConfig) -> None:
        super().__init__()
        self.config = config
        self.host = build_host(config.host, config.host_options)
        paths = host_slots(self.host)
        for seed in config.seeds:
            if seed.slot not in paths:
                raise unknown_name("slot", seed.slot, paths)
            path = paths[seed.slot]
            whole = SeededModule(self.host.get_submodule(path), seed, self.topology)
            self.host.set_submodule(path, whole)
        self.slot_paths = {slot: f"host.{path}" for slot, path in paths.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        outputs: Tensor = self.host(*args, **kwargs)
        return outputs


@register_host("grown_cnn")
class GrownCnn(_GrownHost):
    """A grown host of images."""

    topology: ClassVar[Topology] = "cnn"


@register_host("grown_sequence")
class GrownSequence(_GrownHost):
    """A grown host of sequences."""

    topology: ClassVar[Topology] = "sequence"


@register_host("grown_vector")
class GrownVector(_GrownHost):
    """A grown host of vectors."""

    topology: ClassVar[Topology] = "vector"
