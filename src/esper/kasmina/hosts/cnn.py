"""The convolutional host: blocks of convolution, GroupNorm and ReLU, then a linear classifier.

Row 0 of its slots lies after each block and before that block's pool, row 1 after each pool. The
action order is row by row; the order of execution interleaves the rows (r0c0, r1c0, r0c1, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import group_norm
from esper.kasmina.hosts.registry import pick_slots, register_host
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError
from esper.leyline.slots import Topology, slot_id


def doubling(base: int, blocks: int) -> tuple[int, ...]:
    """Return channel counts that start at `base` and double from block to block."""
    return tuple(base * 2**index for index in range(blocks))


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Config):
    """Sizes of a convolutional host, and which of its slots are offered."""

    parts: ClassVar[str] = "blocks"
    """The submodules, one for each width, that the slots of row 0 follow."""

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
            kind = type(self).__name__
            raise ConfigError(f"{kind}.channels must name at least one width, got none")
        self.slot_paths()

    def every_slot(self) -> dict[str, str]:
        """Return all slots and the submodules they follow."""
        return {slot_id(0, index): f"{self.parts}.{index}" for index in range(len(self.channels))}

    def slot_paths(self) -> dict[str, str]:
        """Return the offered slots and the submodules they follow."""
        return pick_slots(self.every_slot(), self.slots)


@dataclass(frozen=True, kw_only=True)
class PooledConfig(ImageConfig):
    """Sizes of a host of blocks, each with a pool."""

    @property
    def pools(self) -> int:
        """Number of pools."""
        return len(self.channels)

    def every_slot(self) -> dict[str, str]:
        """Return all slots and the submodules they follow."""
        pools = {slot_id(1, index): f"pools.{index}" for index in range(self.pools)}
        return super().every_slot() | pools


class ImageHost(nn.Module):
    """Images [B, C, H, W] to class scores [B, num_classes]: blocks, pools, a classifier.

    Args:
        config: the sizes.
        block: makes a block that keeps the image's size, from its input and output channels.
    """

    topology: ClassVar[Topology] = "cnn"

    def __init__(self, config: PooledConfig, block: Callable[[int, int], nn.Module]) -> None:
        """Build the host; its weights come from torch's current random state."""
        super().__init__()
        self.config = config
        widths = (config.in_channels, *config.channels)
        self.blocks = nn.ModuleList(block(a, b) for a, b in pairwise(widths))
        # One module per pool: a slot may follow each, and a slot's module runs once per forward.
        self.pools = nn.ModuleList(nn.MaxPool2d(2) for _ in range(config.pools))
        self.classifier = nn.Linear(widths[-1], config.num_classes)
        self.slot_paths = config.slot_paths()

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        hidden = images
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index < len(self.pools):
                hidden = self.pools[index](hidden)
        scores: Tensor = self.classifier(hidden.mean(dim=(-2, -1)))
        return scores


@dataclass(frozen=True, kw_only=True)
class CnnConfig(PooledConfig):
    """Sizes of the convolutional host, and which of its slots are offered."""

    kernel_size: int = option(3, "Side of the square convolution kernels; odd.", minimum=1)
    pool_layers: int | None = option(
        None,
        "How many blocks, from the first, are followed by a 2x2 max pool; all if empty.",
        minimum=0,
    )

    def __post_init__(self) -> None:
        """Check the rules that span several fields."""
        super().__post_init__()
        if self.kernel_size % 2 == 0:
            raise ConfigError(
                f"CnnConfig.kernel_size must be odd, so that a block keeps the image's size, "
                f"got {self.kernel_size}"
            )
        if self.pools > len(self.channels):
            raise ConfigError(
                f"CnnConfig.pool_layers must be at most the number of blocks, "
                f"{len(self.channels)}, got {self.pool_layers}"
            )

    @property
    def pools(self) -> int:
        """Number of pools."""
        return len(self.channels) if self.pool_layers is None else self.pool_layers


@register_host("cnn")
class CnnHost(ImageHost):
    """The convolutional host."""

    config_class: ClassVar[type[Config]] = CnnConfig

    def __init__(self, config: CnnConfig) -> None:
        """Build the host; its weights come from torch's current random state."""
        size = config.kernel_size

        def block(width: int, next_width: int) -> nn.Module:
            # The norm that follows has its own bias.
            filters = nn.Conv2d(width, next_width, size, padding=size // 2, bias=False)
            return nn.Sequential(filters, group_norm(next_width), nn.ReLU())

        super().__init__(config, block)


# ---- The residual host: blocks of a widening convolution and a residual one, then a classifier


@dataclass(frozen=True, kw_only=True)
class ResidualConfig(PooledConfig):
    """Sizes of the residual host, and which of its slots are offered."""


class StandardisedConv(nn.Conv2d):
    """A 3x3 convolution whose filters have mean 0 and length 1, whatever the weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Build it without a bias; the norm that follows has its own."""
        super().__init__(inputs, outputs, 3, padding=1, bias=False)

    def filters(self) -> Tensor:
        """Return the standardised filters."""
        centred = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        length = centred.square().sum(dim=(1, 2, 3), keepdim=True)
        return centred * torch.rsqrt(length + 1e-8)

    def forward(self, images: Tensor) -> Tensor:
        """Convolve with the standardised filters."""
        return F.conv2d(images, self.filters(), padding=1)


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
