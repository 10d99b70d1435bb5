"""The residual network of stages: blocks that keep the shape of their input, a slot per stage.

What stands in front of a slot is the whole stage, so that copies of it (`kin`) double all of its
blocks: 1, 2, 4, 8. The blocks of the host `residual` widen their input, so they cannot be copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn

from esper.kasmina.blueprints.conv import ConvBranch
from esper.kasmina.blueprints.registry import group_norm
from esper.kasmina.hosts.cnn import ImageConfig, StandardisedConv
from esper.kasmina.hosts.registry import register_host
from esper.leyline.config import Config, option
from esper.leyline.slots import Topology


@dataclass(frozen=True, kw_only=True)
class ResnetConfig(ImageConfig):
    """Sizes of the residual network of stages, and which of its slots are offered."""

    parts: ClassVar[str] = "stages"

    channels: tuple[int, ...] = option((8, 16), "Channels of each stage.", minimum=1)
    blocks: int = option(1, "Residual blocks of each stage.", minimum=1)


class PreActivationBlock(ConvBranch):
    """Adds two convolutions to its input: norm, ReLU, convolution, twice, and a last norm."""

    def __init__(self, channels: int) -> None:
        """Build the branch."""
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [group_norm(channels), nn.ReLU(), StandardisedConv(channels, channels)]
        # Filters have a fixed length: the last norm learns how much each channel adds.
        super().__init__([*layers, group_norm(channels)])


@register_host("resnet")
class ResnetHost(nn.Module):
    """Images [B, C, H, W] to class scores [B, num_classes]: a stem, stages, a classifier."""

    config_class: ClassVar[type[Config]] = ResnetConfig
    topology: ClassVar[Topology] = "cnn"

    def __init__(self, config: ResnetConfig) -> None:
        """Build the host; its weights come from torch's current random state."""
        super().__init__()
        self.config = config
        widths = config.channels
        self.stem = StandardisedConv(config.in_channels, widths[0])
        # One in front of every stage but the first: half the resolution, another width.
        self.transitions = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, next_width, 1, bias=False))
            for width, next_width in pairwise(widths)
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(PreActivationBlock(width) for _ in range(config.blocks)))
            for width in widths
        )
        self.norm = nn.Sequential(group_norm(widths[-1]), nn.ReLU())
        self.classifier = nn.Linear(widths[-1], config.num_classes)
        self.slot_paths = config.slot_paths()

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        hidden = self.stages[0](self.stem(images))
        for transition, stage in zip(self.transitions, self.stages[1:], strict=True):
            hidden = stage(transition(hidden))
        scores: Tensor = self.classifier(self.norm(hidden).mean(dim=(-2, -1)))
        return scores
