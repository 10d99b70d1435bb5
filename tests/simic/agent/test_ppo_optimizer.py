from __future__ import annotations

import pytest
import torch

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.errors import CheckpointError
from esper.simic.agent.config import GROUP_NAMES, PerHead, PPOConfig
from esper.simic.agent.passes import GradientNorms
from esper.simic.agent.ppo import (
    forget,
    group_of,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
)
from tests.simic.agent.rollouts import small_policy


def stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    network = small_policy().network
    optimizer = make_optimizer(network, PPOConfig())
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return network, optimizer


def test_every_parameter_is_in_one_group() -> None:
    network = small_policy().network
    groups = {name: group_of(name) for name, _ in network.named_parameters()}
    assert set(groups.values()) == set(GROUP_NAMES)
    assert groups["alpha_target_head.0.weight"] == "alpha_target"
    assert groups["value_head.2.bias"] == "value"
    assert groups["lstm.weight_hh_l0"] == groups["blueprint_embedding.embedding.weight"] == "trunk"
    optimizer = make_optimizer(network, PPOConfig())
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(owned) == len(set(owned)) == len(list(network.parameters()))


def test_heads_have_their_own_step_size_and_the_critic_alone_decays() -> None:
    multipliers = PerHead(**{**dict.fromkeys(HEAD_NAMES, 1.0), "blueprint": 3.0, "op": 0.5})
    config = PPOConfig(learning_rate=1e-3, lr_multipliers=multipliers, weight_decay=0.1)
    optimizer = make_optimizer(small_policy().network, config)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates["blueprint"] == pytest.approx(3e-3)
    assert rates["op"] == pytest.approx(5e-4)
    assert rates["value"] == rates["trunk"] == rates["slot"] == pytest.approx(1e-3)
    decay = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert {name for name, each in decay.items() if each} == {"value"}
    assert isinstance(optimizer, torch.optim.AdamW)


def test_gradients_are_measured_by_part_and_shortened_as_a_whole() -> None:
    network = small_policy().network
    optimizer = make_optimizer(network, PPOConfig())
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = {name: each.grad.clone() for name, each in network.named_parameters()}
    norms = GradientNorms(optimizer).clip(1.0)
    whole = torch.cat([each.flatten() for each in before.values()]).norm()
    assert float(norms[-1]) == pytest.approx(float(whole), rel=1e-5)
    for index, group in enumerate(GROUP_NAMES):
        own = torch.cat(
            [each.flatten() for name, each in before.items() if group_of(name) == group]
        )
        assert float(norms[index]) == pytest.approx(float(own.norm()), rel=1e-5)
    for name, parameter in network.named_parameters():
        assert torch.allclose(parameter.grad, before[name] / whole, rtol=1e-4)
    again = GradientNorms(optimizer).clip(5.0)
    assert float(again[-1]) == pytest.approx(1.0, rel=1e-4)


def test_state_goes_by_name_and_comes_back() -> None:
    network, optimizer = stepped()
    state = optimizer_state(network, optimizer)
    assert set(state) == {name for name, _ in network.named_parameters()}
    other = small_policy(seed=1).network
    fresh = make_optimizer(other, PPOConfig())
    load_optimizer_state(other, fresh, state)
    assert optimizer_state(other, fresh).keys() == state.keys()
    for name, each in optimizer_state(other, fresh).items():
        assert all(torch.equal(each[key], state[name][key]) for key in each)


def test_the_state_of_another_network_is_refused() -> None:
    network, optimizer = stepped()
    state = {"tower.weight": {"step": torch.tensor(1.0)}}
    with pytest.raises(CheckpointError, match=r"tower\.weight"):
        load_optimizer_state(network, optimizer, state)


def test_forgetting_a_head_keeps_the_others() -> None:
    network, optimizer = stepped()
    forget(network, optimizer, {"blueprint", "tempo"})
    left = {group_of(name) for name in optimizer_state(network, optimizer)}
    assert left == set(GROUP_NAMES) - {"blueprint", "tempo"}
