"""The identity: id 0, the placeholder wherever no blueprint is chosen; never germinated."""

from __future__ import annotations

from torch import Tensor, nn

from esper.kasmina.blueprints.registry import register_blueprint
from esper.leyline.blueprints import Topology


@register_blueprint("noop", topologies=("cnn", "sequence", "vector"))
class Noop(nn.Module):
    """Identity without parameters; always masked."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create nothing."""
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x
