from __future__ import annotations

import pytest
import torch

from esper.leyline.errors import UsageError
from esper.tamiyo.networks.captured import CapturedPolicyStep
from esper.testing.controllers import check_actions
from tests.tamiyo.networks.situations import random_inputs, random_masks, small_policy


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="CUDA device only, and the network is on 'cpu'"):
        CapturedPolicyStep(small_policy(), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 256])
def test_replays_decide_as_the_network_does(rows: int) -> None:
    net = small_policy().cuda()
    step = CapturedPolicyStep(net, rows)
    hidden, carried = net.initial_hidden(rows), None
    for at in range(10):
        states, blueprints = (each.cuda() for each in random_inputs(net, rows))
        masks = random_masks(rows, seed=at)
        legal = small_policy().table.row_masks(masks, (rows,)).cuda()
        uniforms = torch.rand(rows, 8, device="cuda")
        wanted = net.get_action(states, legal, blueprints, hidden, uniforms=uniforms)
        # The graph's own memory of the last step is passed on, though this replay overwrites it.
        got = step(states, legal, blueprints, carried, uniforms=uniforms)
        carried = got.hidden
        assert torch.equal(got.actions, wanted.actions)
        torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(got.value, wanted.value, rtol=0, atol=1e-5)
        check_actions({head: values.cpu() for head, values in got.items()}, masks)
        hidden = wanted.hidden


@pytest.mark.gpu
def test_replays_see_new_weights_and_new_draws() -> None:
    net = small_policy().cuda()
    step = CapturedPolicyStep(net, 64)
    states, blueprints = (each.cuda() for each in random_inputs(net, 64))
    empty = net.initial_hidden(64)
    one = step(states, None, blueprints, empty).clone()
    two = step(states, None, blueprints, empty).clone()
    assert not torch.equal(one.actions, two.actions)
    with torch.no_grad():
        net.op_head[-1].bias.copy_(torch.tensor([9.0, -9, -9, -9, -9, -9]))
    uniforms = torch.full((64, 8), 0.3, device="cuda")
    assert (step(states, None, blueprints, empty, uniforms=uniforms).op == 0).all()


@pytest.mark.gpu
def test_without_a_memory_it_is_empty() -> None:
    net = small_policy().cuda()
    step = CapturedPolicyStep(net, 3, deterministic=True, explore=False)
    states, blueprints = (each.cuda() for each in random_inputs(net, 3))
    first = step(states, None, blueprints).clone()
    second = step(states, None, blueprints, first.hidden).clone()
    assert not torch.allclose(first.value, second.value)
    torch.testing.assert_close(step(states, None, blueprints).value, first.value)
    step.refresh()
    torch.testing.assert_close(step(states, None, blueprints, first.hidden).value, second.value)


@pytest.mark.gpu
def test_other_shapes_are_refused() -> None:
    net = small_policy().cuda()
    with pytest.raises(UsageError, match="at least 1 row"):
        CapturedPolicyStep(net, 0)
    step = CapturedPolicyStep(net, 3)
    with pytest.raises(UsageError, match=r"captured for states \[3, 121\], got \[2, 121\]"):
        step(torch.zeros(2, 121, device="cuda"))
