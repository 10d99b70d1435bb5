from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from esper.leyline.actions import HEAD_NAMES, HEAD_SIZES, LifecycleOp
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.diagnostics import (
    describe_heads,
    describe_round,
    explained_variance,
    kl_of_steps,
    measure_feedback,
    measure_policy,
    memory_by_step,
    value_by_state,
)
from esper.simic.agent.objective import Targets, make_targets
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.action_masks import causal_heads
from esper.tamiyo.policy.layout import NUM_BASE
from tests.simic.agent.rollouts import collect, small_policy

LENGTHS = [12, 5, 12, 7, 12, 12, 3, 12]


def round_of(scale: float = 2.0) -> tuple[TamiyoRolloutBuffer, Targets]:
    buffer = collect(small_policy(), rows=8, lengths=LENGTHS)
    targets = make_targets(
        buffer, PPOConfig(), scale=torch.tensor(scale), progress=0.0, paid_off=0.0
    )
    return buffer, targets


def test_explained_variance_of_a_perfect_a_useless_and_a_wrong_critic() -> None:
    returns = torch.randn(1000)
    assert float(explained_variance(returns + 3.0, returns)) == pytest.approx(1.0, abs=1e-5)
    assert float(explained_variance(torch.zeros(1000), returns)) == pytest.approx(0.0, abs=1e-6)
    assert float(explained_variance(-returns, returns)) == pytest.approx(-3.0, abs=1e-4)
    assert float(explained_variance(returns, torch.ones(1000))) == 0.0


def test_kl_of_steps_is_never_negative_and_zero_without_a_change() -> None:
    log_ratios = torch.randn(100) * 0.1
    assert (kl_of_steps(log_ratios) >= 0).all()
    assert float(kl_of_steps(torch.zeros(1))) == 0.0
    assert torch.allclose(kl_of_steps(log_ratios), log_ratios.exp() - 1 - log_ratios, atol=1e-6)


def test_values_right_after_a_germination_are_told_from_the_others() -> None:
    buffer, targets = round_of()
    batch = buffer.batch()
    found = value_by_state(batch, targets)
    errors: dict[str, list[float]] = {"germinated": [], "other": []}
    for row, length in enumerate(LENGTHS):
        for at in range(length):
            planted = at > 0 and int(batch.effective_op[row, at - 1]) == LifecycleOp.GERMINATE
            error = targets.baselines[row, at] - targets.returns[row, at]
            errors["germinated" if planted else "other"].append(float(error))
    assert errors["germinated"]
    for name, own in errors.items():
        assert found[name]["n"] == len(own)
        assert found[name]["error"] == pytest.approx(sum(own) / len(own), rel=1e-5)
        difference = found[name]["value"] - found[name]["return"]
        assert found[name]["error"] == pytest.approx(difference, rel=1e-5, abs=1e-6)
    batch.effective_op.zero_()
    assert set(value_by_state(batch, targets)) == {"other"}


def test_the_round_is_described_over_its_running_steps() -> None:
    buffer, targets = round_of()
    batch = buffer.batch()
    found = describe_round(batch, targets, torch.tensor(2.0))
    returns = targets.returns[batch.valid].double()
    assert found["return_mean"] == pytest.approx(float(returns.mean()), rel=1e-6)
    assert found["return_std"] == pytest.approx(float(returns.std(correction=0)), rel=1e-6)
    assert found["return_p50"] == pytest.approx(float(returns.quantile(0.5)), rel=1e-6)
    assert found["value_max"] == pytest.approx(2.0 * float(batch.values[batch.valid].max()))
    assert found["advantage_mean"] == pytest.approx(0.0, abs=1e-5)
    assert found["advantage_std"] == pytest.approx(1.0, abs=1e-4)
    assert found["usable_steps"] == int((batch.valid & batch.free).sum())
    forced = (batch.valid & ~batch.free).sum() / batch.valid.sum()
    assert found["forced_share"] == pytest.approx(float(forced))
    waits = (batch.op[batch.valid] == int(LifecycleOp.WAIT)).float().mean()
    assert found["decision_density"] == pytest.approx(1 - float(waits))
    values = 2.0 * batch.values[batch.valid].double()
    assert found["explained_variance"] == pytest.approx(float(explained_variance(values, returns)))
    assert found["value_return_correlation"] == pytest.approx(
        float(torch.corrcoef(torch.stack([values, returns]))[0, 1]), rel=1e-5
    )


