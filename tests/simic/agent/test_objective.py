from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from esper.leyline.actions import HEAD_NAMES, NUM_OPS
from esper.simic.agent.config import PerHead, PPOConfig
from esper.simic.agent.losses import collapsed_heads, compute_ppo_loss
from esper.simic.agent.objective import Losses, Objective, Scored, Targets, make_targets
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.action_masks import causal_heads
from tests.simic.agent.rollouts import collect, small_policy


def scene(**options: Any) -> tuple[TamiyoRolloutBuffer, Targets, Scored, PPOConfig]:
    policy = small_policy()
    buffer = collect(policy, rows=8, lengths=[12, 5, 12, 7, 12, 12, 3, 12])
    config, batch = PPOConfig(**options), buffer.batch()
    targets = make_targets(buffer, config, scale=torch.ones(()), progress=0.5, paid_off=0.5)
    with torch.no_grad():
        scores = policy.network.score(
            batch.states, batch.blueprint_indices, batch.actions, batch.masks
        )
    return buffer, targets, Scored.of(scores, batch.base_masks, torch.zeros(NUM_OPS)), config


def moved(buffer: TamiyoRolloutBuffer, targets: Targets, scored: Scored) -> torch.Tensor:
    """Return old log-probabilities that differ from the new ones where a head mattered."""
    noise = 0.3 * torch.randn(scored.log_probs.shape, generator=torch.Generator().manual_seed(0))
    return scored.log_probs - noise * targets.causal


@pytest.mark.parametrize("ratio", ["per_head", "joint"])
def test_the_policy_part_is_the_mean_over_the_steps_that_count(ratio: str) -> None:
    buffer, targets, scored, config = scene(ratio=ratio, head_weights="equal")
    old = moved(buffer, targets, scored)
    found = Objective(config, 0.5).policy_loss(scored, old, targets)
    usable = buffer.batch().usable
    by_head = {
        name: dict(zip(HEAD_NAMES, tensor[usable].unbind(-1), strict=True))
        for name, tensor in {
            "old_log_probs": old,
            "new_log_probs": scored.log_probs,
            "masks": targets.causal,
        }.items()
    }
    expected = compute_ppo_loss(
        **by_head, advantages=targets.advantages[usable], joint=ratio == "joint"
    )
    assert float(found) == pytest.approx(float(expected), rel=1e-4)


def test_the_floor_part_grows_and_falls_with_progress() -> None:
    _, targets, scored, config = scene(entropy_floor=PerHead.same(1.0))
    middle = float(Objective(config, 0.5)(scored, scored.log_probs, targets).penalty)
    early = float(Objective(config, 0.0)(scored, scored.log_probs, targets).penalty)
    assert middle > 0
    assert early == pytest.approx(1.5 * middle, rel=1e-5)


def test_a_head_below_its_floor_has_its_entropy_boosted() -> None:
    floors = PerHead.same(0.0).replace(blueprint=1.0, op=1.0)
    _, targets, scored, config = scene(entropy_floor=floors, collapse_boost=2.0)
    with_boost = Objective(config, 0.5)(scored, scored.log_probs, targets).bonus
    plain = Objective(config.replace(collapse_boost=0.0), 0.5)
    without = plain(scored, scored.log_probs, targets).bonus
    part = scored.entropies * targets.entropy_weights
    low = [HEAD_NAMES.index(head) for head in ("blueprint", "op")]
    assert float(part[..., low].sum()) > 0
    assert float(with_boost - without) == pytest.approx(2 * float(part[..., low].sum()), rel=1e-4)
    # A head that nobody uses has no entropy to be below a floor.
    nowhere = torch.zeros_like(targets.floor_counts)
    assert not collapsed_heads(scored.entropies, nowhere, torch.ones(len(HEAD_NAMES))).any()


def test_the_parts_of_the_heads_add_up() -> None:
    buffer, targets, scored, config = scene(entropy_floor=PerHead.same(1.0))
    old, objective = moved(buffer, targets, scored), Objective(config, 0.5)
    losses = [objective.policy_loss(scored, old, targets, heads=[head]) for head in HEAD_NAMES]
    penalties = [objective.floor_penalty(scored, targets, [head]) for head in HEAD_NAMES]
    found = objective(scored, old, targets)
    assert float(found.policy) == pytest.approx(float(sum(losses)), rel=1e-4)
    assert float(found.penalty) == pytest.approx(float(sum(penalties)), rel=1e-4)


