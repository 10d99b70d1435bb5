"""How training images are varied: crops out of a border of zeros, and mirrors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Augmentation = Literal["none", "crop_flip"]

PADDING = 4


@dataclass(frozen=True, slots=True)
class Crops:
    """Where each image is cut from its padded self, and whether it is mirrored; all [B]."""

    top: Tensor
    left: Tensor
    is_flipped: Tensor


def draw_crops(count: int, generator: torch.Generator, padding: int = PADDING) -> Crops:
    """Draw crops for `count` images on the generator's own device."""
    offsets = torch.randint(
        0, 2 * padding + 1, (2, count), generator=generator, device=generator.device
    )
    flips = torch.randint(0, 2, (count,), generator=generator, device=generator.device)
    return Crops(offsets[0], offsets[1], flips.bool())


def crop_flip(images: Tensor, crops: Crops, padding: int = PADDING) -> Tensor:
    """Return images [B, C, H, W] of any type, shifted within a border of zeros and mirrored."""
    count, channels, height, width = images.shape
    device = images.device
    rows = crops.top.to(device)[:, None] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    columns = torch.where(crops.is_flipped.to(device)[:, None], columns.flip(1), columns)
    columns = crops.left.to(device)[:, None] + columns
    padded = F.pad(images, (padding, padding, padding, padding))
    return padded[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
