from __future__ import annotations

import pytest
import torch

from esper.lab.tasks.dataset import EpochOrders

KEYS = [11, 5, 23]


@pytest.mark.parametrize(("size", "samples"), [(10, 3), (10, 10), (7, 20), (5, 1)])
def test_rows_together_are_rows_alone(size: int, samples: int) -> None:
    together = EpochOrders(KEYS, size, samples)
    alone = [EpochOrders([key], size, samples) for key in KEYS]
    # One after another, back, and rows at different epochs: what is kept must not matter.
    for epochs in ([1, 1, 1], [2, 2, 2], [3, 3, 3], [1, 1, 1], [4, 9, 2]):
        drawn = together.draw(epochs)
        assert drawn.shape == (3, samples)
        for row, epoch in enumerate(epochs):
            assert torch.equal(drawn[row], alone[row].draw([epoch])[0])


def test_epochs_go_on_where_the_last_one_ended() -> None:
    orders = EpochOrders([7], 10, 4)
    drawn = torch.cat([orders.draw([epoch])[0] for epoch in range(1, 6)])
    assert drawn[:10].sort().values.tolist() == list(range(10))
    assert drawn[10:].sort().values.tolist() == list(range(10))
    assert not torch.equal(drawn[:10], drawn[10:])


@pytest.mark.gpu
def test_a_device_draws_the_same_orders() -> None:
    here, there = (EpochOrders(KEYS, 5000, 700, device) for device in ("cpu", "cuda"))
    for epoch in (1, 7, 8, 9):
        assert torch.equal(there.draw([epoch] * 3).cpu(), here.draw([epoch] * 3))