def test_the_total_is_the_sum_of_its_parts() -> None:
    buffer, targets, scored, config = scene(value_coef=0.7, exploration_kl=0.3)
    found: Losses = Objective(config, 0.5)(scored, moved(buffer, targets, scored), targets)
    expected = (
        found.policy
        + 0.7 * found.value
        - found.bonus
        + found.penalty
        + 0.3 * (found.exploration * targets.shares).sum()
    )
    assert float(found.total) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("ratio", ["per_head", "joint"])
def test_minibatches_add_up_to_the_round(ratio: str) -> None:
    """A mean is taken over the whole round, however the rows are split."""
    buffer, targets, scored, config = scene(ratio=ratio)
    old = moved(buffer, targets, scored)
    objective = Objective(config, 0.5)
    whole = objective(scored, old, targets)
    parts = [
        objective(scored.select(rows), old[rows], targets.rows(rows), len(rows) / 8)
        for rows in torch.randperm(8).tensor_split(4)
    ]
    for name in ("policy", "value", "bonus", "exploration"):
        mean = torch.stack([getattr(part, name) for part in parts]).mean(0)
        assert torch.allclose(mean, getattr(whole, name), atol=1e-5), name


def test_padding_has_no_say() -> None:
    buffer, targets, scored, config = scene()
    old = moved(buffer, targets, scored)
    objective = Objective(config, 0.5)
    before = objective(scored, old, targets)
    padding = ~buffer.batch().valid
    for name in scored.__dataclass_fields__:
        getattr(scored, name)[padding] = 5.0
    after = objective(scored, old, targets)
    assert torch.equal(before.total, after.total)


def test_scores_are_kept_by_row_and_can_be_forgotten() -> None:
    _, _, scored, _ = scene()
    kept = Scored.empty(scored.values, len(HEAD_NAMES))
    rows = torch.tensor([5, 0])
    kept.write(rows, scored.select(rows))
    assert torch.equal(kept.log_probs[rows], scored.log_probs[rows])
    assert not kept.log_probs[[1, 2, 3, 4, 6, 7]].any()
    kept.write(None, scored)
    assert torch.equal(kept.values, scored.values)
    kept.forget()
    assert torch.isnan(kept.entropies).all()


