"""The registry of hosts, and the contract a host keeps.

A host is an `nn.Module` class with two class attributes, `config_class` (a `Config`) and
`topology`, a constructor `Host(config)`, and on every instance `slot_paths`: slot id to dotted
submodule name, in action order. Each of those submodules runs exactly once per forward and
returns a tensor. Nothing else is asked: growth happens around the submodules, not inside the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from esper.leyline.blueprints import TOPOLOGIES, Topology
from esper.leyline.config import Config
from esper.leyline.errors import ConfigError, SlotError, UsageError, nearest
from esper.leyline.registry import Registry
from esper.leyline.slots import parse_slot_id

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
    """Return plain data whose `host_options` the class of its `host` has read."""
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
