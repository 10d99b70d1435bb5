"""The group rule: one group below 32 channels, then groups of at least 16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina.blueprints.registry import group_count, group_norm
from esper.leyline.errors import UsageError


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(1, 1), (8, 1), (16, 1), (31, 1), (32, 2), (33, 1), (48, 2), (64, 4), (128, 8), (512, 32)],
)
def test_known_widths(channels: int, groups: int) -> None:
    assert group_count(channels) == groups


@given(st.integers(1, 2048))
def test_groups_divide_and_are_wide_enough(channels: int) -> None:
    groups = group_count(channels)
    assert channels % groups == 0
    assert groups == 1 or channels // groups >= 16


def test_channel_means_survive_below_32_channels() -> None:
    x = torch.randn(4, 8, 5, 5) + torch.arange(8.0)[:, None, None]
    means = group_norm(8)(x).mean(dim=(0, 2, 3))
    assert bool((means.diff() > 0.1).all())


def test_no_channels_is_an_error() -> None:
    with pytest.raises(UsageError, match="at least 1 channel"):
        group_count(0)
