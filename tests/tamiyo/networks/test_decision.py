from __future__ import annotations

import torch

from esper.leyline.actions import HEAD_NAMES
from tests.tamiyo.networks.situations import random_inputs, random_masks, small_policy


def test_a_step_reads_by_head() -> None:
    net = small_policy()
    states, blueprints = random_inputs(net, 5)
    step = net.get_action(states, random_masks(5), blueprints)
    assert [head for head, _ in step.items()] == list(HEAD_NAMES)
    for index, (head, values) in enumerate(step.items()):
        assert torch.equal(values, step.actions[:, index])
        assert torch.equal(values, step[head])
    assert torch.equal(step.op, step["op"])
    assert torch.equal(step.slot, step["slot"])
    assert torch.equal(step.blueprint_idx, step["blueprint"])


def test_a_copy_and_a_row() -> None:
    net = small_policy()
    states, blueprints = random_inputs(net, 5)
    step = net.get_action(states, random_masks(5), blueprints)
    copy, row = step.clone(), step.row(2)
    kept = row.actions.clone()
    step.actions.zero_()
    step.hidden[0].zero_()
    assert torch.equal(copy.actions[2], kept)
    assert copy.hidden[0].abs().sum() > 0
    assert row.hidden[0].shape == (1, 1, 32)
