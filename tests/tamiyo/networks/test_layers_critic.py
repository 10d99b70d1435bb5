from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from esper.leyline.actions import NUM_OPS
from esper.leyline.errors import ConfigError
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.layers import (
    finish,
    make_op_encoder,
    make_value_head,
    memory_part,
    op_part,
    state_value,
    value_of_op,
)
from tests.tamiyo.networks.situations import random_inputs, random_masks, small_policy


def make(**options: Any) -> tuple[nn.Sequential, nn.Sequential | None]:
    config = PolicyConfig(lstm_hidden_dim=16, **options)
    return make_value_head(config), make_op_encoder(config)


def test_the_op_enters_as_a_one_hot() -> None:
    head, encoder = make()
    assert encoder is None
    memory, op = torch.randn(3, 5, 16), torch.randint(NUM_OPS, (3, 5))
    one_hot = F.one_hot(op, NUM_OPS).float()
    plain = head(torch.cat([memory, one_hot], -1)).squeeze(-1)
    torch.testing.assert_close(value_of_op(head, None, memory, op), plain)
    parts = memory_part(head, memory) + op_part(head, one_hot)
    torch.testing.assert_close(finish(head, parts), plain)


def test_an_encoded_op_takes_the_place_of_the_one_hot() -> None:
    head, encoder = make(op_encoder=True)
    assert encoder is not None
    memory, op = torch.randn(8, 16), torch.randint(NUM_OPS, (8,))
    told = encoder(F.one_hot(op, NUM_OPS).float())
    plain = head(torch.cat([memory, told], -1)).squeeze(-1)
    torch.testing.assert_close(value_of_op(head, encoder, memory, op), plain)
    value_of_op(head, encoder, memory, op).sum().backward()
    assert encoder[0].weight.grad.abs().sum() > 0


def test_only_the_taken_op_learns() -> None:
    head, _ = make()
    value_of_op(head, None, torch.randn(8, 16), torch.full((8,), 2)).square().sum().backward()
    gradient = head[0].weight.grad[:, 16:].abs().sum(0)
    assert gradient[2] > 0
    assert gradient.sum() == gradient[2]


def test_a_state_value_sees_the_memory_alone() -> None:
    head, _ = make(critic="state")
    memory = torch.randn(4, 16)
    torch.testing.assert_close(state_value(head, memory), head(memory)[:, 0])
    with pytest.raises(ConfigError, match="op_encoder needs a critic that sees the op"):
        PolicyConfig(critic="state", op_encoder=True)


@pytest.mark.parametrize("op_encoder", [False, True])
def test_the_soft_critic_is_fed_the_softmax_as_document_001_writes_it(op_encoder: bool) -> None:
    net = small_policy(critic="op_soft", op_encoder=op_encoder, floor={"kind": "off"})
    states, blueprints = random_inputs(net, 6, 1)
    masks = random_masks(6)
    legal = net.table.row_masks(masks, (6,))[:, None]
    out = net(states, blueprints, masks=legal)
    memory = net.remember(states, blueprints, None, None)[0].transpose(0, 1)
    allowed = out["op_logits"].masked_fill(~masks.op[:, None], -torch.inf)
    op_probs = F.softmax(allowed, dim=-1).detach()
    told = op_probs if net.op_encoder is None else net.op_encoder(op_probs)
    plain = net.value_head(torch.cat([memory, told], dim=-1)).squeeze(-1)
    torch.testing.assert_close(out["value"], plain)
    step = net.get_action(states[:, 0], masks, blueprints[:, 0])
    torch.testing.assert_close(step.value, plain[:, 0])
    # Neither what was taken nor the mean over ops: another number, and no gradient for the actor.
    assert not torch.allclose(step.value, step.op_values.gather(1, step.op[:, None]).squeeze(1))
    out["value"].sum().backward()
    assert net.op_head[-1].weight.grad is None
    assert net.value_head[0].weight.grad.abs().sum() > 0


def test_an_update_uses_the_op_taken_and_imitation_the_baseline() -> None:
    net = small_policy(critic="op_soft")
    states, blueprints = random_inputs(net, 4, 3)
    actions = torch.zeros(4, 3, 8, dtype=torch.int64)
    scores = net.score(states, blueprints, actions, None)
    waiting = net(states, blueprints, op_for_value=torch.zeros(4, 3, dtype=torch.int64))
    torch.testing.assert_close(scores.values, waiting["value"])
    torch.testing.assert_close(scores.baseline, net(states, blueprints)["value"])
