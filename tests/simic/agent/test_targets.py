from __future__ import annotations

import pytest
import torch

from esper.simic.agent.config import PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.agent.targets import Targets, make_targets
from esper.tamiyo.policy.action_masks import causal_heads
from tests.simic.agent.rollouts import collect, small_policy


def targets_of(buffer: TamiyoRolloutBuffer, scale: float = 1.0, **options: object) -> Targets:
    return make_targets(
        buffer, PPOConfig(**options), scale=torch.tensor(scale), progress=0.0, success=0.0
    )


def test_values_are_in_the_networks_scale_and_advantages_in_the_rewards() -> None:
    buffer = collect(small_policy(), rows=4, steps=8, lengths=[8, 3, 5, 8], truncate=True)
    batch, targets = buffer.batch(), targets_of(buffer, scale=5.0, gae_lambda=1.0, gamma=0.9)
    for row, length in enumerate((8, 3, 5, 8)):
        rewards = batch.rewards[row, :length].tolist()
        total = 5.0 * float(buffer.bootstrap[row])
        for at in reversed(range(length)):
            total = rewards[at] + 0.9 * total
            assert float(targets.returns[row, at]) == pytest.approx(total, rel=1e-4, abs=1e-4)
            expected = total - 5.0 * float(batch.values[row, at])
            assert float(targets.raw_advantages[row, at]) == pytest.approx(expected, abs=1e-3)
    assert torch.allclose(targets.value_targets * 5.0, targets.returns, atol=1e-5)


@pytest.mark.parametrize("ratio", ["per_head", "joint"])
def test_only_running_steps_with_a_choice_teach_the_actor(ratio: str) -> None:
    buffer = collect(small_policy(), rows=8, steps=10, lengths=[10, 4, 6, 10, 10, 2, 9, 10])
    batch, targets = buffer.batch(), targets_of(buffer, ratio=ratio)
    usable = batch.valid & batch.free
    assert (~usable).any()
    assert not targets.actor_weights[~usable].any()
    assert not targets.advantages[~usable].any()
    assert torch.equal(targets.causal, causal_heads(batch.op) & usable.unsqueeze(-1))
    sums = targets.actor_weights.flatten(0, -2).sum(0)
    used = targets.causal.flatten(0, -2).any(0) if ratio == "per_head" else torch.tensor([True])
    assert torch.allclose(sums, used.float(), atol=1e-5)


def test_padding_and_forced_steps_leave_the_statistics_alone() -> None:
    buffer = collect(small_policy(), rows=8, steps=10, lengths=[10, 4, 6, 10, 10, 2, 9, 10])
    batch, targets = buffer.batch(), targets_of(buffer)
    chosen = targets.raw_advantages[batch.usable].double()
    assert float(targets.advantage_mean) == pytest.approx(float(chosen.mean()), rel=1e-4, abs=1e-6)
    assert float(targets.advantage_std) == pytest.approx(float(chosen.std(correction=0)), rel=1e-4)


def test_forced_steps_teach_the_critic_a_fifth_as_much() -> None:
    buffer = collect(small_policy(), rows=8, steps=10, lengths=[10, 4, 6, 10, 10, 2, 9, 10])
    batch, weights = buffer.batch(), targets_of(buffer).value_weights
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-5)
    assert not weights[~batch.valid].any()
    free, forced = weights[batch.usable], weights[batch.valid & ~batch.free]
    assert torch.allclose(forced / free[0], torch.tensor(0.2))


def test_values_that_are_not_finite_are_named() -> None:
    buffer = collect(small_policy())
    assert targets_of(buffer).nonfinite() == []
    buffer.batch().rewards[0, 3] = float("nan")
    assert "returns" in targets_of(buffer).nonfinite()


def test_a_new_scale_moves_targets_and_old_values_together() -> None:
    targets = targets_of(collect(small_policy()))
    moved = targets.rescaled(torch.tensor(0.5))
    assert torch.equal(moved.value_targets, 0.5 * targets.value_targets)
    assert torch.equal(moved.old_values, 0.5 * targets.old_values)
    assert torch.equal(moved.returns, targets.returns)


@pytest.mark.parametrize("truncate", [False, True])
def test_a_potential_that_is_known_changes_nothing_but_what_is_paid_when(truncate: bool) -> None:
    config, scale, std = PPOConfig(), torch.tensor(2.0), torch.tensor(0.5)

    def targets(buffer: TamiyoRolloutBuffer) -> Targets:
        return make_targets(buffer, config, scale=scale, progress=0.0, success=0.0, reward_std=std)

    policy, lengths = small_policy(), [12, 7, 3, 12]
    plain = collect(policy, rows=4, lengths=lengths, truncate=truncate)
    shaped = collect(policy, rows=4, lengths=lengths, truncate=truncate)
    draws = torch.Generator().manual_seed(5)
    batch = shaped.batch()
    batch.potentials.copy_(torch.randn(batch.potentials.shape, generator=draws) * batch.valid)
    shaped.last_potential.copy_(torch.randn(4, generator=draws))
    change = config.gamma * shaped.next_potentials() - batch.potentials
    batch.rewards.add_(change / std * batch.valid)
    one, other = targets(plain), targets(shaped)
    torch.testing.assert_close(other.raw_advantages, one.raw_advantages)
    torch.testing.assert_close(other.value_targets, one.value_targets)
    paid = batch.potentials / std
    torch.testing.assert_close(other.returns, one.returns - paid)
    torch.testing.assert_close(other.baselines, one.baselines - paid)
