"""How training images are varied: crops out of a border of zeros, and mirrors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.randomness import random_words

Augmentation = Literal["none", "crop_flip"]

PADDING = 4


@dataclass(frozen=True, slots=True)
class Crops:
    """Where each image is cut from its padded self, and whether it is mirrored; of one shape."""

    top: Tensor
    left: Tensor
    is_flipped: Tensor

    def __getitem__(self, where: slice | tuple[slice, ...]) -> Crops:
        return Crops(self.top[where], self.left[where], self.is_flipped[where])

    def flatten(self) -> Crops:
        """Return the same crops in one dimension."""
        return Crops(self.top.flatten(), self.left.flatten(), self.is_flipped.flatten())


def draw_crops(seeds: Tensor, count: int) -> Crops:
    """Draw [R, count] crops on the device of the seeds, int64 [R]."""
    words, places = random_words(seeds, count), 2 * PADDING + 1
    # Every crop is made of the bits of one word: 16 for the row, 15 for the column, one to mirror.
    return Crops(
        ((words & 0xFFFF) * places) >> 16,
        (((words >> 16) & 0x7FFF) * places) >> 15,
        (words >> 31).bool(),
    )


def crop_flip(images: Tensor, crops: Crops) -> Tensor:
    """Return images [B, C, H, W] of any type, shifted within a border of zeros and mirrored."""
    count, channels, height, width = images.shape
    device = images.device
    rows = crops.top.to(device)[:, None] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    columns = torch.where(crops.is_flipped.to(device)[:, None], columns.flip(1), columns)
    columns = crops.left.to(device)[:, None] + columns
    padded = F.pad(images, (PADDING, PADDING, PADDING, PADDING))
    return padded[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
