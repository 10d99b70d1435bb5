"""The residual host: blocks of a widening convolution and a residual one, then a classifier.

A block widens, adds a branch of one convolution to what it has, and applies a ReLU; a pool follows.
Row 0 of the slots lies after each block, row 1 after each pool, as in the plain host.

Filters are standardised (Qiao et al. 2019). With the GroupNorm that hosts and seeds share, the
training loss falls as it does with batch norm, but without statistics of the batch: switching a
seed off for a measurement changes nothing but the seed (research/campaign/residual.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.hosts.cnn import ImageConfig, ImageHost
from esper.kasmina.hosts.registry import register_host
from esper.kasmina.norms import group_norm
from esper.leyline.config import Config


@dataclass(frozen=True, kw_only=True)
class ResidualConfig(ImageConfig):
    """Sizes of the residual host, and which of its slots are offered."""


class StandardisedConv(nn.Conv2d):
    """A 3x3 convolution whose filters have mean 0 and length 1, whatever the weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Build it without a bias; the norm that follows has its own."""
        super().__init__(inputs, outputs, 3, padding=1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Convolve with the standardised filters."""
        centred = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        length = centred.square().sum(dim=(1, 2, 3), keepdim=True)
        return F.conv2d(images, centred * torch.rsqrt(length + 1e-8), padding=1)


class ResidualBlock(nn.Module):
    """Widen, then relu(hidden + branch(hidden))."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Build the two convolutions with their norms."""
        super().__init__()
        self.widen = nn.Sequential(
            StandardisedConv(inputs, outputs), group_norm(outputs), nn.ReLU()
        )
        self.branch = nn.Sequential(StandardisedConv(outputs, outputs), group_norm(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Return the block's activation at the resolution of its input."""
        hidden = self.widen(images)
        return F.relu(hidden + self.branch(hidden))


@register_host("residual")
class ResidualHost(ImageHost):
    """The residual host."""

    config_class: ClassVar[type[Config]] = ResidualConfig

    def __init__(self, config: ResidualConfig) -> None:
        """Build the host; its weights come from torch's current random state."""
        super().__init__(config, ResidualBlock)
