"""Low-rank residual maps."""

from __future__ import annotations

from torch import Tensor, nn

from esper.kasmina.blueprints.registry import register_blueprint
from esper.leyline.blueprints import Topology


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


@register_blueprint("lora", topologies=("sequence", "vector"))
class Lora(_LowRank):
    """Residual map of rank 8."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the two factors."""
        super().__init__(channels, 8)


@register_blueprint("lora_large", topologies=("sequence", "vector"))
class LoraLarge(_LowRank):
    """Residual map of rank 32."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the two factors."""
        super().__init__(channels, 32)
