from __future__ import annotations

import pytest
import torch

from esper.tamiyo.networks.acting import rollout_step
from esper.tamiyo.networks.captured import CapturedPolicyStep
from esper.tamiyo.networks.packed import PackedPolicyStep
from tests.tamiyo.networks.situations import random_inputs, random_masks, small_policy


def test_a_cpu_gets_packed_weights() -> None:
    net = small_policy()
    step = rollout_step(net, 4, deterministic=True, explore=False)
    assert isinstance(step, PackedPolicyStep)
    states, blueprints = random_inputs(net, 4)
    masks = random_masks(4)
    wanted = net.get_action(states, masks, blueprints, deterministic=True, explore=False)
    assert torch.equal(step(states, masks, blueprints).actions, wanted.actions)
    step.refresh()


@pytest.mark.gpu
def test_a_gpu_gets_a_captured_graph() -> None:
    assert isinstance(rollout_step(small_policy().cuda(), 4), CapturedPolicyStep)
