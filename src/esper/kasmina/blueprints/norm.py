"""A learned share of normalisation, and the identity that is never germinated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import register_blueprint
from esper.kasmina.norms import group_norm
from esper.leyline.blueprints import Topology


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