def targets_of(buffer: TamiyoRolloutBuffer, scale: float = 1.0, **options: object) -> Targets:
    return make_targets(
        buffer, PPOConfig(**options), scale=torch.tensor(scale), progress=0.0, paid_off=0.0
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


def test_what_follows_is_discounted_in_the_errors_of_the_critic() -> None:
    policy, config = small_policy(), PPOConfig(gamma=0.5)
    buffer = collect(policy, rows=3, lengths=[12, 5, 7])
    scale = torch.tensor(2.0)
    targets = make_targets(buffer, config, scale=scale, progress=0.5, paid_off=0.5)
    batch = buffer.batch()
    for row, length in enumerate((12, 5, 7)):
        values = (batch.values[row, :length] * scale).tolist()
        for at, following in enumerate([*values[1:], 0.0]):
            expected = float(batch.rewards[row, at]) + 0.5 * following - values[at]
            assert float(targets.td_errors[row, at]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("ratio", ["per_head", "joint"])
def test_only_running_steps_with_a_choice_teach_the_actor(ratio: str) -> None:
    buffer = collect(small_policy(), rows=8, steps=10, lengths=[10, 4, 6, 10, 10, 2, 9, 10])
    batch, targets = buffer.batch(), targets_of(buffer, ratio=ratio)
    usable = batch.valid & batch.free
    assert (~usable).any()
    assert not targets.actor_weights[~usable].any()
    assert not targets.advantages[~usable].any()
    assert torch.equal(targets.causal, causal_heads(batch.op) & usable.unsqueeze(-1))
    if ratio == "joint":
        assert float(targets.actor_weights.sum()) == pytest.approx(1.0, abs=1e-5)


def test_a_step_counts_as_much_in_every_head_that_decided_it() -> None:
    """Averaged over its own few steps, a rare head's noise would drown the shared layers."""
    buffer = collect(small_policy(), rows=8, steps=10, lengths=[10, 4, 6, 10, 10, 2, 9, 10])
    targets, steps = targets_of(buffer), int(buffer.batch().usable.sum())
    counted = targets.actor_weights[targets.causal]
    assert torch.allclose(counted, torch.full_like(counted, 1.0 / steps))
    share = targets.causal.flatten(0, -2).float().sum(0) / steps
    assert float(share.min()) < 0.3
    assert torch.allclose(targets.shares, share.clamp(min=0.01))
    # What keeps its entropy up counts as much less, so that a head's own optimum stays.
    equal = targets_of(buffer, head_weights="equal")
    assert torch.allclose(targets.entropy_weights, equal.entropy_weights * targets.shares)
    assert torch.allclose(
        targets.exploration_coefficients, equal.exploration_coefficients * targets.shares
    )
    assert torch.allclose(equal.actor_weights.sum((0, 1)), (share > 0).float(), atol=1e-5)


def test_an_idle_head_keeps_an_anchor() -> None:
    policy = small_policy(initial_op_bias=(50.0, 0.0, 0.0, 0.0, 0.0, 0.0), floor={"kind": "off"})
    targets = targets_of(collect(policy, rows=8))
    assert not targets.causal[..., HEAD_NAMES.index("blueprint")].any()
    assert float(targets.entropy_weights[..., HEAD_NAMES.index("blueprint")].sum()) > 0


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


def test_skipped_steps_are_in_no_loss_and_decisions_are_told_from_one_to_the_next() -> None:
    buffer = collect(small_policy(), rows=8, steps=10, lengths=[10, 4, 6, 10, 10, 2, 9, 10])
    batch = buffer.batch()
    forced = batch.valid & ~batch.free
    assert bool(forced.any())
    plain, targets = targets_of(buffer), targets_of(buffer, skip_forced=True)
    assert not targets.value_weights[forced].any()
    assert not targets.entropy_weights[forced].any()
    assert float(targets.value_weights.sum()) == pytest.approx(1.0, abs=1e-5)
    assert not torch.equal(targets.raw_advantages, plain.raw_advantages)
    # Whatever the critic said of them, decisions are taught the same.
    batch.values[forced] += 100.0
    again = targets_of(buffer, skip_forced=True)
    usable = batch.usable
    torch.testing.assert_close(
        again.raw_advantages[usable], targets.raw_advantages[usable], rtol=0, atol=1e-4
    )


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


@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("truncate", [False, True])
def test_a_potential_that_is_known_changes_nothing_but_what_is_paid_when(
    truncate: bool, size: float
) -> None:
    """Whatever its size: no clip cuts off the way there and leaves the way back."""
    config, scale, std = PPOConfig(), torch.tensor(2.0), torch.tensor(0.5)

    def targets(buffer: TamiyoRolloutBuffer) -> Targets:
        return make_targets(
            buffer, config, scale=scale, progress=0.0, paid_off=0.0, units=std.expand(4)
        )

    policy, lengths = small_policy(), [12, 7, 3, 12]
    plain = collect(policy, rows=4, lengths=lengths, truncate=truncate)
    shaped = collect(policy, rows=4, lengths=lengths, truncate=truncate)
    draws = torch.Generator().manual_seed(5)
    batch = shaped.batch()
    random = torch.randn(batch.potentials.shape, generator=draws)
    batch.potentials.copy_(size * random * batch.valid)
    shaped.last_potential.copy_(size * torch.randn(4, generator=draws))
    change = config.gamma * shaped.next_potentials() - batch.potentials
    batch.rewards.add_(change * batch.valid)
    one, other = targets(plain), targets(shaped)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=2e-5 * size)
    close(other.raw_advantages, one.raw_advantages)
    close(other.value_targets, one.value_targets)
    paid = batch.potentials / std
    close(other.returns, one.returns - paid)
    close(other.baselines, one.baselines - paid)
