from __future__ import annotations

import pytest
import torch

from esper.lab.tasks.dataset import SampleOrders

KEYS = [11, 5, 23]


@pytest.mark.parametrize(("size", "samples"), [(10, 3), (10, 10), (7, 20), (5, 1)])
def test_rows_together_are_rows_alone(size: int, samples: int) -> None:
    together = SampleOrders(KEYS, size)
    alone = [SampleOrders([key], size) for key in KEYS]
    # One after another, back, and rows at different places: what is kept must not matter.
    for places in ([0, 0, 0], [1, 1, 1], [2, 2, 2], [0, 0, 0], [3, 8, 1], [4, 4, 4]):
        firsts = [place * samples + place % 2 for place in places]
        drawn = together.draw(firsts, samples)
        assert drawn.shape == (3, samples)
        for row, first in enumerate(firsts):
            assert torch.equal(drawn[row], alone[row].draw([first], samples)[0])


def test_epochs_go_on_where_the_last_one_ended() -> None:
    orders = SampleOrders([7], 10)
    drawn = torch.cat([orders.draw([first], 4)[0] for first in range(0, 20, 4)])
    assert drawn[:10].sort().values.tolist() == list(range(10))
    assert drawn[10:].sort().values.tolist() == list(range(10))
    assert not torch.equal(drawn[:10], drawn[10:])


@pytest.mark.gpu
def test_a_device_draws_the_same_orders() -> None:
    here, there = (SampleOrders(KEYS, 5000, device) for device in ("cpu", "cuda"))
    for first in (0, 4200, 4900, 5600):
        assert torch.equal(there.draw([first] * 3, 700).cpu(), here.draw([first] * 3, 700))