def paid_in_advance(size: float, critic: float = 0.0) -> dict[str, Any]:
    """Describe a round whose potential is random; the critic is its own targets times a factor."""
    buffer = collect(small_policy(), rows=8, steps=12)
    batch, config = buffer.batch(), PPOConfig(gamma=1.0, gae_lambda=1.0)
    draws = torch.Generator().manual_seed(1)
    batch.rewards.copy_(torch.randn(batch.rewards.shape, generator=draws))
    own = batch.rewards.flip(1).cumsum(1).flip(1)
    batch.values.copy_(critic * own)
    batch.potentials.copy_(size * torch.randn(own.shape, generator=draws))
    batch.rewards.add_(buffer.next_potentials() - batch.potentials)
    targets = make_targets(buffer, config, scale=torch.tensor(1.0), progress=0.0, paid_off=0.0)
    return describe_round(batch, targets, torch.tensor(1.0))


@pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
def test_a_critic_that_says_nothing_explains_nothing_whatever_was_paid_in_advance(
    size: float,
) -> None:
    found = paid_in_advance(size)
    assert found["explained_variance"] == pytest.approx(0.0, abs=1e-5)
    assert found["value_std"] == found["value_return_correlation"] == 0.0
    assert found["value_by_state"]["other"]["value"] == 0.0


def test_what_the_critic_explains_does_not_depend_on_what_was_paid_in_advance() -> None:
    alone, beside = paid_in_advance(0.0, critic=0.5), paid_in_advance(30.0, critic=0.5)
    assert alone["explained_variance"] == pytest.approx(0.75, abs=1e-4)
    for name in ("explained_variance", "value_return_correlation", "value_std", "return_std"):
        assert beside[name] == pytest.approx(alone[name], rel=1e-3), name
    assert beside["return_p95"] == pytest.approx(alone["return_p95"], rel=1e-3)


def test_the_share_of_the_potential_stands_beside_it() -> None:
    """Both together are what a baseline with the potential explains of the returns as paid."""
    assert paid_in_advance(0.0)["potential_share"] is None
    assert paid_in_advance(30.0)["potential_share"] > 0.9
    assert -1.0 < paid_in_advance(0.1)["potential_share"] < 0.1


def test_advantages_of_an_op_have_their_whole_shape() -> None:
    buffer, targets = round_of()
    batch = buffer.batch()
    found = describe_round(batch, targets, torch.tensor(2.0))["advantage_by_op"]
    wait = targets.raw_advantages[batch.usable & (batch.op == int(LifecycleOp.WAIT))]
    assert found["WAIT"]["n"] == len(wait)
    assert found["WAIT"]["mean"] == pytest.approx(float(wait.mean()), rel=1e-4)
    assert found["WAIT"]["positive"] == pytest.approx(float((wait > 0).float().mean()))
    assert {"skew", "kurtosis"} <= found["WAIT"].keys()


def test_the_critic_is_seen_op_by_op() -> None:
    buffer, targets = round_of()
    batch = buffer.batch()
    found = describe_round(batch, targets, torch.tensor(2.0))
    every = 2.0 * batch.op_values[batch.valid]
    assert list(found["q_by_op"].values()) == pytest.approx(every.mean(0).tolist(), rel=1e-5)
    assert found["q_op_spread"] == pytest.approx(float(every.mean(0).max() - every.mean(0).min()))
    assert found["q_variance"] == pytest.approx(float(every.var(-1).mean()), rel=1e-5)


def test_memory_is_told_by_step_and_padding_is_left_out() -> None:
    buffer = collect(small_policy(), rows=3, steps=30, lengths=[30, 4, 4])
    batch = buffer.batch()
    found = memory_by_step(batch)
    assert [each["step"] for each in found] == sorted({each["step"] for each in found})
    assert found[-1]["step"] == 29
    last = batch.hidden_cell[0, 29]
    assert found[-1]["c_rms"] == pytest.approx(float(last.square().mean().sqrt()), rel=1e-5)
    assert found[-1]["c_max"] == pytest.approx(float(last.abs().max()), rel=1e-5)


def test_an_unchanged_policy_measures_nothing() -> None:
    buffer, targets = round_of()
    batch = buffer.batch()
    half = torch.full_like(batch.log_probs, 0.5)
    joint, by_head = measure_policy(
        batch,
        targets,
        old_log_probs=batch.log_probs,
        log_probs=batch.log_probs,
        entropies=half,
        own_entropies=half,
        clip=0.2,
    )
    assert joint["approx_kl"] == 0.0
    assert joint["clipfrac"] == 0.0
    assert joint["ratio_min"] == joint["ratio_max"] == 1.0
    assert joint["entropy"] == pytest.approx(0.5)
    assert by_head["entropy"] == pytest.approx([0.5] * 8)


