from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.growth.depth.blocks import Order, copy_block, copy_optimizer_state, plan_copies


def layout(before: int, after: int, order: Order, period: int = 1) -> str:
    """Which of the blocks a, b, c, … is where after copying in this order."""
    blocks = [*"abcdefgh"[:before], *"-" * (after - before)]
    for target, source in plan_copies(before, after, order, period):
        blocks[target] = blocks[source]
    return "".join(blocks)


@pytest.mark.parametrize(
    ("before", "after", "order", "period", "expected"),
    [
        (3, 6, "stack", 1, "abcabc"),
        (3, 12, "stack", 1, "abcabcabcabc"),
        (2, 5, "stack", 1, "ababb"),
        (4, 6, "stack", 1, "abcdcd"),
        (4, 5, "stack", 2, "abcdc"),
        (2, 5, "stack", 2, "ababa"),
        (3, 6, "interleave", 1, "aabbcc"),
        (2, 3, "interleave", 1, "aab"),
        (3, 12, "interleave", 1, "aaaabbbbcccc"),
        (4, 8, "interleave", 2, "ababcdcd"),
        (2, 5, "interleave", 2, "ababa"),
    ],
)
def test_orders(before: int, after: int, order: Order, period: int, expected: str) -> None:
    assert layout(before, after, order, period) == expected


def test_parameters_and_all_buffers_are_copied() -> None:
    one, other = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
    one[0].register_buffer("seen", torch.ones(2), persistent=False)
    other[0].register_buffer("seen", torch.zeros(2), persistent=False)
    one(torch.randn(5, 2))
    copy_block(one, other)
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert all(map(torch.equal, one.buffers(), other.buffers()))
    assert all(a is not b for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in other.parameters())


def test_state_of_every_kind_is_cloned() -> None:
    one, other, third = (nn.Linear(2, 2, bias=False) for _ in range(3))
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], 0.1)
    state = {"step": 3, "moment": torch.ones(2), "deep": [torch.zeros(1), {"x": torch.ones(1)}]}
    optimizer.state[one.weight] = state
    copy_optimizer_state(one, other, [optimizer])
    copied = optimizer.state[other.weight]
    assert copied["step"] == 3
    assert torch.equal(copied["moment"], state["moment"])
    optimizer.state[one.weight]["deep"][1]["x"] += 1
    assert float(copied["deep"][1]["x"]) == 1
    # What was never trained has no state, and neither has its copy.
    copy_optimizer_state(third, other, [optimizer])
    assert other.weight not in optimizer.state
