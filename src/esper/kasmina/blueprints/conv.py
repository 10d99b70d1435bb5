"""Convolutional residual branches: pointwise, light, heavy.

Each stage is convolution -> ReLU -> GroupNorm. The norm comes last and the last norm's gamma
starts at zero: the seed is the identity at the start, gamma has a gradient at the first batch and
everything before it from the second on. (Norm before ReLU with a zero anywhere in front of them
has no gradient at all, for ever.)
"""

from __future__ import annotations

from torch import Tensor, nn

from esper.kasmina.blueprints.registry import register_blueprint
from esper.kasmina.norms import group_count
from esper.leyline.blueprints import Topology


def _stage(channels: int, kernel: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False),
        nn.ReLU(),
        nn.GroupNorm(group_count(channels), channels),
    ]


class _ConvBranch(nn.Module):
    """x + branch(x), with the branch's last gamma at zero."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)
        last = layers[-1]
        assert isinstance(last, nn.GroupNorm), "identity at the start comes from the last norm"
        nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation plus the branch."""
        out: Tensor = x + self.branch(x)
        return out


@register_blueprint("conv_small", topologies=("cnn",))
class ConvSmall(_ConvBranch):
    """Residual 1x1 convolution: mixes channels."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create one pointwise stage."""
        super().__init__(_stage(channels, 1))


@register_blueprint("conv_light", topologies=("cnn",))
class ConvLight(_ConvBranch):
    """Residual 3x3 convolution."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create one 3x3 stage."""
        super().__init__(_stage(channels, 3))


@register_blueprint("conv_heavy", topologies=("cnn",))
class ConvHeavy(_ConvBranch):
    """Residual pair of 3x3 convolutions."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create two 3x3 stages."""
        super().__init__(_stage(channels, 3) + _stage(channels, 3))


@register_blueprint("depthwise", topologies=("cnn",))
class Depthwise(_ConvBranch):
    """Residual depthwise 3x3 followed by a 1x1: much reach for few parameters."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create a depthwise and a pointwise convolution."""
        depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        super().__init__([depthwise, *_stage(channels, 1)])


@register_blueprint("bottleneck", topologies=("cnn",))
class Bottleneck(_ConvBranch):
    """Residual bottleneck: 1x1 down, 3x3, 1x1 up."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the branch at a quarter of the width, at least eight."""
        width = max(8, channels // 4)
        super().__init__(
            [
                nn.Conv2d(channels, width, 1, bias=False),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.ReLU(),
                nn.Conv2d(width, channels, 1, bias=False),
                nn.GroupNorm(group_count(channels), channels),
            ]
        )
