"""A learned share of normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import register_blueprint
from esper.kasmina.norms import group_count
from esper.leyline.blueprints import Topology


@register_blueprint("norm", topologies=("cnn", "sequence", "vector"))
class Norm(nn.Module):
    """Moves towards the normalised activation by a learned amount: x + tanh(s)(norm(x) - x)."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create a GroupNorm for images, a LayerNorm otherwise."""
        super().__init__()
        self.norm: nn.Module = (
            nn.GroupNorm(group_count(channels), channels)
            if topology == "cnn"
            else nn.LayerNorm(channels)
        )
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation, partly normalised."""
        out: Tensor = x + torch.tanh(self.scale) * (self.norm(x) - x)
        return out
