from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.leyline.errors import EmptyMaskError, UsageError
from esper.tamiyo.networks import policy_step
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.policy_step import (
    CapturedPolicyStep,
    PackedPolicyStep,
    PlainPolicyStep,
    rollout_step,
)
from esper.testing.controllers import check_actions
from tests.tamiyo.networks.situations import random_inputs, random_masks, small_policy
from tests.tamiyo.networks.travels import see, situation, travelling, with_slots


def test_a_cpu_gets_packed_weights() -> None:
    net = small_policy()
    step = rollout_step(net, 4)
    assert isinstance(step, PackedPolicyStep)
    states, blueprints = random_inputs(net, 4)
    masks, uniforms = random_masks(4), torch.rand(4, 8)
    wanted = net.get_action(states, masks, blueprints, uniforms=uniforms)
    got = step(states, masks, blueprints, uniforms=uniforms)
    assert torch.equal(got.actions, wanted.actions)
    step.refresh()


def test_a_network_without_a_faster_way_is_asked_as_it_is() -> None:
    net = travelling()
    step = rollout_step(net, 4)
    assert isinstance(step, PlainPolicyStep)
    signals, masks = situation(4)
    states, blueprints = see(net, signals)
    drawn = step(states, masks, blueprints, uniforms=torch.full((4, 8), 0.5))
    again = net.get_action(states, masks, blueprints, uniforms=torch.full((4, 8), 0.5))
    assert torch.equal(drawn.actions, again.actions)
    assert torch.equal(drawn.log_probs, again.log_probs)
    step.refresh()


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 3, 16])
def test_replays_of_a_travelling_policy_decide_as_it_does(slots: int) -> None:
    net, rows = with_slots(travelling(), slots).cuda(), 256
    step = rollout_step(net, rows)
    assert isinstance(step, CapturedPolicyStep)
    hidden, carried = net.initial_hidden(rows), None
    for at in range(5):
        signals, masks = situation(rows, slots, at)
        states, blueprints = net.config.observation.observe(signals.to("cuda"))
        legal = travelling(slots).table.row_masks(masks, (rows,)).cuda()
        uniforms = torch.rand(rows, 8, device="cuda")
        wanted = net.get_action(states, legal, blueprints, hidden, uniforms=uniforms)
        got = step(states, legal, blueprints, carried, uniforms=uniforms)
        carried = got.hidden
        assert torch.equal(got.actions, wanted.actions)
        torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=0, atol=1e-5)
        hidden = wanted.hidden


