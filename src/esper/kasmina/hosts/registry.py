"""The registry of hosts, and the contract a host keeps.

A host is an `nn.Module` class with two class attributes, `config_class` (a `Config`) and
`topology`, a constructor `Host(config)`, and on every instance `slot_paths`: slot id to dotted
submodule name, in action order. Each of those submodules runs exactly once per forward and
returns a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import blueprint_by_id, blueprint_names, copied_names
from esper.kasmina.slot import GateNetwork, blend
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, SlotError, UsageError, nearest, unknown_name
from esper.leyline.registry import Registry
from esper.leyline.slots import TOPOLOGIES, Topology, parse_slot_id
from esper.leyline.stages import AlphaAlgorithm

H = TypeVar("H", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A registered host: its class, its configuration and the kind of activation at its slots."""

    name: str
    host_class: type[nn.Module]
    config_class: type[Config]
    topology: Topology


HOSTS: Registry[HostSpec] = Registry("host")


def register_host(name: str) -> Callable[[type[H]], type[H]]:
    """Register a class as the host called `name`; the class itself is returned unchanged."""

    def decorate(host_class: type[H]) -> type[H]:
        config_class = getattr(host_class, "config_class", None)
        if not (isinstance(config_class, type) and issubclass(config_class, Config)):
            raise UsageError(
                f"host {name!r} needs a class attribute config_class that derives from Config, "
                f"got {config_class!r}"
            )
        topology = getattr(host_class, "topology", None)
        if topology not in TOPOLOGIES:
            raise UsageError(
                f"host {name!r} needs a class attribute topology, one of "
                f"{', '.join(TOPOLOGIES)}, got {topology!r}"
            )
        HOSTS.register(name, HostSpec(name, host_class, config_class, topology))
        return host_class

    return decorate


def read_host_options(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data with `host_options` as the config class of its `host`."""
    values = dict(mapping)
    options, host = values.get("host_options"), values.get("host")
    if isinstance(options, Mapping) and isinstance(host, str):
        values["host_options"] = HOSTS.get(host).config_class.from_mapping(options)
    return values


def check_host_options(owner: str, host: str, options: Config) -> None:
    """Raise unless the `host_options` of a configuration are of the host's own class."""
    expected = HOSTS.get(host).config_class
    if not isinstance(options, expected):
        raise ConfigError(
            f"{owner}.host_options of host {host!r} must be a {expected.__name__}, "
            f"got a {type(options).__name__}"
        )


def build_host(name: str, options: Mapping[str, Any] | Config | None = None) -> nn.Module:
    """Build the host called `name` from its configuration or from plain options."""
    spec = HOSTS.get(name)
    if not isinstance(options, Config):
        options = spec.config_class.from_mapping(options or {})
    if not isinstance(options, spec.config_class):
        raise ConfigError(
            f"host {name!r} takes a {spec.config_class.__name__}, got a {type(options).__name__}"
        )
    host = spec.host_class(options)
    host_slots(host)
    return host


def host_slots(host: nn.Module) -> dict[str, str]:
    """Return slot id to submodule name in action order, after checking that the names exist."""
    paths: object = getattr(host, "slot_paths", None)
    if not isinstance(paths, dict) or not paths:
        raise SlotError(
            f"{type(host).__name__} needs an attribute slot_paths, slot id to submodule name, "
            f"for example {{'r0c0': 'blocks.0'}}, got {paths!r}"
        )
    known = {path for path, _ in host.named_modules() if path}
    for slot, path in paths.items():
        if path not in known:
            raise SlotError(
                f"slot {slot} of {type(host).__name__} names the submodule {path!r}, "
                f"which does not exist{nearest(str(path), known)}"
            )
    if sorted(paths, key=parse_slot_id) != list(paths):
        raise SlotError(
            f"slots of {type(host).__name__} must be listed row by row, got {', '.join(paths)}"
        )
    return dict(paths)


def pick_slots(every: Mapping[str, str], offered: tuple[str, ...] | None) -> dict[str, str]:
    """Return the offered part of a host's slots, row by row; None offers all of row 0."""
    if offered is None:
        offered = tuple(slot for slot in every if parse_slot_id(slot)[0] == 0)
    for slot in offered:
        if slot not in every:
            raise ConfigError(f"slots has {slot!r}, but this host has only {', '.join(every)}")
    if not offered or len(set(offered)) != len(offered):
        raise ConfigError(f"slots must name at least one slot, each once, got {offered!r}")
    return {slot: every[slot] for slot in sorted(offered, key=parse_slot_id)}


# ---- Hosts with seeds built in from the start: what another host has grown to


@dataclass(frozen=True, kw_only=True)
class BuiltInSeed(Config):
    """A seed of a grown host."""

    slot: str = option(help="Slot it sits in.")
    blueprint: str = option(help="Name of its blueprint.")
    channels: int = option(help="Width of the activation at the slot.", minimum=1)
    algorithm: str = option("ADD", "How it is blended: ADD, MULTIPLY or GATE.")
    copies: int = option(
        0, "How many copies of the block in front of it a kin is; 0 for all others.", minimum=0
    )

    def __post_init__(self) -> None:
        """Check the names."""
        super().__post_init__()
        if self.blueprint not in blueprint_names():
            raise unknown_name("blueprint", self.blueprint, blueprint_names())
        if (self.blueprint in copied_names()) != (self.copies > 0):
            raise ConfigError(
                f"BuiltInSeed.copies must be above 0 for {', '.join(copied_names())} and 0 for "
                f"other blueprints, got {self.copies} for {self.blueprint}"
            )
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

    def __init__(
        self,
        module: nn.Module,
        seed: BuiltInSeed,
        topology: Topology,
        draw_block: Callable[[], nn.Module],
    ) -> None:
        """Build the seed; its weights come from torch's current random state.

        Args:
            module: the submodule.
            seed: what is built behind it.
            topology: kind of activation there.
            draw_block: makes another module like it, with weights of its own.
        """
        super().__init__()
        self.module = module
        if seed.copies:
            self.seed: nn.Module = nn.Sequential(*(draw_block() for _ in range(seed.copies)))
        else:
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

            def draw_block(path: str = path) -> nn.Module:
                return build_host(config.host, config.host_options).get_submodule(path)

            block = self.host.get_submodule(path)
            whole = SeededModule(block, seed, self.topology, draw_block)
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
