"""Hosts and blueprints as a user might write them, with habits that ours do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import BLUEPRINTS, register_blueprint
from esper.kasmina.hosts import HOSTS, register_host
from esper.leyline.config import Config, option
from esper.leyline.slots import Topology
from tests.lab.population.tiny_tasks import TinyValues


@dataclass(frozen=True, kw_only=True)
class OddConfig(Config):
    """What the odd host is made of."""

    dropout: float = option(0.0, "Share of activations dropped.", minimum=0.0, maximum=0.9)
    batch_norm: bool = option(False, "Whether it normalises over the batch.")
    slot: str = option("body", "The submodule behind which seeds grow.")


class OddHost(nn.Module):
    """Some weights never learn, some are never used, and a table is no parameter at all."""

    config_class: ClassVar[type[Config]] = OddConfig
    topology: ClassVar[Topology] = "vector"
    shift: Tensor

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.stem = nn.Tanh()
        self.fixed = nn.Linear(5, 6)
        self.fixed.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(-1, 1, 6))
        self.body = nn.Sequential(
            nn.Linear(6, 6), nn.BatchNorm1d(6) if config.batch_norm else nn.LayerNorm(6)
        )
        self.relu = nn.ReLU(inplace=True)
        self.spare = nn.Linear(6, 2)
        self.drop = nn.Dropout(config.dropout)
        self.head = nn.Linear(6, 2)
        self.slot_paths = {"r0c0": config.slot}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.body(torch.tanh(self.fixed(self.stem(x))) + self.shift))
        out: Tensor = self.head(self.drop(hidden))
        return out


class OddSeed(nn.Module):
    """Has a part called gate, a frozen scale, a spare weight and a constant."""

    sign: Tensor

    def __init__(self, channels: int, topology: Topology) -> None:
        super().__init__()
        self.gate = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.scale = nn.Parameter(torch.rand(channels), requires_grad=False)
        self.spare = nn.Parameter(torch.ones(3))
        self.register_buffer("sign", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        opened = torch.sigmoid(self.gate(x)) * self.scale
        result: Tensor = x + self.sign * self.out(opened * x)
        return result


class Odd(nn.Module):
    """A vector network that does one unusual thing, as a host and as a seed."""

    def __init__(self, channels: int = 6, topology: Topology = "vector") -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Normalising(Odd):
    def __init__(self, channels: int = 6, topology: Topology = "vector") -> None:
        super().__init__(channels, topology)
        self.norm = nn.BatchNorm1d(channels)


class Dropping(Odd):
    def __init__(self, channels: int = 6, topology: Topology = "vector") -> None:
        super().__init__(channels, topology)
        self.drop = nn.Dropout(0.5)


class Drawing(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), training=self.training)


class Deciding(Odd):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out if float(out.detach().sum()) > 0 else -out


class Differing(Odd):
    noise: Tensor

    def __init__(self, channels: int = 6, topology: Topology = "vector") -> None:
        super().__init__(channels, topology)
        self.register_buffer("noise", torch.randn(channels))


class Counting(Odd):
    calls: Tensor

    def __init__(self, channels: int = 6, topology: Topology = "vector") -> None:
        super().__init__(channels, topology)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Unwilling(Odd):
    no_vmap = "it is written in another language"


class Widening(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], -1)


class Broken(Odd):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("not today")


def odd_task(**options: Any) -> TinyValues:
    """Return the task of real values with the odd host in place of its own."""
    return TinyValues(TinyValues.defaults.replace(host="odd", host_options=OddConfig(**options)))


@contextmanager
def plugged_in(**blueprints: type[nn.Module]) -> Iterator[None]:
    """Within the block the odd host and these vector blueprints are registered."""
    register_host("odd")(OddHost)
    for name, module in blueprints.items():
        _register(name)(module)
    try:
        yield
    finally:
        HOSTS.unregister("odd")
        for name in blueprints:
            BLUEPRINTS.unregister(name)


def _register(name: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    return register_blueprint(name, topologies=("vector",), note="Odd.")
