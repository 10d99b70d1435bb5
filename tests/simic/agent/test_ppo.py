"""The learner as a whole, and the documents' own checks under their own names."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.leyline.actions import HEAD_NAMES, NUM_OPS, LifecycleOp
from esper.leyline.errors import NonFiniteError, UsageError
from esper.simic.agent.config import ExplorationConfig, ImitationConfig, PerHead
from esper.simic.agent.losses import joint_ratio
from esper.simic.agent.objective import Losses, Objective, Scored, Targets, make_targets
from esper.simic.agent.ppo import PPOAgent, PPOConfig, compute_ppo_loss, group_of, optimizer_state
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, compute_per_head_advantages
from esper.tamiyo.controllers.policy_file import Policy
from esper.tamiyo.networks.decision import Scores
from esper.tamiyo.policy.action_masks import causal_heads
from esper.tamiyo.policy.distribution import entropy
from esper.utils.storage import load_tree, save_tree
from tests.simic.agent.rollouts import collect, make_agent, small_policy, weights

OP = HEAD_NAMES.index("op")
ONLY_ACTOR: dict[str, Any] = {
    "value_coef": 0.0,
    "entropy_coef": 0.0,
    "entropy_coef_end": 0.0,
    "entropy_floor_penalty": PerHead.same(0.0),
    "exploration_kl": 0.0,
    "exploration": ExplorationConfig(op_curiosity=0.0, sparse_entropy=0.0, sparse_curiosity=0.0),
    "imitation": ImitationConfig(weight=0.0),
}
NOTHING: dict[str, Any] = {**ONLY_ACTOR, "advantage_std_floor": 1e30}


def update(
    agent: PPOAgent, buffer: TamiyoRolloutBuffer, round: int = 0, paid_off: float = 0.0
) -> Any:
    return agent.update(buffer, progress=0.0, paid_off=paid_off, round=round)


def lose(
    policy: Policy, buffer: TamiyoRolloutBuffer, **options: Any
) -> tuple[Losses, Scores, Targets]:
    """Return the loss of a whole round, ready for `backward`, and what it was made of."""
    config, batch = PPOConfig(**options), buffer.batch()
    targets = make_targets(buffer, config, scale=torch.ones(()), progress=0.0, paid_off=0.0)
    scores = policy.network.score(
        batch.states, batch.blueprint_indices, batch.actions, batch.masks, with_baseline=False
    )
    scores.logits.retain_grad()
    objective = Objective(config, 0.0)
    scored = Scored.of(scores, batch.base_masks, torch.zeros(NUM_OPS))
    return objective(scored, scores.log_probs.detach(), targets), scores, targets


def gradients(policy: Policy) -> dict[str, float]:
    """Return the summed magnitude of the gradient of every part of the network."""
    found: dict[str, float] = {}
    for name, parameter in policy.network.named_parameters():
        size = 0.0 if parameter.grad is None else float(parameter.grad.abs().sum())
        found[group_of(name)] = found.get(group_of(name), 0.0) + size
    return found


# ----------------------------------------------------------------------- the documents' own checks


def test_advantage_masking_wait_op() -> None:
    ops = torch.full((32,), int(LifecycleOp.WAIT))
    advantages = compute_per_head_advantages(torch.randn(32), ops)
    assert advantages["op"].abs().sum() > 0
    for head in HEAD_NAMES:
        assert head == "op" or advantages[head].abs().sum() == 0, head


def test_advance_op_gradient_isolation() -> None:
    ops = torch.full((32,), int(LifecycleOp.ADVANCE))
    advantages = compute_per_head_advantages(torch.randn(32), ops)
    for head in HEAD_NAMES:
        assert (advantages[head].abs().sum() > 0) == (head in ("op", "slot")), head


@pytest.mark.parametrize("head", [head for head in HEAD_NAMES if head != "op"])
def test_masked_head_receives_entropy_gradient(head: str) -> None:
    """A head that never mattered in a round still learns from its entropy, by a whole update."""
    policy = small_policy(initial_op_bias=(50.0, 0.0, 0.0, 0.0, 0.0, 0.0), floor={"kind": "off"})
    buffer = collect(policy, rows=8)
    assert (buffer.batch().op == int(LifecycleOp.WAIT)).all()
    last = getattr(policy.network, f"{head}_head")[-1]
    before = last.weight.clone()
    agent = make_agent(policy, **{**ONLY_ACTOR, "entropy_coef": 0.05})
    update(agent, buffer)
    assert (last.weight - before).abs().sum() > 1e-8

    policy = small_policy(initial_op_bias=(50.0, 0.0, 0.0, 0.0, 0.0, 0.0), floor={"kind": "off"})
    update(make_agent(policy, **ONLY_ACTOR), collect(policy, rows=8))
    assert torch.equal(getattr(policy.network, f"{head}_head")[-1].weight, before)


def test_entropy_pulls_on_every_head_at_every_step() -> None:
    """Also where no legal op would use the head; an op without a choice is the one exception."""
    policy = small_policy()
    buffer = collect(policy, rows=16)
    batch = buffer.batch()
    idle = ~batch.available & batch.valid.unsqueeze(-1)
    targets = make_targets(buffer, PPOConfig(), scale=torch.ones(()), progress=0.0, paid_off=0.0)
    logits = torch.randn(*batch.base_masks.shape, requires_grad=True)
    (entropy(logits, batch.base_masks) * targets.entropy_weights).sum().backward()
    pulled = logits.grad.abs().sum(-1) > 0
    for at, head in enumerate(HEAD_NAMES):
        # A host with one slot, or with no blueprint that fits, has nothing to choose between.
        several = batch.base_masks[..., at, :].sum(-1) > 1
        if head in ("slot", "blueprint", "op"):
            assert torch.equal(pulled[..., at], batch.valid & several), head
        else:
            assert torch.equal(pulled[..., at], batch.valid), head
        if head in ("style", "alpha_target", "alpha_speed"):
            assert bool((pulled[..., at] & idle[..., at]).any()), head


def test_multi_head_joint_ratio_clipping() -> None:
    log_ratios = {f"head_{i}": torch.log(torch.tensor([1.15])) for i in range(8)}
    old = {head: torch.tensor([0.0]) for head in log_ratios}
    product = torch.stack(list(log_ratios.values())).sum(0).exp()
    assert product.item() > 1.2

    def loss(joint: bool) -> float:
        found = compute_ppo_loss(
            old_log_probs=old,
            new_log_probs=log_ratios,
            advantages=torch.tensor([1.0]),
            clip_epsilon=0.2,
            joint=joint,
        )
        assert torch.isfinite(found)
        return found.item()

    # Every head is within the range by itself; their product is cut off at 1.2.
    assert loss(joint=False) == pytest.approx(-8 * 1.15, rel=1e-5)
    assert loss(joint=True) == pytest.approx(-1.2, rel=1e-5)


def test_joint_ratio_per_head_decomposition() -> None:
    torch.manual_seed(42)
    old, new = torch.randn(32, 8), torch.randn(32, 8)
    assert torch.allclose(joint_ratio(new - old), (new - old).exp().prod(-1), rtol=1e-4)


# ------------------------------------------------------------------------------- ratios and heads


LAYOUTS = pytest.mark.parametrize("layout", ["documents", "travelling"])


@LAYOUTS
@pytest.mark.parametrize("minibatches", [1, 4])
def test_ratios_are_one_where_nothing_was_learned(minibatches: int, layout: str) -> None:
    """What is scored as the reference is what every pass scores, minibatches or not."""
    policy = small_policy(layout=layout)
    buffer = collect(policy, rows=8, lengths=[12, 5, 12, 7, 12, 12, 3, 12])
    agent = make_agent(policy, learning_rate=1e-30, minibatches=minibatches)
    report = update(agent, buffer)
    assert len(report.updates) == 4
    for row in [*report.updates, *report.heads]:
        if row["ratio_mean"] is not None:
            assert row["ratio_min"] == pytest.approx(1.0, abs=1e-6)
            assert row["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert report.approx_kl == pytest.approx(0.0, abs=1e-9)


@LAYOUTS
def test_the_reference_is_the_policy_that_acted(layout: str) -> None:
    """Rows start from an empty memory, and padding changes nothing, in every round."""
    policy = small_policy(layout=layout)
    buffer = None
    for seed in range(2):
        buffer = collect(policy, rows=5, lengths=[12, 5, 12, 7, 1], seed=seed, buffer=buffer)
        batch = buffer.batch()
        _, scores, _ = lose(policy, buffer)
        assert torch.allclose(
            scores.log_probs[batch.valid], batch.log_probs[batch.valid], atol=1e-5
        )


@LAYOUTS
@pytest.mark.parametrize("ratio", ["per_head", "joint"])
def test_every_head_that_mattered_has_a_gradient(ratio: str, layout: str) -> None:
    policy = small_policy(layout=layout)
    buffer = collect(policy, rows=32, steps=20)
    losses, _, targets = lose(policy, buffer, **ONLY_ACTOR, ratio=ratio)
    losses.total.backward()
    assert targets.causal.flatten(0, -2).any(0).all(), "every head is used in such a round"
    assert all(size > 0 for group, size in gradients(policy).items() if group != "value")


@LAYOUTS
@pytest.mark.parametrize("ratio", ["per_head", "joint"])
def test_a_head_that_did_not_matter_has_none(ratio: str, layout: str) -> None:
    bias = (50.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    policy = small_policy(layout=layout, initial_op_bias=bias, floor={"kind": "off"})
    losses, _, _ = lose(policy, collect(policy, rows=8), **ONLY_ACTOR, ratio=ratio)
    losses.total.backward()
    found = gradients(policy)
    assert found["op"] > 0
    assert all(found[head] == 0.0 for head in HEAD_NAMES if head != "op")


@LAYOUTS
@pytest.mark.parametrize("critic", ["op_marginal", "op_sampled", "op_soft", "state"])
def test_the_value_loss_leaves_the_heads_alone(critic: str, layout: str) -> None:
    policy = small_policy(critic=critic, layout=layout)
    losses, _, _ = lose(policy, collect(policy))
    losses.value.backward()
    found = gradients(policy)
    assert found["value"] > 0
    assert found["trunk"] > 0
    assert all(found[head] == 0.0 for head in HEAD_NAMES)


@pytest.mark.parametrize("ratio", ["per_head", "joint"])
def test_forced_and_padded_steps_never_enter_the_actor_loss(ratio: str) -> None:
    policy = small_policy()
    buffer = collect(policy, rows=8, lengths=[12, 5, 12, 7, 12, 12, 3, 12])
    batch = buffer.batch()
    _, scores, targets = lose(policy, buffer)
    config = PPOConfig(**ONLY_ACTOR, ratio=ratio)
    log_probs = scores.log_probs.detach().requires_grad_()
    entropies = [scores.entropies] * 3
    nothing = torch.zeros_like(scores.values)
    scored = Scored(log_probs, scores.values, *entropies, nothing, torch.zeros_like(log_probs))
    targets = make_targets(buffer, config, scale=torch.ones(()), progress=0.0, paid_off=0.0)
    Objective(config, 0.0)(scored, log_probs.detach(), targets).total.backward()
    assert log_probs.grad is not None
    forced = batch.valid & ~batch.free
    assert forced.any()
    assert not log_probs.grad[~(batch.valid & batch.free)].any()
    assert log_probs.grad[batch.usable].any()


def test_perturbing_a_causal_head_moves_the_joint_ratio_and_an_idle_one_nothing() -> None:
    policy = small_policy()
    batch = collect(policy, rows=16, steps=16).batch()
    causal = causal_heads(batch.op)

    @torch.no_grad()
    def log_probs() -> Tensor:
        return policy.network.score(
            batch.states, batch.blueprint_indices, batch.actions, batch.masks
        ).log_probs

    before = log_probs()
    for index, head in enumerate(HEAD_NAMES):
        weight = getattr(policy.network, f"{head}_head")[-1].weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(torch.randn(kept.shape, generator=torch.Generator().manual_seed(1)))
            moved = joint_ratio(log_probs() - before) != 1.0
            weight.copy_(kept)
        assert not moved[~causal[..., index]].any(), head
        has_choice = causal[..., index] & (batch.masks[..., index, :].sum(-1) > 1)
        assert moved[has_choice].float().mean() > 0.9, head


# ------------------------------------------------------------------------------------ exploration


def collapsed(gap: float = 20.0) -> Policy:
    """Return a policy whose blueprint head always takes conv_light, wherever it is legal."""
    policy = small_policy(policy_gain=0.01)
    with torch.no_grad():
        policy.network.blueprint_head[-1].bias[1] += gap
    return policy


def test_the_exploration_term_keeps_a_gradient_at_a_collapse() -> None:
    blueprint = HEAD_NAMES.index("blueprint")

    def pull(**options: Any) -> float:
        policy = collapsed()
        losses, scores, targets = lose(policy, collect(policy, rows=8, steps=8), **options)
        losses.total.backward()
        assert scores.logits.grad is not None
        # Whatever pulls the other way counts by the head's share of the steps too.
        return float(scores.logits.grad[..., blueprint, 1].sum() / targets.shares[blueprint])

    quiet = {**NOTHING, "advantage_std_floor": 1e30}
    assert pull(**{**quiet, "exploration_kl": 1.0}) >= 0.1
    # Neither the entropy nor its floor can do that: their gradients are gone with the entropy.
    entropy = {**quiet, "entropy_coef": 1.0, "entropy_floor_penalty": PerHead.same(1.0)}
    assert abs(pull(**entropy)) < 1e-4


def test_updates_lead_out_of_a_collapse() -> None:
    def gap_after(**options: Any) -> float:
        policy = collapsed()
        agent = make_agent(policy, learning_rate=1e-2, target_kl=0.0, **{**NOTHING, **options})
        buffer = collect(policy, rows=8, steps=8)
        for round in range(10):
            update(agent, buffer, round)
        return policy.network.blueprint_head[-1].bias[1].item()

    assert gap_after() == pytest.approx(20.0, abs=1e-3)
    assert gap_after(exploration_kl=0.01) < 19.9


@pytest.mark.parametrize("layout", ["documents", "travelling"])
def test_an_anchor_holds_a_policy_near_its_start(layout: str) -> None:
    start = small_policy(seed=9, layout=layout)

    def learn(weight: float) -> tuple[PPOAgent, TamiyoRolloutBuffer, float]:
        """Return the agent, its round, and how far one update led away from the start."""
        options = {**ONLY_ACTOR, "anchor_kl": weight, "target_kl": 0.0, "epochs": 12}
        options["learning_rate"] = 3e-3
        agent = make_agent(small_policy(layout=layout), **options)
        agent.start_from(start)
        assert same_tree(weights(agent.policy), weights(start))
        buffer = collect(agent.policy)
        batch = buffer.batch()
        update(agent, buffer)
        one, two = (
            policy.network.score(
                batch.states, batch.blueprint_indices, batch.actions, batch.masks
            ).log_probs
            for policy in (agent.policy, start)
        )
        return agent, buffer, float((one - two).detach().abs().mean())

    free, buffer, far = learn(0.0)
    held, _, near = learn(1000.0)
    assert near < 0.5 * far
    assert free.anchor_logits(buffer.batch()) is None
    logits = held.anchor_logits(buffer.batch())
    again = make_agent(small_policy(layout=layout), anchor_kl=1.0)
    again.load_state_dict(held.state_dict())
    other = again.anchor_logits(buffer.batch())
    assert logits is not None
    assert other is not None
    assert torch.equal(logits, other)


def test_a_start_of_another_shape_is_refused() -> None:
    with pytest.raises(UsageError, match="another network than this run"):
        make_agent().start_from(small_policy(lstm_hidden_dim=16))


def same_tree(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


def test_curiosity_ends_when_episodes_pay_off() -> None:
    policy = small_policy()
    buffer = collect(policy, rows=8)
    options = {**NOTHING, "exploration": ExplorationConfig(sparse_entropy=0.0), "target_kl": 0.0}
    before = policy.network.op_head[-1].weight.detach().clone()
    update(make_agent(policy, **options), buffer, paid_off=1.0)
    assert torch.allclose(before, policy.network.op_head[-1].weight, atol=1e-12)
    report = update(make_agent(policy, **options), buffer, paid_off=0.0)
    assert not torch.allclose(before, policy.network.op_head[-1].weight, atol=1e-5)
    assert report.updates[-1]["op_entropy_coef"] == pytest.approx(1.0)


# ------------------------------------------------------------------------------ passes and stopping


def test_everything_is_measured_after_the_step() -> None:
    """The row of a pass shows what an update that ends there leaves behind."""
    whole = make_agent(small_policy(), epochs=3, target_kl=0.0, learning_rate=3e-3)
    rows = update(whole, collect(whole.policy)).updates
    for epochs in (1, 2, 3):
        agent = make_agent(small_policy(), epochs=epochs, target_kl=0.0, learning_rate=3e-3)
        buffer = collect(agent.policy)
        batch = buffer.batch()
        old = agent.network.score(batch.states, batch.blueprint_indices, batch.actions, batch.masks)
        last = update(agent, buffer).updates[-1]
        new = agent.network.score(batch.states, batch.blueprint_indices, batch.actions, batch.masks)
        log_ratios = (new.log_probs - old.log_probs).detach()
        ratio = log_ratios.sum(-1).exp()[batch.usable]
        kl = (log_ratios.exp() - 1 - log_ratios).sum(-1)[batch.usable].mean()
        for row in (last, rows[epochs - 1]):
            assert row["approx_kl"] == pytest.approx(float(kl), rel=1e-3)
            assert row["ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-4)
            assert row["ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-4)
            outside = ((ratio - 1).abs() > 0.2).float().mean()
            assert row["clipfrac"] == pytest.approx(float(outside))
    assert rows[0]["approx_kl"] > 1e-6


@pytest.mark.parametrize("minibatches", [1, 3])
def test_an_update_stops_when_the_policy_has_moved_too_far(minibatches: int) -> None:
    agent = make_agent(learning_rate=0.03, epochs=20, target_kl=0.01, minibatches=minibatches)
    report = update(agent, collect(agent.policy))
    assert len(report.updates) < 20
    assert report.approx_kl > 0.015
    assert [row["is_last"] for row in report.updates] == [False] * (len(report.updates) - 1) + [
        True
    ]
    assert report.updates[-1]["stopped_early"]
    assert report.steps <= minibatches * len(report.updates)
    # Every pass before the last one was still within the limit when its last step was taken.
    assert all(row["ordinal"] == index for index, row in enumerate(report.updates))


def test_minibatches_are_whole_rows_and_a_pass_sees_every_row_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = make_agent(minibatches=3, epochs=2, target_kl=0.0)
    buffer = collect(agent.policy, rows=7)
    seen: list[Tensor] = []
    score = agent.network.score

    def watched(states: Tensor, *rest: Any, **options: Any) -> Scores:
        if torch.is_grad_enabled():
            seen.append(states)
        return score(states, *rest, **options)

    monkeypatch.setattr(agent.network, "score", watched)
    report = update(agent, buffer)
    assert report.steps == 6
    assert all(part.shape[1] == 12 for part in seen)
    for first in (0, 3):
        rows = torch.cat(seen[first : first + 3])
        found = [(rows == row).flatten(1).all(1).sum().item() for row in buffer.batch().states]
        assert found == [1] * 7


def test_the_order_of_rows_belongs_to_the_round_alone() -> None:
    def after(round: int, draws: int) -> Tensor:
        policy = small_policy()
        buffer = collect(policy)
        torch.manual_seed(draws)
        update(make_agent(policy, minibatches=3), buffer, round)
        return policy.network.op_head[-1].weight.detach()

    assert torch.equal(after(0, 1), after(0, 2))
    assert not torch.equal(after(0, 1), after(1, 1))


# ---------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("critic", ["op_marginal", "op_sampled", "op_soft", "state"])
@pytest.mark.parametrize("ratio", ["per_head", "joint"])
@pytest.mark.parametrize("floor", ["mixture", "clamp", "off"])
def test_every_combination_of_options_learns_something(critic: str, ratio: str, floor: str) -> None:
    policy = small_policy(critic=critic, floor={"kind": floor})
    agent = make_agent(policy, ratio=ratio, value_clip=0.5, weight_decay=0.01)
    before = weights(policy)
    report = update(agent, collect(policy, truncate=True))
    assert report.steps
    assert not report.nonfinite
    assert agent.updates_done == 1
    assert report.approx_kl > 0
    assert any(not torch.equal(before[name], each) for name, each in weights(policy).items())


def test_an_op_encoder_learns_and_starts_afresh_with_the_critic() -> None:
    policy = small_policy(op_encoder=True)
    agent = make_agent(policy)
    before = weights(policy)
    update(agent, collect(policy))
    learned = weights(policy)
    names = [name for name in before if name.startswith("op_encoder")]
    assert names
    assert all(group_of(name) == "value" for name in names)
    assert any(not torch.equal(before[name], learned[name]) for name in names)
    agent.reset_heads(["value"])
    after = weights(policy)
    for name in before:
        if name.endswith("weight"):
            assert torch.equal(learned[name], after[name]) == (group_of(name) != "value"), name


def test_bf16_is_off_by_default_and_learns_with_coarse_numbers() -> None:
    assert not PPOConfig().use_bf16
    policies = [small_policy(), small_policy()]
    exact, coarse = (
        update(make_agent(policy, use_bf16=use, epochs=2, target_kl=0.0), collect(policy))
        for policy, use in zip(policies, (False, True), strict=True)
    )
    assert not coarse.nonfinite
    assert coarse.approx_kl > 0
    assert coarse.approx_kl != exact.approx_kl
    assert coarse.approx_kl == pytest.approx(exact.approx_kl, rel=0.5)
    assert all(each.dtype == torch.float32 for each in policies[1].network.parameters())


@pytest.mark.gpu
def test_bf16_learns_on_a_gpu() -> None:
    policy = small_policy()
    buffer = TamiyoRolloutBuffer(6, 12, policy.network.config, "cuda")
    buffer.load_state_dict(collect(policy).state_dict())
    agent = PPOAgent(policy, PPOConfig(use_bf16=True), "cuda", 0)
    report = update(agent, buffer)
    assert not report.nonfinite
    assert report.approx_kl > 0


def test_a_head_without_a_step_size_stays() -> None:
    policy = small_policy()
    multipliers = PerHead(**{**dict.fromkeys(HEAD_NAMES, 1.0), "tempo": 0.0})
    before = weights(policy)
    update(make_agent(policy, lr_multipliers=multipliers), collect(policy))
    after = weights(policy)
    for name in before:
        group = group_of(name)
        if group in ("tempo", "op"):
            assert torch.equal(before[name], after[name]) == (group == "tempo"), name


# ------------------------------------------------------------------------------------------ critic


def pay_for_the_clock(state: Tensor, step: Any, at: int) -> Tensor:
    """A reward that the observation tells: its first features, and nothing that is done."""
    return state[:, :4].sum(-1) + 2.0


@pytest.mark.parametrize("critic", ["op_marginal", pytest.param("state", marks=pytest.mark.slow)])
def test_the_critic_explains_a_stationary_target(critic: str) -> None:
    policy = small_policy(critic=critic)
    agent = make_agent(policy, learning_rate=3e-3, gamma=0.8, minibatches=2)
    explained = []
    for round in range(25):
        buffer = collect(policy, rows=16, steps=10, seed=round, pay=pay_for_the_clock)
        explained.append(update(agent, buffer, round).explained_variance)
    assert explained[0] < 0.3
    assert sum(explained[-5:]) / 5 > 0.5, explained


def test_the_critic_means_the_same_after_its_scale_has_changed() -> None:
    policy = small_policy()
    agent = make_agent(policy, learning_rate=1e-30)
    update(agent, collect(policy, pay=lambda state, step, at: 0.1 * torch.randn(len(state))))
    buffer = collect(policy, pay=lambda state, step, at: 1000.0 * torch.randn(len(state)))
    batch = buffer.batch()
    before = agent.value_units([""]) * batch.values
    update(agent, buffer, round=1)
    assert float(agent.value_units([""])) > 10
    after = policy.network.score(
        batch.states, batch.blueprint_indices, batch.actions, batch.masks
    ).baseline
    assert torch.allclose(after * agent.value_units([""]), before, atol=1e-3)


def test_the_first_round_is_learned_alike_however_large_its_rewards_are() -> None:
    def learn(size: float) -> tuple[float, Tensor]:
        policy = small_policy()
        agent = make_agent(policy)

        def pay(state: Tensor, step: Any, at: int) -> Tensor:
            return size * pay_for_the_clock(state, step, at)

        report = update(agent, collect(policy, pay=pay))
        return report.explained_variance, policy.network.value_head[-1].weight.detach()

    # Powers of two: nothing is rounded differently.
    explained, weights = learn(1.0)
    for size in (1 / 64, 32.0):
        other_explained, other_weights = learn(size)
        assert other_explained == pytest.approx(explained, rel=1e-4)
        assert torch.allclose(other_weights, weights, atol=1e-6)


# --------------------------------------------------------------------------- numbers gone wrong


def test_a_log_probability_that_is_not_finite_skips_the_step() -> None:
    policy = small_policy()
    agent = make_agent(policy)
    buffer = collect(policy)
    with torch.no_grad():
        policy.network.tempo_head[-1].bias[0] = torch.nan
    before = weights(policy)
    report = update(agent, buffer)
    assert not report.steps
    assert [(found.kind, found.heads) for found in report.nonfinite] == [("log_prob", ("tempo",))]
    assert report.updates[0]["was_skipped"]
    assert report.updates[0]["nonfinite"] == 1
    assert agent.updates_done == 0
    assert not optimizer_state(policy.network, agent.optimizer)
    for name, each in weights(policy).items():
        if "value_head.2" not in name:
            assert torch.equal(each.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_poisoned_memory_is_found_in_every_head_and_the_value(minibatches: int) -> None:
    policy = small_policy()
    agent = make_agent(policy, minibatches=minibatches)
    buffer = collect(policy)
    with torch.no_grad():
        policy.network.lstm_ln.weight[3] = torch.inf
    report = update(agent, buffer)
    kinds = {found.kind: found.heads for found in report.nonfinite}
    kind = "log_prob" if minibatches == 1 else "old_log_prob"
    assert kinds == {kind: HEAD_NAMES, "value": ()}


def test_a_value_that_is_not_finite_is_found() -> None:
    policy = small_policy()
    agent = make_agent(policy)
    buffer = collect(policy)
    with torch.no_grad():
        policy.network.value_head[-1].bias[0] = torch.inf
    report = update(agent, buffer)
    assert [found.kind for found in report.nonfinite] == ["value"]
    assert not report.steps


def test_a_reward_that_is_not_finite_is_found_before_anything_is_learned() -> None:
    agent = make_agent()
    buffer = collect(agent.policy)
    buffer.batch().rewards[0, 0] = torch.inf
    before = weights(agent.policy)
    report = update(agent, buffer)
    assert "returns" in {found.kind for found in report.nonfinite}
    assert all(torch.equal(before[name], each) for name, each in weights(agent.policy).items())
    assert float(agent.value_normalizer.scale) == 1.0


def test_a_gradient_that_is_not_finite_is_not_stepped_on() -> None:
    agent = make_agent()
    buffer = collect(agent.policy)
    weight = agent.network.style_head[0].weight
    weight.register_hook(lambda gradient: gradient * torch.nan)
    report = update(agent, buffer)
    assert [(found.kind, found.heads) for found in report.nonfinite] == [("gradient", ("style",))]
    assert torch.isfinite(weight).all()
    assert not report.steps


def test_three_updates_in_a_row_that_went_wrong_stop_the_training() -> None:
    policy = small_policy()
    agent = make_agent(policy)
    good, bad = collect(policy), collect(policy)
    bad.batch().rewards[0, 0] = torch.nan
    update(agent, bad)
    update(agent, bad)
    update(agent, good)
    assert (agent.skips_in_a_row, agent.updates_done) == (0, 1)
    update(agent, bad)
    update(agent, bad)
    with pytest.raises(NonFiniteError, match=r"3 updates in a row.*returns"):
        update(agent, bad)


def test_an_empty_round_is_refused() -> None:
    agent = make_agent()
    empty = TamiyoRolloutBuffer(2, 3, agent.network.config)
    with pytest.raises(UsageError, match="no step to learn from"):
        update(agent, empty)


# ------------------------------------------------------------------------------------------ state


@LAYOUTS
def test_an_update_from_a_restored_state_is_the_same_bit_for_bit(
    tmp_path: Path, layout: str
) -> None:
    agent = make_agent(small_policy(seed=1, layout=layout), seed=5, minibatches=2)
    for round in range(2):
        update(agent, collect(agent.policy, seed=round), round)
    save_tree(tmp_path / "it", agent.state_dict(), kind="agent", version=1)
    restored = make_agent(small_policy(seed=2, layout=layout), seed=5, minibatches=2)
    restored.load_state_dict(load_tree(tmp_path / "it", kind="agent", version=1)[0])
    assert restored.updates_done == 2
    for each in (agent, restored):
        each.reset_heads(["style"])
        update(each, collect(each.policy, seed=7), 2)
    first, second = weights(agent.policy), weights(restored.policy)
    assert all(torch.equal(first[name], second[name]) for name in first)
    one = optimizer_state(agent.network, agent.optimizer)
    two = optimizer_state(restored.network, restored.optimizer)
    assert all(torch.equal(one[name][key], two[name][key]) for name in one for key in one[name])
    assert torch.equal(agent.value_normalizer.scale, restored.value_normalizer.scale)


def test_resetting_heads_touches_nothing_else() -> None:
    agent = make_agent()
    update(agent, collect(agent.policy))
    before, state = weights(agent.policy), optimizer_state(agent.network, agent.optimizer)
    agent.reset_heads(["blueprint", "tempo"])
    after, left = weights(agent.policy), optimizer_state(agent.network, agent.optimizer)
    for name, parameter in agent.network.named_parameters():
        was_reset = group_of(name) in ("blueprint", "tempo")
        assert (name in left) != was_reset
        if was_reset and parameter.dim() > 1:
            assert not torch.equal(before[name], after[name]), name
        if not was_reset:
            assert torch.equal(before[name], after[name]), name
            assert all(torch.equal(state[name][key], left[name][key]) for key in left[name])
    first = after["blueprint_head.0.weight"]
    agent.reset_heads(["blueprint"])
    assert not torch.equal(first, agent.network.blueprint_head[0].weight)
    assert update(agent, collect(agent.policy), 1).steps


def test_a_fresh_op_head_has_its_prior_again() -> None:
    agent = make_agent()
    update(agent, collect(agent.policy))
    agent.reset_heads(["op"])
    last = agent.network.op_head[-1]
    assert isinstance(last, nn.Linear)
    assert last.bias.tolist() == list(agent.network.config.initial_op_bias)


def test_an_unknown_head_is_refused() -> None:
    with pytest.raises(UsageError, match="no head 'blueprints'; known: slot, blueprint"):
        make_agent().reset_heads(["blueprints"])


@pytest.fixture
def only_new_objects() -> None:
    """Let `gc.get_objects` leave out what other tests have left behind."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("only_new_objects")