@pytest.mark.gpu
def test_a_gpu_gets_a_captured_graph() -> None:
    assert isinstance(rollout_step(small_policy().cuda(), 4), CapturedPolicyStep)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="CUDA device only, and the network is on 'cpu'"):
        CapturedPolicyStep(small_policy(), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize("options", [{}, {"critic": "op_soft", "op_encoder": True}])
def test_replays_decide_as_the_network_does(rows: int, options: dict[str, Any]) -> None:
    net = small_policy(**options).cuda()
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
def test_weights_that_were_moved_are_found_again() -> None:
    net = small_policy().cuda()
    step = CapturedPolicyStep(net, 16)
    states, blueprints = (each.cuda() for each in random_inputs(net, 16))
    # cuDNN packs an LSTM's weights anew, whatever device the network was on.
    net.to("cuda")
    with torch.no_grad():
        for weight in net.lstm.parameters():
            weight.mul_(0.5)
    step.refresh()
    uniforms = torch.rand(16, 8, device="cuda")
    wanted = net.get_action(states, None, blueprints, uniforms=uniforms)
    got = step(states, None, blueprints, uniforms=uniforms)
    torch.testing.assert_close(got.value, wanted.value)


@pytest.mark.gpu
def test_without_a_memory_it_is_empty() -> None:
    net = small_policy().cuda()
    step = CapturedPolicyStep(net, 3)
    states, blueprints = (each.cuda() for each in random_inputs(net, 3))
    half = torch.full((3, 8), 0.5, device="cuda")
    first = step(states, None, blueprints, uniforms=half).clone()
    second = step(states, None, blueprints, first.hidden, uniforms=half).clone()
    assert not torch.allclose(first.value, second.value)
    torch.testing.assert_close(step(states, None, blueprints, uniforms=half).value, first.value)
    step.refresh()
    again = step(states, None, blueprints, first.hidden, uniforms=half)
    torch.testing.assert_close(again.value, second.value)


@pytest.mark.gpu
def test_other_shapes_are_refused() -> None:
    net = small_policy().cuda()
    with pytest.raises(UsageError, match="at least 1 row"):
        CapturedPolicyStep(net, 0)
    step = CapturedPolicyStep(net, 3)
    with pytest.raises(UsageError, match=r"captured for states \[3, 121\], got \[2, 121\]"):
        step(torch.zeros(2, 121, device="cuda"))


@pytest.mark.parametrize("library", ["onednn", "plain"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lstm_layers": 2, "critic": "state", "num_slots": 5},
        {"critic": "op_sampled", "num_blueprints": 15},
        {"critic": "op_soft", "op_encoder": True},
        {"lstm_hidden_dim": 512},
        {"blueprint_layers": 2},
    ],
    ids=["default", "deep", "sampled", "soft", "wide", "shallow"],
)
def test_decisions_are_those_of_the_network(
    options: dict[str, Any], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "plain":
        monkeypatch.setattr(policy_step, "has_onednn", lambda: False)
    net = small_policy(**options)
    slots = net.config.num_slots
    step = PackedPolicyStep(net, 16)
    hidden = net.initial_hidden(16)
    for at in range(20):
        states, blueprints = random_inputs(net, 16)
        masks, uniforms = random_masks(16, slots, at), torch.rand(16, 8)
        wanted = net.get_action(states, masks, blueprints, hidden, uniforms=uniforms)
        got = step(states, masks, blueprints, hidden, uniforms=uniforms)
        assert torch.equal(got.actions, wanted.actions)
        assert torch.equal(got.masks, wanted.masks)
        torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(got.value, wanted.value, rtol=0, atol=1e-5)
        torch.testing.assert_close(got.op_values, wanted.op_values, rtol=0, atol=1e-5)
        hidden = wanted.hidden
        for own, theirs in zip(got.hidden, hidden, strict=True):
            torch.testing.assert_close(own, theirs, rtol=0, atol=1e-5)


def test_other_numbers_of_rows() -> None:
    net = small_policy()
    step = PackedPolicyStep(net, 16)
    for rows in (1, 3, 40):
        states, blueprints = random_inputs(net, rows)
        masks, uniforms = random_masks(rows), torch.rand(rows, 8)
        wanted = net.get_action(states, masks, blueprints, uniforms=uniforms)
        got = step(states, masks, blueprints, uniforms=uniforms)
        assert torch.equal(got.actions, wanted.actions)
        torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=0, atol=1e-5)
    assert step(states).actions.shape == (40, 8)


def test_a_changed_network_is_refused_until_refreshed() -> None:
    net = small_policy()
    step = PackedPolicyStep(net, 2)
    states, blueprints = random_inputs(net, 2)
    step(states, None, blueprints)
    with torch.no_grad():
        net.op_head[-1].bias.add_(1.0)
    with pytest.raises(UsageError, match=r"has changed .* refresh\(\)"):
        step(states, None, blueprints)
    step.refresh()
    uniforms = torch.rand(2, 8)
    got = step(states, None, blueprints, uniforms=uniforms)
    wanted = net.get_action(states, None, blueprints, uniforms=uniforms)
    torch.testing.assert_close(got.log_probs, wanted.log_probs)


def test_draws_come_from_the_generator() -> None:
    net = small_policy()
    step = PackedPolicyStep(net, 50)
    states, _ = random_inputs(net, 50)
    one, two = (step(states, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one.actions, two.actions)


def test_mistakes_are_named_as_by_the_network() -> None:
    net = small_policy()
    step = PackedPolicyStep(net, 2)
    masks = random_masks(2)
    masks.op[1] = False
    with pytest.raises(EmptyMaskError, match="row 1, head 'op'"):
        step(random_inputs(net, 2)[0], masks)
    with pytest.raises(UsageError, match="121 features"):
        step(torch.randn(2, 5))


def test_another_device_is_refused() -> None:
    with torch.device("meta"):
        net = FactoredRecurrentActorCriticV2(lstm_hidden_dim=16)
    with pytest.raises(UsageError, match="CPU only"):
        PackedPolicyStep(net, 2)
