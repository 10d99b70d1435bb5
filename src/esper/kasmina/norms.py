"""The group count shared by hosts and seeds, so that both treat channel statistics alike.

GroupNorm has no running statistics, so switching a seed off for a measurement changes nothing but
the seed. Below 32 channels there is one group: smaller groups would erase the channel means, which
in a narrow network carry most of what it knows.
"""

from __future__ import annotations

from torch import nn

from esper.leyline.errors import UsageError

SMALLEST_GROUPED_WIDTH = 32
MIN_CHANNELS_PER_GROUP = 16
GROUP_COUNTS = (32, 16, 8, 4, 2, 1)


def group_count(channels: int) -> int:
    """Return the number of GroupNorm groups for this many channels."""
    if channels < 1:
        raise UsageError(f"a group norm needs at least 1 channel, got {channels}")
    if channels < SMALLEST_GROUPED_WIDTH:
        return 1
    return next(
        count
        for count in GROUP_COUNTS
        if channels % count == 0 and channels // count >= MIN_CHANNELS_PER_GROUP
    )


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a GroupNorm over `channels` with the project's group count."""
    return nn.GroupNorm(group_count(channels), channels)
