"""Residual perceptrons and low-rank maps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import group_norm, register_blueprint
from esper.leyline.slots import Topology


class _Perceptron(nn.Module):
    """x + fc2(gelu(fc1(x))); `fc2` starts at zero and has a gradient at the first batch."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, factor * channels)
        self.fc2 = nn.Linear(factor * channels, channels)
        nn.init.zeros_(self.fc2.weight)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation plus the perceptron's output."""
        out: Tensor = x + self.fc2(F.gelu(self.fc1(x)))
        return out


@register_blueprint("mlp_small", topologies=("sequence", "vector"), kind="mlp")
class MlpSmall(_Perceptron):
    """Residual perceptron, twice as wide inside."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the two layers."""
        super().__init__(channels, 2)


@register_blueprint("mlp", topologies=("sequence", "vector"), kind="mlp")
class Mlp(_Perceptron):
    """Residual perceptron, four times as wide inside."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the two layers."""
        super().__init__(channels, 4)


class _LowRank(nn.Module):
    """x + up(down(x)); `up` starts at zero and has a gradient at the first batch."""

    def __init__(self, channels: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(channels, rank, bias=False)
        self.up = nn.Linear(rank, channels, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation plus the low-rank map of it."""
        out: Tensor = x + self.up(self.down(x))
        return out


@register_blueprint("lora", topologies=("sequence", "vector"), kind="lora")
class Lora(_LowRank):
    """Residual map of rank 8."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the two factors."""
        super().__init__(channels, 8)


@register_blueprint("lora_large", topologies=("sequence", "vector"), kind="lora")
class LoraLarge(_LowRank):
    """Residual map of rank 32."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the two factors."""
        super().__init__(channels, 32)


# ---- A learned share of normalisation, and the identity that is never germinated


@register_blueprint("norm", topologies=("cnn", "sequence", "vector"), kind="norm")
class Norm(nn.Module):
    """Moves towards the normalised activation by a learned amount: x + tanh(s)(norm(x) - x)."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create a GroupNorm for images, a LayerNorm otherwise."""
        super().__init__()
        self.norm: nn.Module = group_norm(channels) if topology == "cnn" else nn.LayerNorm(channels)
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation, partly normalised."""
        out: Tensor = x + torch.tanh(self.scale) * (self.norm(x) - x)
        return out


@register_blueprint("noop", topologies=("cnn", "sequence", "vector"), kind="identity")
class Noop(nn.Module):
    """Identity without parameters; always masked."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create nothing."""
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x
