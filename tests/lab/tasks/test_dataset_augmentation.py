"""Crops and mirrors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from esper.lab.tasks.dataset import PADDING, Crops, crop_flip, draw_crops


def reference(image: Tensor, top: int, left: int, is_flipped: bool) -> Tensor:
    """The plain way: pad, mirror, cut. Mirroring the cut equals mirroring the image first."""
    height, width = image.shape[-2:]
    padded = F.pad(image, (PADDING, PADDING, PADDING, PADDING))
    cut = padded[:, top : top + height, left : left + width]
    return cut.flip(-1) if is_flipped else cut


@given(st.integers(0, 2**31), st.sampled_from([torch.uint8, torch.float32]))
def test_each_image_is_cut_as_drawn(seed: int, dtype: torch.dtype) -> None:
    images = (torch.rand(5, 3, 9, 7) * 255).to(dtype)
    crops = draw_crops(torch.tensor([seed]), 5).flatten()
    result = crop_flip(images, crops)
    assert result.dtype == dtype
    for index in range(5):
        expected = reference(
            images[index],
            int(crops.top[index]),
            int(crops.left[index]),
            bool(crops.is_flipped[index]),
        )
        assert torch.equal(result[index], expected)


def test_the_middle_crop_changes_nothing() -> None:
    images = torch.randn(2, 3, 8, 8)
    middle = torch.full((2,), PADDING)
    crops = Crops(middle, middle, torch.tensor([False, True]))
    result = crop_flip(images, crops)
    assert torch.equal(result[0], images[0])
    assert torch.equal(result[1], images[1].flip(-1))


def test_draws_cover_the_range_evenly() -> None:
    crops = draw_crops(torch.tensor([0]), 20_000).flatten()
    for offsets in (crops.top, crops.left):
        shares = offsets.bincount(minlength=9) / len(offsets)
        assert shares.shape == (9,)
        assert shares.tolist() == pytest.approx([1 / 9] * 9, abs=0.01)
    assert crops.is_flipped.float().mean().item() == pytest.approx(0.5, abs=0.01)
    together = torch.corrcoef(torch.stack([crops.top, crops.left]).float())[0, 1]
    assert abs(together.item()) < 0.03


def test_the_generator_decides() -> None:
    first = draw_crops(torch.tensor([3]), 64)
    same = draw_crops(torch.tensor([3]), 64)
    other = draw_crops(torch.tensor([4]), 64)
    assert torch.equal(first.top, same.top)
    assert torch.equal(first.is_flipped, same.is_flipped)
    assert not torch.equal(first.top, other.top)
