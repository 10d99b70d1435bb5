from __future__ import annotations

import torch
from torch.nn import functional as F

from esper.leyline.actions import NUM_OPS
from esper.tamiyo.networks.critic import (
    make_value_head,
    state_value,
    value_of_every_op,
    value_of_op,
)


def test_the_op_enters_as_a_one_hot() -> None:
    head = make_value_head(16, sees_op=True)
    memory = torch.randn(3, 5, 16)
    op = torch.randint(NUM_OPS, (3, 5))
    plain = head(torch.cat([memory, F.one_hot(op, NUM_OPS).float()], -1)).squeeze(-1)
    torch.testing.assert_close(value_of_op(head, memory, op), plain)
    every = value_of_every_op(head, memory)
    assert every.shape == (3, 5, NUM_OPS)
    torch.testing.assert_close(every.gather(-1, op[..., None]).squeeze(-1), plain)


def test_only_the_taken_op_learns() -> None:
    head = make_value_head(16, sees_op=True)
    value_of_op(head, torch.randn(8, 16), torch.full((8,), 2)).square().sum().backward()
    gradient = head[0].weight.grad[:, 16:].abs().sum(0)
    assert gradient[2] > 0
    assert gradient.sum() == gradient[2]


def test_a_state_value_sees_the_memory_alone() -> None:
    head = make_value_head(16, sees_op=False)
    memory = torch.randn(4, 16)
    torch.testing.assert_close(state_value(head, memory), head(memory)[:, 0])
