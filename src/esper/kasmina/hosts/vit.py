"""The host of image patches: a small vision transformer (pre-norm, learned positions, mean pool).

Its layers are divided into equal segments, with a slot after each. What stands in front of a slot
is the whole segment, so that copies of it (`kin`) double all of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from esper.kasmina.hosts.registry import pick_slots, register_host
from esper.kasmina.hosts.transformer import INIT_STD, AttentionLayer, LayersConfig
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, UsageError
from esper.leyline.slots import Topology, slot_id


@dataclass(frozen=True, kw_only=True)
class VitConfig(LayersConfig):
    """Sizes of the vision transformer, and which of its slots are offered."""

    dim: int = option(32, "Width of the residual stream.", minimum=1)
    heads: int = option(2, "Attention heads; divides dim.", minimum=1)
    layers: int = option(1, "Layers of attention.", minimum=1)
    segments: int = option(1, "Equal parts of the stack, each with a slot at its end.", minimum=1)
    image_size: int = option(16, "Height and width of the input image.", minimum=1)
    patch: int = option(4, "Height and width of a patch; divides image_size.", minimum=1)
    in_channels: int = option(3, "Channels of the input image.", minimum=1)
    num_classes: int = option(10, "Number of classes the classifier tells apart.", minimum=1)

    def __post_init__(self) -> None:
        """Check the rules that span several fields."""
        super().__post_init__()
        if self.image_size % self.patch:
            raise ConfigError(
                f"VitConfig.patch must divide image_size ({self.image_size}), got {self.patch}"
            )

    def slot_paths(self) -> dict[str, str]:
        """Return the offered slots and the submodules they follow."""
        every = {slot_id(0, index): f"segments.{index}" for index in range(self.segments)}
        return pick_slots(every, self.slots)


@register_host("vit")
class VitHost(nn.Module):
    """Images [B, C, H, W] to class scores [B, num_classes]."""

    config_class: ClassVar[type[Config]] = VitConfig
    topology: ClassVar[Topology] = "sequence"

    def __init__(self, config: VitConfig) -> None:
        """Build the host; its weights come from torch's current random state."""
        super().__init__()
        self.config = config
        # A matrix product, not a strided convolution: stacks of networks run it as one product.
        self.patches = nn.Linear(config.in_channels * config.patch**2, config.dim)
        self.positions = nn.Parameter(
            torch.empty((config.image_size // config.patch) ** 2, config.dim)
        )
        self.segments = nn.ModuleList(
            nn.Sequential(
                *(
                    AttentionLayer(config.dim, config.heads, causal=False)
                    for _ in range(config.segment_layers)
                )
            )
            for _ in range(config.segments)
        )
        self.norm = nn.LayerNorm(config.dim)
        self.classifier = nn.Linear(config.dim, config.num_classes)
        self.slot_paths = config.slot_paths()
        # Only the positions are drawn as in GPT-2: at the widths of this host, its small weights
        # train worse than PyTorch's own.
        nn.init.normal_(self.positions, std=INIT_STD)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        side = self.config.image_size
        if images.shape[-2:] != (side, side):
            height, width = images.shape[-2:]
            raise UsageError(
                f"an image of {height}x{width} does not fit the host's image_size of {side}; "
                f"resize it, or build the host for its size"
            )
        hidden = self.patches(self._cut(images)) + self.positions
        for segment in self.segments:
            hidden = segment(hidden)
        scores: Tensor = self.classifier(self.norm(hidden).mean(dim=-2))
        return scores

    def _cut(self, images: Tensor) -> Tensor:
        """Return the patches of images row by row, [B, C, H, W] to [B, T, C * patch * patch]."""
        patch = self.config.patch
        cut: Tensor = images.unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))
        # [B, C, rows, patch, columns, patch] to [B, rows, columns, C, patch, patch]
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
