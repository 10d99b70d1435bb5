from __future__ import annotations

import pytest
import torch

from esper.growth.depth.deepen import Deepen
from tests.growth.depth.models import LENGTH, VOCABULARY, WIDTH, make_gpt, make_resnet, tokens

ROWS = 4


def of_gpt(blocks: int) -> int:
    """Training FLOPs of a batch: 6 for each weight and token, and those of attention."""
    matrices = 8 * WIDTH * WIDTH * blocks + WIDTH * VOCABULARY
    attention = 2 * 2 * LENGTH * LENGTH * WIDTH * blocks
    return 6 * matrices * LENGTH * ROWS + 3 * attention * ROWS


@pytest.mark.parametrize("awake", [1, 3, 8])
def test_only_blocks_awake_are_counted(awake: int) -> None:
    model = make_gpt(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    depth = Deepen(model, optimizer, start=awake, at={}, example=tokens(0, ROWS)[:, :-1])
    for _ in range(3):
        depth.step()
    assert depth.flops == 3 * of_gpt(awake)


def test_the_flops_of_a_run_are_those_of_its_parts() -> None:
    model = make_gpt(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    depth = Deepen(
        model, optimizer, total_steps=10, example=tokens(0, ROWS)[:, :-1], batches_per_step=3
    )
    for _ in range(10):
        depth.step()
    assert depth.flops == 3 * (2 * of_gpt(2) + 2 * of_gpt(4) + 6 * of_gpt(8))
    assert [event["flops"] for event in depth.history] == [
        3 * 2 * of_gpt(2),
        3 * (2 * of_gpt(2) + 2 * of_gpt(4)),
    ]


def test_stacks_of_different_cost() -> None:
    model = make_resnet()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    example = torch.zeros(2, 1, 8, 8)
    depth = Deepen(model, optimizer, start=1, at={}, example=example)
    costs = depth.count_flops(example)
    small = costs.per_batch({"stage1": 1, "stage2": 1})
    one, other = (
        costs.per_batch(a) - small for a in ({"stage1": 2, "stage2": 1}, {"stage1": 1, "stage2": 2})
    )
    assert one == 4 * other == 3 * 2 * 2 * 64 * 4 * 4 * 9
