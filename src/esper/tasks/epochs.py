"""Which samples an epoch has: a function of a row's key and of the epoch's number alone.

Samples come in passes: all of them once, in a fresh order, before any comes again. Epochs cut this
sequence into equal parts, whether one is a small share of a pass or several passes long. Orders are
drawn where they are used, on the CPU or on a device, for all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.leyline.randomness import derive_seed, random_orders
from esper.leyline.transfer import to_device


class EpochOrders:
    """The orders of rows that have equally many samples.

    Args:
        keys: names of the rows' random streams.
        size: training samples of a row.
        samples: samples of an epoch.
        device: where orders are drawn.
    """

    def __init__(
        self, keys: Sequence[int], size: int, samples: int, device: torch.device | str = "cpu"
    ) -> None:
        """Draw nothing yet."""
        self._keys, self._size, self._samples = list(keys), size, samples
        self._device = torch.device(device)
        self._passes: dict[tuple[int, ...], Tensor] = {}
        """The passes that the last epoch touched, by their number in every row."""

    def draw(self, epochs: Sequence[int]) -> Tensor:
        """Return int64 [R, samples]: positions in 0, ..., size - 1 of the epoch each row is at."""
        starts = [divmod((epoch - 1) * self._samples, self._size) for epoch in epochs]
        most = max(offset + self._samples for _, offset in starts)
        numbers = [
            tuple(number + later for number, _ in starts) for later in range(-(-most // self._size))
        ]
        # The next epoch mostly goes on in the same pass.
        self._passes = {
            which: self._passes[which] if which in self._passes else self._draw_pass(which)
            for which in numbers
        }
        orders = torch.cat([self._passes[which] for which in numbers], 1)
        offsets = to_device(torch.tensor([offset for _, offset in starts]), self._device)
        places = offsets[:, None] + torch.arange(self._samples, device=self._device)
        return orders.gather(1, places).long()

    def _draw_pass(self, numbers: Sequence[int]) -> Tensor:
        """Return int32 [R, size]: everything once, in the order of a row's pass of this number."""
        seeds = [
            derive_seed(key, "pass", number)
            for key, number in zip(self._keys, numbers, strict=True)
        ]
        return random_orders(to_device(torch.tensor(seeds), self._device), self._size).int()