def test_each_head_is_measured_over_the_steps_at_which_it_mattered() -> None:
    buffer, targets = round_of()
    batch = buffer.batch()
    torch.manual_seed(0)
    causal = causal_heads(batch.op)
    moved = batch.log_probs + torch.where(causal, 0.3 * torch.randn(causal.shape), 0.0)
    entropies = torch.rand(causal.shape)
    joint, by_head = measure_policy(
        batch,
        targets,
        old_log_probs=batch.log_probs,
        log_probs=moved,
        entropies=entropies,
        own_entropies=entropies,
        clip=0.2,
    )
    usable = batch.valid & batch.free
    total = 0.0
    for index, head in enumerate(HEAD_NAMES):
        where = usable & causal[..., index]
        if not where.any():
            assert by_head["ratio_max"][index] is None, head
            continue
        log_ratio = (moved - batch.log_probs)[..., index][where].double()
        ratio = log_ratio.exp()
        kl = ratio - 1 - log_ratio
        total += float(kl.sum())
        assert by_head["ratio_mean"][index] == pytest.approx(float(ratio.mean()), rel=1e-4)
        assert by_head["ratio_std"][index] == pytest.approx(
            float(ratio.std(correction=0)), rel=1e-3, abs=1e-6
        )
        assert by_head["ratio_min"][index] == pytest.approx(float(ratio.min()), rel=1e-4)
        assert by_head["approx_kl"][index] == pytest.approx(float(kl.mean()), rel=1e-3)
        outside = ((ratio > 1.2) | (ratio < 0.8)).double().mean()
        assert by_head["clipfrac"][index] == pytest.approx(float(outside), abs=1e-6)
        choices = batch.masks[..., index, :].sum(-1)
        chose = where & (choices > 1)
        if chose.any():
            own = entropies[..., index][chose]
            assert by_head["entropy_conditional"][index] == pytest.approx(
                float(own.mean()), rel=1e-4
            )
            nats = (own * choices[chose].log()).mean()
            assert by_head["entropy_nats"][index] == pytest.approx(float(nats), rel=1e-4)
    assert joint["approx_kl"] == pytest.approx(total / int(usable.sum()), rel=1e-3)


def test_a_round_without_a_choice_has_no_ratios() -> None:
    buffer, _ = round_of()
    buffer.batch().free.zero_()
    targets = make_targets(buffer, PPOConfig(), scale=torch.ones(()), progress=0.0, paid_off=0.0)
    batch = buffer.batch()
    joint, by_head = measure_policy(
        batch,
        targets,
        old_log_probs=batch.log_probs,
        log_probs=batch.log_probs,
        entropies=torch.zeros_like(batch.log_probs),
        own_entropies=torch.zeros_like(batch.log_probs),
        clip=0.2,
    )
    assert joint["ratio_mean"] is None
    assert by_head["ratio_mean"] == [None] * 8
    assert describe_round(batch, targets, torch.ones(()))["usable_steps"] == 0


def test_heads_are_described_by_what_they_did() -> None:
    buffer, targets = round_of()
    batch = buffer.batch()
    found = describe_heads(batch, targets, HEAD_SIZES)
    causal = causal_heads(batch.op) & batch.valid.unsqueeze(-1)
    steps = int(batch.valid.sum())
    for index, head in enumerate(HEAD_NAMES):
        where = causal[..., index]
        assert found["usage"][index] == pytest.approx(int(where.sum()) / steps)
        taken = torch.bincount(batch.actions[..., index][where], minlength=HEAD_SIZES[head])
        assert found["choices"][index] == taken.tolist()
        chose = where & (batch.masks[..., index, :].sum(-1) > 1)
        assert found["free_steps"][index] == int(chose.sum())
    op = HEAD_NAMES.index("op")
    assert found["advantage_std"][op] == pytest.approx(1.0, abs=1e-3)
    assert math.isclose(found["usage"][op], 1.0, rel_tol=1e-6)


def test_dependence_on_the_feedback_is_zero_for_a_policy_that_does_not_read_it() -> None:
    policy = small_policy()
    batch = collect(policy, rows=4).batch()

    def dependence() -> float | None:
        scores = policy.network.score(
            batch.states, batch.blueprint_indices, batch.actions, batch.masks
        )
        return measure_feedback(policy.network, batch, scores.logits[..., -1, :6].detach())

    reads = dependence()
    with torch.no_grad():
        policy.network.feature_net[0].weight[:, NUM_BASE : NUM_BASE + 7] = 0.0
    assert dependence() == pytest.approx(0.0, abs=1e-6)
    assert reads is not None
    assert reads > 1e-3
