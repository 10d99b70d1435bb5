"""The residual host: blocks of a widening convolution and a residual one, then a classifier.

A block widens, adds a branch of one convolution to what it has, and applies a ReLU; a pool follows.
Row 0 of the slots lies after each block, row 1 after each pool, as in the plain host.

Filters are standardised (Qiao et al. 2019). With the GroupNorm that hosts and seeds share, the
training loss falls as it does with batch norm, but without statistics of the batch: switching a
seed off for a measurement changes nothing but the seed (research/campaign/residual.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.hosts.registry import pick_slots, register_host
from esper.kasmina.norms import group_norm
from esper.leyline.blueprints import Topology
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError
from esper.leyline.slots import slot_id


@dataclass(frozen=True, kw_only=True)
class ResidualConfig(Config):
    """Sizes of the residual host, and which of its slots are offered."""

    channels: tuple[int, ...] = option((8, 16, 32), "Output channels of each block.", minimum=1)
    in_channels: int = option(3, "Channels of the input image.", minimum=1)
    num_classes: int = option(10, "Number of classes the classifier tells apart.", minimum=1)
    slots: tuple[str, ...] | None = option(
        None, "Slot ids offered for growth; every slot of row 0 if empty."
    )

    def __post_init__(self) -> None:
        """Check the rules that span several fields."""
        super().__post_init__()
        if not self.channels:
            raise ConfigError("ResidualConfig.channels must name at least one block, got none")
        self.slot_paths()

    def slot_paths(self) -> dict[str, str]:
        """Return the offered slots and the submodules they follow."""
        columns = range(len(self.channels))
        every = {slot_id(0, index): f"blocks.{index}" for index in columns}
        every |= {slot_id(1, index): f"pools.{index}" for index in columns}
        return pick_slots(every, self.slots)


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
class ResidualHost(nn.Module):
    """Images [B, C, H, W] to class scores [B, num_classes]."""

    config_class: ClassVar[type[Config]] = ResidualConfig
    topology: ClassVar[Topology] = "cnn"

    def __init__(self, config: ResidualConfig) -> None:
        """Build the host; its weights come from torch's current random state."""
        super().__init__()
        self.config = config
        widths = (config.in_channels, *config.channels)
        self.blocks = nn.ModuleList(ResidualBlock(a, b) for a, b in pairwise(widths))
        # One module per pool: a slot may follow each, and a slot's module runs once per forward.
        self.pools = nn.ModuleList(nn.MaxPool2d(2) for _ in config.channels)
        self.classifier = nn.Linear(widths[-1], config.num_classes)
        self.slot_paths = config.slot_paths()

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        hidden = images
        for block, pool in zip(self.blocks, self.pools, strict=True):
            hidden = pool(block(hidden))
        scores: Tensor = self.classifier(hidden.mean(dim=(-2, -1)))
        return scores
