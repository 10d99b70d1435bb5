from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.leyline.errors import EmptyMaskError, UsageError
from esper.tamiyo.networks import packed
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.packed import PackedPolicyStep
from tests.tamiyo.networks.situations import random_inputs, random_masks, small_policy


@pytest.mark.parametrize("library", ["onednn", "plain"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lstm_layers": 2, "critic": "state", "num_slots": 5},
        {"critic": "op_sampled", "num_blueprints": 15},
        {"lstm_hidden_dim": 512},
    ],
    ids=["default", "deep", "sampled", "wide"],
)
def test_decisions_are_those_of_the_network(
    options: dict[str, Any], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "plain":
        monkeypatch.setattr(packed, "has_onednn", lambda: False)
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


def test_greedy_steps_and_other_numbers_of_rows() -> None:
    net = small_policy()
    step = PackedPolicyStep(net, 16, deterministic=True, explore=False)
    for rows in (1, 3, 40):
        states, blueprints = random_inputs(net, rows)
        masks = random_masks(rows)
        wanted = net.get_action(states, masks, blueprints, deterministic=True, explore=False)
        got = step(states, masks, blueprints)
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
