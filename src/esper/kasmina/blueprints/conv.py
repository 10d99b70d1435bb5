"""Convolutional residual branches: pointwise, light, heavy, depthwise, bottleneck.

A stage is convolution -> GroupNorm -> ReLU, with the usual random start. A zero anywhere in front
of a norm or a ReLU would leave the branch without a gradient, or with one hundreds of times too
large; a zero behind them would make the seed the identity at first, but measurably worse in the
end (docs/decisions/0004). Only the bottleneck ends in a norm: there its gamma starts at zero.
"""

from __future__ import annotations

from torch import Tensor, nn

from esper.kasmina.blueprints.registry import group_count, register_blueprint
from esper.leyline.slots import Topology


def _stage(channels: int, kernel: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False),
        nn.GroupNorm(group_count(channels), channels),
        nn.ReLU(),
    ]


class ConvBranch(nn.Module):
    """x + branch(x)."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation plus the branch."""
        out: Tensor = x + self.branch(x)
        return out


@register_blueprint("conv_small", topologies=("cnn",), identity_at_start=(), kind="convolution")
class ConvSmall(ConvBranch):
    """Residual 1x1 convolution: mixes channels."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create one pointwise stage."""
        super().__init__(_stage(channels, 1))


@register_blueprint("conv_light", topologies=("cnn",), identity_at_start=(), kind="convolution")
class ConvLight(ConvBranch):
    """Residual 3x3 convolution."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create one 3x3 stage."""
        super().__init__(_stage(channels, 3))


@register_blueprint("conv_heavy", topologies=("cnn",), identity_at_start=(), kind="convolution")
class ConvHeavy(ConvBranch):
    """Residual pair of 3x3 convolutions."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create two 3x3 stages."""
        super().__init__(_stage(channels, 3) + _stage(channels, 3))


@register_blueprint("depthwise", topologies=("cnn",), identity_at_start=(), kind="depthwise")
class Depthwise(ConvBranch):
    """Residual depthwise 3x3 followed by a 1x1: much reach for few parameters."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create a depthwise and a pointwise convolution."""
        depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        super().__init__([depthwise, *_stage(channels, 1)])


@register_blueprint("bottleneck", topologies=("cnn",), kind="bottleneck")
class Bottleneck(ConvBranch):
    """Residual bottleneck: 1x1 down, 3x3, 1x1 up, norm; the identity at the start."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the branch at a quarter of the width, at least eight."""
        width = max(8, channels // 4)
        norm = nn.GroupNorm(group_count(channels), channels)
        nn.init.zeros_(norm.weight)
        super().__init__(
            [
                nn.Conv2d(channels, width, 1, bias=False),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.ReLU(),
                nn.Conv2d(width, channels, 1, bias=False),
                norm,
            ]
        )
