"""The unit of the blueprint checks: one blueprint at one width of one topology, with a host."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import Blueprint, group_norm
from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import GardenConfig, LifecycleConfig, TrainingMode
from esper.kasmina.state import GateConfig
from esper.leyline.slots import USUAL_AXES, Topology
from esper.leyline.stages import BlendStyle
from esper.utils.randomness import seeded

SLOT = "body"
"""Name of the slot in the hosts."""

CLASSES = 5
BATCH = 8
INPUT_SHAPES: dict[Topology, tuple[int, ...]] = {
    "cnn": (3, 6, 6),
    "sequence": (6, 7),
    "vector": (7,),
}


class _Past(nn.Module):
    """Adds the mean of the positions up to each one, so that the host of sequences is causal."""

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        return x + x.cumsum(1) / count[:, None]


class _Residual(nn.Module):
    """A block that can be copied."""

    def __init__(self, body: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x + self.body(x))
        return out


@dataclass(frozen=True)
class Case:
    """One blueprint at one width of one topology, with a host for it."""

    blueprint: Blueprint
    topology: Topology
    channels: int
    trail: tuple[str, ...] = field(default=())

    def at(self, *trail: str) -> Case:
        """Return the case with further words for messages."""
        return Case(self.blueprint, self.topology, self.channels, (*self.trail, *trail))

    def run(self, what: str, check: Callable[[Case], None]) -> None:
        """Run a check; any exception of the blueprint is a failure of the check."""
        case = self.at(what)
        try:
            check(case)
        except AssertionError:
            raise
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise AssertionError(f"{case}: raised {type(error).__name__}: {first}") from error

    def require(self, condition: bool, message: str) -> None:
        """Raise AssertionError with the case unless the condition holds."""
        if not condition:
            raise AssertionError(f"{self}: {message}")

    def build(self, key: int = 0) -> nn.Module:
        """Return a new seed; for a blueprint that copies blocks, a block to copy."""
        with seeded("check_blueprint", key):
            if self.blueprint.is_copy:
                return self._body(nn.Identity())
            return self.blueprint.build(self.channels, self.topology)

    def stirred(self, key: int = 0) -> nn.Module:
        """Return a seed with all parameters changed at random."""
        return stir(self.build(key), key)

    def activation(self, key: int = 0) -> Tensor:
        """Return an activation for the slot."""
        with seeded("activation", key):
            if self.topology == "cnn":
                return torch.randn(BATCH, self.channels, *INPUT_SHAPES["cnn"][1:])
            return torch.randn(BATCH, *INPUT_SHAPES[self.topology][:-1], self.channels)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and classes for the host."""
        shape = INPUT_SHAPES[self.topology]
        with seeded("batch"):
            positions = shape[:1] if self.topology == "sequence" else ()
            return torch.randn(BATCH, *shape), torch.randint(CLASSES, (BATCH, *positions))

    def host(self, *, rectified: bool = True) -> nn.Module:
        """Return a host with the slot in its middle; activations there are >= 0 if rectified."""
        width, inner = self.channels, nn.ReLU() if rectified else nn.Identity()
        with seeded("host"):
            if self.topology == "cnn":
                stem: nn.Module = nn.Conv2d(INPUT_SHAPES["cnn"][0], width, 3, padding=1)
                body = self._body(inner)
                # Spatial again after the slot, so that gradients there differ between places.
                mix = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
                tail = nn.Sequential(mix, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            else:
                stem = nn.Linear(INPUT_SHAPES[self.topology][-1], width)
                if self.topology == "sequence":
                    stem = nn.Sequential(stem, _Past())
                body = self._body(inner)
                tail = nn.Sequential(nn.Linear(width, width), nn.ReLU())
            tail.append(nn.Linear(width, CLASSES))
        return nn.Sequential(OrderedDict(stem=stem, body=body, tail=tail))

    def _body(self, last: nn.Module) -> nn.Module:
        """Return the block before the slot; residual for a blueprint that copies it."""
        width = self.channels
        if self.topology == "cnn":
            body = nn.Sequential(group_norm(width), nn.Conv2d(width, width, 3, padding=1))
        else:
            body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        return _Residual(body, last) if self.blueprint.is_copy else body.append(last)

    def garden(
        self,
        style: BlendStyle,
        mode: TrainingMode = "straight_through",
        *,
        rectified: bool = True,
        draw: int = 0,
    ) -> Garden:
        """Return a garden around a new host, with a seed of this blueprint in TRAINING."""
        plain = Case(self.blueprint, self.topology, self.channels)
        garden = copy.deepcopy(empty_garden(plain, mode, rectified, draw))
        for result in (
            garden.germinate(SLOT, self.blueprint.name, style=style, tempo=1, immediate=False),
            garden.advance(SLOT),
        ):
            self.require(result.ok, result.reason)
        return garden

    def __str__(self) -> str:
        place = f"on a {self.topology} slot of {self.channels} channels"
        return ", ".join([f"blueprint {self.blueprint.name!r} {place}", *self.trail])


@lru_cache(maxsize=8)
def empty_garden(case: Case, mode: TrainingMode, rectified: bool, draw: int) -> Garden:
    """Return a garden without seeds; finding its slots takes longer than copying it."""
    lifecycle = LifecycleConfig(gates=GateConfig(min_training_epochs=0))
    config = GardenConfig(lifecycle=lifecycle, training_mode=mode, seed=draw)
    axes, (x, _) = USUAL_AXES[case.topology], case.batch()
    return Garden(case.host(rectified=rectified), [SLOT], x, axes=axes, config=config)


def stir(module: nn.Module, key: int = 0) -> nn.Module:
    """Change every parameter at random, because initial zeros could hide errors."""
    with seeded("stir", key), torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return module