def test_memory_is_flat_over_fifty_updates() -> None:
    agent = make_agent(epochs=1)
    buffer = collect(agent.policy, rows=2, steps=4)

    def tensors() -> int:
        gc.collect()
        return sum(each.numel() for each in gc.get_objects() if issubclass(type(each), Tensor))

    for round in range(3):
        update(agent, buffer, round)
    before = tensors()
    assert before > 0
    for round in range(50):
        update(agent, buffer, round)
    assert tensors() == before


def test_tasks_teach_alike_whatever_they_pay() -> None:
    """A task that pays a hundred times as much moves the policy no further."""

    def learn(factor: float) -> dict[str, torch.Tensor]:
        agent = make_agent(small_policy())
        buffer = collect(agent.policy, rows=8)
        buffer.batch().rewards[:4] *= factor
        agent.update(buffer, progress=0.0, paid_off=0.0, round=0, tasks=["a"] * 4 + ["b"] * 4)
        return weights(agent.policy)

    plain, loud = learn(1.0), learn(100.0)
    start = weights(small_policy())
    moved = torch.cat([(plain[name] - start[name]).flatten() for name in plain])
    other = torch.cat([(loud[name] - start[name]).flatten() for name in plain])
    assert float(torch.corrcoef(torch.stack([moved, other]))[0, 1]) > 0.9
