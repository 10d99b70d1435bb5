"""The policy network: its shape, the documents' checklist, and acting equal to scoring."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.leyline.actions import (
    CAUSAL_HEADS,
    HEAD_NAMES,
    HEAD_SIZES,
    NUM_OPS,
    LifecycleOp,
    causal_table,
)
from esper.leyline.errors import ConfigError, EmptyMaskError, NonFiniteError, UsageError
from esper.leyline.slots import NOOP, NUM_BLUEPRINTS
from esper.simic.training.config import get_recipe
from esper.tamiyo.networks.decision import Evaluation
from esper.tamiyo.networks.factored_lstm import BlueprintEmbedding, FactoredRecurrentActorCriticV2
from esper.tamiyo.policy.distribution import entropy, masked_log_probs, probabilities
from esper.testing.controllers import check_actions
from tests.tamiyo.networks.situations import (
    act_step_by_step,
    forced_actions,
    random_inputs,
    random_masks,
    small_policy,
)

CRITICS = ("op_marginal", "op_sampled", "op_soft", "state")


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# ------------------------------------------------------------------------------------------ shape


def test_parameters_of_every_part() -> None:
    """As document 000 lays it out: 512 wide, an LSTM, two-layer heads, a deeper blueprint."""
    net = FactoredRecurrentActorCriticV2(state_dim=121, num_slots=3)
    wide, half, neck = 512, 256, 128

    def dense(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    plain = {head: size for head, size in HEAD_SIZES.items() if head != "blueprint"} | {"slot": 3}
    parts = {
        "blueprint_embedding": 4 * (NUM_BLUEPRINTS + 1),
        "feature_net": dense(121 + 3 * 4, wide) + 2 * wide,
        "lstm": 4 * 2 * dense(wide, wide),
        "lstm_ln": 2 * wide,
        "blueprint_head": dense(wide, wide) + dense(wide, neck) + dense(neck, NUM_BLUEPRINTS),
        "value_head": dense(wide + NUM_OPS, half) + dense(half, 1),
        **{f"{head}_head": dense(wide, half) + dense(half, size) for head, size in plain.items()},
    }
    assert {name: count(getattr(net, name)) for name in parts} == parts
    assert count(net) == sum(parts.values())


def test_parameters_of_the_narrow_revision() -> None:
    assert count(FactoredRecurrentActorCriticV2(112, 3, lstm_hidden_dim=256)) == 927_458
    assert count(FactoredRecurrentActorCriticV2(121, 3, lstm_hidden_dim=256)) == 929_762


def test_parameters_of_the_policy_before() -> None:
    """Document 000 counts its V1 by parts, in thousands; the embedding is of our observation."""
    net = FactoredRecurrentActorCriticV2.from_config(get_recipe("documents-v1").policy)
    told = {"feature_net": 18, "lstm": 132, "lstm_ln": 0.3, "blueprint_head": 9, "value_head": 8}
    for part, thousands in told.items():
        assert count(getattr(net, part)) == pytest.approx(1000 * thousands, rel=0.15), part
    assert count(net) == pytest.approx(227_000, rel=0.01)


def test_named_parts() -> None:
    net = FactoredRecurrentActorCriticV2(lstm_hidden_dim=64)
    for head, size in HEAD_SIZES.items():
        assert getattr(net, f"{head}_head")[-1].out_features == size
    assert net.blueprint_head[-1].weight.shape == (NUM_BLUEPRINTS, 128)
    assert [layer.out_features for layer in net.blueprint_head if isinstance(layer, nn.Linear)] == [
        64,
        128,
        NUM_BLUEPRINTS,
    ]
    assert net.value_head[0].in_features == 64 + NUM_OPS
    assert isinstance(net.lstm, nn.LSTM)
    assert isinstance(net.blueprint_embedding, BlueprintEmbedding)
    assert FactoredRecurrentActorCriticV2().value_head[0].in_features == 518
    assert small_policy(critic="state").value_head[0].in_features == 32


def test_the_weights_are_the_only_state() -> None:
    net = small_policy()
    assert set(net.state_dict()) == {name for name, _ in net.named_parameters()}


@pytest.mark.parametrize(("slots", "features", "inputs"), [(1, 61, 65), (5, 181, 201)])
def test_other_numbers_of_slots(slots: int, features: int, inputs: int) -> None:
    net = small_policy(num_slots=slots)
    assert net.config.observation_dim == features
    assert net.feature_net[0].in_features == inputs
    out = net(*random_inputs(net, 2, 3))
    assert out["slot_logits"].shape == (2, 3, slots)
    masks = random_masks(6, slots)
    states, blueprints = random_inputs(net, 6)
    check_actions(net.get_action(states, masks, blueprints).by_head(), masks)


def test_forward_needs_neither_masks_nor_memory() -> None:
    net = FactoredRecurrentActorCriticV2(state_dim=121, num_slots=3)
    out = net(torch.randn(2, 5, 121), torch.randint(0, NUM_BLUEPRINTS, (2, 5, 3)))
    for head, size in HEAD_SIZES.items():
        assert out[f"{head}_logits"].shape == (2, 5, size)
    assert out["value"].shape == (2, 5)
    assert out["op_values"].shape == (2, 5, NUM_OPS)
    assert [part.shape for part in out["hidden"]] == [(1, 2, 512)] * 2


def test_from_config_builds_the_same_network() -> None:
    net = small_policy(num_slots=2, lstm_layers=2, critic="state", num_blueprints=15)
    again = FactoredRecurrentActorCriticV2.from_config(net.config)
    again.load_state_dict(net.state_dict())
    inputs = random_inputs(net, 2, 3)
    torch.testing.assert_close(net(*inputs)["value"], again(*inputs)["value"])
    assert again.blueprint_head[-1].out_features == 15
    with pytest.raises(ConfigError, match="critic must be one of"):
        small_policy(critic="q")


def test_a_copy_is_independent() -> None:
    net = small_policy()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.op_head[-1].bias.add_(100.0)
    inputs = random_inputs(net, 1, 1)
    assert not torch.allclose(net(*inputs)["op_logits"], other(*inputs)["op_logits"])


# --------------------------------------------------------------------- the documents' checklist


def test_blueprint_noop_during_non_germinate() -> None:
    """Wherever the op is not GERMINATE the blueprint is noop, though noop is never legal."""
    net = small_policy(initial_op_bias=(0.0,) * 6)
    states, blueprints = random_inputs(net, 300)
    step = net.get_action(states, random_masks(300), blueprint_indices=blueprints)
    germinates = step.op == LifecycleOp.GERMINATE
    assert germinates.any()
    assert (~germinates).any()
    assert (step.blueprint_idx[~germinates] == NOOP).all()
    assert (step.blueprint_idx[germinates] != NOOP).all()
    action = net.get_action(states[0], blueprint_indices=blueprints[0])
    if action.op != LifecycleOp.GERMINATE:
        assert action.blueprint_idx == 0


@pytest.mark.parametrize("op", list(LifecycleOp))
def test_advance_op_gradient_isolation(op: LifecycleOp) -> None:
    """The log-probability of an op reaches the heads it uses, and no others."""
    net = small_policy()
    inputs = random_inputs(net, 3, 4)
    scores = net.evaluate_actions(*inputs, forced_actions(op, 3, 4), None)
    torch.stack(list(scores.log_probs.values())).sum().backward()
    for head in HEAD_NAMES:
        gradient = getattr(net, f"{head}_head")[-1].weight.grad
        used = head in CAUSAL_HEADS[op]
        assert (gradient.abs().sum() > 0) == used, f"{head} under {op.name}"


@pytest.mark.parametrize("explore", [True, False])
def test_masked_head_log_probs_finite(explore: bool) -> None:
    """Idle heads score exactly 0, whatever stands in their action and their mask."""
    net = small_policy()
    batch = act_step_by_step(net, rows=8, steps=30, explore=explore)
    scores = net.evaluate_actions(
        batch.states, batch.blueprints, batch.by_head(), batch.masks, explore=explore
    )
    causal = causal_table()[batch.actions[..., -1]]
    for index, head in enumerate(HEAD_NAMES):
        values = scores.log_probs[head]
        assert torch.isfinite(values).all()
        assert (values[~causal[..., index]] == 0).all()
        assert (values[causal[..., index]] <= 1e-6).all()
    waiting = forced_actions(LifecycleOp.WAIT, 8, 30)
    waiting["blueprint"].zero_()
    idle = net.evaluate_actions(batch.states, batch.blueprints, waiting, batch.masks)
    for head in HEAD_NAMES[:-1]:
        assert (idle.log_probs[head] == 0).all()


def test_masked_head_receives_entropy_gradient() -> None:
    """The entropy bonus reaches a head that was idle in every step."""
    net = small_policy()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    batch = act_step_by_step(net, rows=4, steps=10)
    actions = forced_actions(LifecycleOp.WAIT, 4, 10)
    before = net.blueprint_head[-1].weight.detach().clone()
    _, _, entropies, _ = net.evaluate_actions(
        batch.states, batch.blueprints, actions, batch.masks, None, sampled_op=actions["op"]
    )
    for head in HEAD_NAMES:
        assert (entropies[head] >= -1e-6).all()
        assert (entropies[head] <= 1 + 1e-6).all()
    loss = -0.01 * torch.stack([each.mean() for each in entropies.values()]).sum()
    optimizer.zero_grad()
    loss.backward()
    for head in HEAD_NAMES:
        assert getattr(net, f"{head}_head")[-1].weight.grad.abs().sum() > 0, head
    optimizer.step()
    assert (net.blueprint_head[-1].weight - before).abs().sum() > 1e-8


def test_action_mask_consistency() -> None:
    """The masks of the rollout allow what was drawn and give the update the same scores."""
    net = small_policy()
    batch = act_step_by_step(net, rows=6, steps=40)
    causal = causal_table()[batch.actions[..., -1]]
    allowed = batch.masks.gather(-1, batch.actions[..., None]).squeeze(-1)
    assert allowed[causal].all()
    for at in range(40):
        masks = random_masks(6, seed=at)
        check_actions({head: batch.by_head()[head][:, at] for head in HEAD_NAMES}, masks)
        again = net.table.head_masks(masks, batch.actions[:, at])
        assert torch.equal(again, batch.masks[:, at])
    scores = net.score(batch.states, batch.blueprints, batch.actions, batch.masks)
    torch.testing.assert_close(scores.log_probs, batch.log_probs, rtol=0, atol=1e-5)


# --------------------------------------------------------------------------- acting and scoring


@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("layers", [1, 2])
def test_acting_equals_scoring(critic: str, layers: int) -> None:
    net = small_policy(critic=critic, lstm_layers=layers)
    batch = act_step_by_step(net, rows=5, steps=60)
    scores = net.score(batch.states, batch.blueprints, batch.actions, batch.masks)
    torch.testing.assert_close(scores.log_probs, batch.log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.baseline, batch.values, rtol=0, atol=1e-5)
    for now, then in zip(scores.hidden, batch.hidden, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=1e-5)


def test_acting_equals_scoring_at_full_width() -> None:
    net = FactoredRecurrentActorCriticV2()
    batch = act_step_by_step(net, rows=4, steps=150)
    with torch.no_grad():
        scores = net.score(batch.states, batch.blueprints, batch.actions, batch.masks)
    torch.testing.assert_close(scores.log_probs, batch.log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.baseline, batch.values, rtol=0, atol=1e-5)


def test_acting_equals_scoring_across_episode_boundaries() -> None:
    net = small_policy()
    starts = torch.zeros(4, 50, dtype=torch.bool)
    starts[0, 0] = starts[1, 20] = starts[1, 21] = starts[2, 49] = starts[3, 7] = True
    batch = act_step_by_step(net, rows=4, steps=50, starts=starts)
    inputs = (batch.states, batch.blueprints, batch.actions, batch.masks)
    scores = net.score(*inputs, episode_starts=starts)
    torch.testing.assert_close(scores.log_probs, batch.log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.baseline, batch.values, rtol=0, atol=1e-5)
    for now, then in zip(scores.hidden, batch.hidden, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=1e-5)
    blind = net.score(*inputs)
    assert not torch.allclose(blind.baseline, batch.values, atol=1e-3)


def test_a_sequence_may_be_scored_in_pieces() -> None:
    net = small_policy()
    batch = act_step_by_step(net, rows=3, steps=20)

    def part(at: slice, hidden: Any) -> Any:
        inputs = (batch.states, batch.blueprints, batch.actions, batch.masks)
        return net.score(*(each[:, at] for each in inputs), hidden)

    first = part(slice(0, 8), None)
    second = part(slice(8, 20), first.hidden)
    joined = torch.cat([first.log_probs, second.log_probs], 1)
    torch.testing.assert_close(joined, batch.log_probs, rtol=0, atol=1e-5)


def test_the_ways_to_give_masks_and_actions_agree() -> None:
    net = small_policy()
    masks = random_masks(50)
    states, blueprints = random_inputs(net, 50)
    uniforms = torch.rand(50, 8)
    step = net.get_action(states, masks, blueprints, uniforms=uniforms)
    rectangle = net.table.row_masks(masks, (50,))
    again = net.get_action(states, rectangle, blueprints, uniforms=uniforms)
    assert torch.equal(again.actions, step.actions)
    assert torch.equal(again.log_probs, step.log_probs)

    def of_time(tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(1)

    by_head = {
        head: of_time(step.masks[:, index, : net.table.sizes[head]])
        for index, head in enumerate(HEAD_NAMES)
    }
    actions = {head: of_time(values) for head, values in step.items()}
    forms: list[Any] = [of_time(step.masks), by_head, of_time(rectangle), masks.map(of_time)]
    for form in forms:
        scores = net.evaluate_actions(of_time(states), of_time(blueprints), actions, form)
        for index, head in enumerate(HEAD_NAMES):
            torch.testing.assert_close(scores.log_probs[head][:, 0], step.log_probs[:, index])


def test_evaluation_is_a_named_tuple_by_head() -> None:
    net = small_policy()
    batch = act_step_by_step(net, rows=2, steps=5)
    result = net.evaluate_actions(
        batch.states,
        batch.blueprints,
        batch.by_head(),
        batch.masks,
        net.initial_hidden(2),
        sampled_op=batch.by_head()["op"],
    )
    values, log_probs, entropies, hidden = result
    assert isinstance(result, Evaluation)
    assert tuple(log_probs) == tuple(entropies) == HEAD_NAMES
    assert values.shape == log_probs["op"].shape == entropies["slot"].shape == (2, 5)
    assert hidden[0].shape == (1, 2, 32)


def test_entropies_are_over_the_given_masks_without_floors() -> None:
    net = small_policy()
    batch = act_step_by_step(net, rows=2, steps=5)
    scores = net.score(batch.states, batch.blueprints, batch.actions, batch.masks)
    torch.testing.assert_close(scores.entropies, entropy(scores.logits, batch.masks))
    out = net(batch.states, batch.blueprints)
    torch.testing.assert_close(scores.logits[..., -1, :NUM_OPS], out["op_logits"])


# --------------------------------------------------------------------------------------- a step


def test_frequencies_follow_the_scored_probabilities() -> None:
    net = small_policy(initial_op_bias=(0.0,) * 6)
    rows = 20_000
    states, blueprints = random_inputs(net, 1)
    masks = random_masks(1, seed=3)
    many = net.table.row_masks(masks, (1,)).expand(rows, -1, -1)
    step = net.get_action(
        states.expand(rows, -1),
        many,
        blueprints.expand(rows, -1),
        generator=torch.Generator().manual_seed(0),
    )
    probs = probabilities(step.choice_log_probs[0, -1, :NUM_OPS])
    shares = torch.bincount(step.op, minlength=NUM_OPS) / rows
    torch.testing.assert_close(shares, probs, rtol=0, atol=0.02)
    for op in LifecycleOp:
        taken = step.op == op
        if not taken.any() or op == LifecycleOp.WAIT:
            continue
        assert masks.slot_by_op[0, op][step.slot[taken]].all()


def test_every_random_action_is_legal_and_canonical() -> None:
    net = small_policy(initial_op_bias=(0.0,) * 6)
    for seed in range(10):
        masks = random_masks(200, seed=seed)
        states, blueprints = random_inputs(net, 200)
        for options in ({}, {"deterministic": True}, {"explore": False}):
            step = net.get_action(states, masks, blueprints, **options)
            check_actions(step.by_head(), masks)


def test_deterministic_takes_the_likeliest_op_then_slot() -> None:
    net = small_policy()
    masks = random_masks(40)
    states, blueprints = random_inputs(net, 40)
    one = net.get_action(states, masks, blueprints, deterministic=True)
    two = net.get_action(states, masks, blueprints, deterministic=True, explore=False)
    assert torch.equal(one.actions, two.actions)
    best = one.choice_log_probs.argmax(-1)
    causal = causal_table()[one.op]
    assert torch.equal(one.actions[causal], best[causal])


def test_one_number_per_head_decides_it() -> None:
    """Changing the draw of a head changes no other head but those that depend on it."""
    net = small_policy(initial_op_bias=(-9.0, 9.0, 0.0, 0.0, 0.0, 0.0))
    states, blueprints = random_inputs(net, 500)
    masks = random_masks(500, seed=5)
    uniforms = torch.rand(500, 8)
    other = uniforms.clone()
    style = HEAD_NAMES.index("style")
    other[:, style] = 1 - other[:, style]
    one, two = (net.get_action(states, masks, blueprints, uniforms=u) for u in (uniforms, other))
    same = torch.ones(8, dtype=torch.bool)
    same[style] = False
    assert torch.equal(one.actions[:, same], two.actions[:, same])
    assert not torch.equal(one.actions, two.actions)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    net = small_policy()
    states, blueprints = random_inputs(net, 12)
    masks = net.table.row_masks(random_masks(12), (12,))
    uniforms = torch.rand(12, 8)
    together = net.get_action(states, masks, blueprints, uniforms=uniforms)
    for row in range(12):
        at = slice(row, row + 1)
        alone = net.get_action(states[at], masks[at], blueprints[at], uniforms=uniforms[at])
        assert torch.equal(alone.actions[0], together.actions[row])


def test_a_single_state_has_no_row_axis() -> None:
    net = small_policy()
    states, blueprints = random_inputs(net, 1)
    masks = random_masks(1)
    uniforms = torch.rand(1, 8)
    batch = net.get_action(states, masks, blueprints, uniforms=uniforms)
    for form in (masks, net.table.row_masks(masks, (1,))[0]):
        one = net.get_action(states[0], form, blueprint_indices=blueprints[0], uniforms=uniforms[0])
        assert one.op.shape == ()
        assert torch.equal(one.actions, batch.actions[0])
        assert [part.shape for part in one.hidden] == [(1, 1, 32)] * 2
    timed = net.get_action(states[:, None], masks, blueprints[:, None], uniforms=uniforms)
    assert torch.equal(timed.actions, batch.actions)


def test_a_step_has_no_gradient() -> None:
    net = small_policy()
    assert not net.get_action(random_inputs(net, 2)[0]).log_probs.requires_grad


# --------------------------------------------------------------------------------------- critic


@pytest.mark.parametrize("critic", CRITICS)
def test_value_loss_leaves_the_op_head_alone(critic: str) -> None:
    net = small_policy(critic=critic)
    batch = act_step_by_step(net, rows=3, steps=6)
    scores = net.score(batch.states, batch.blueprints, batch.actions, batch.masks)
    out = net(batch.states, batch.blueprints)
    loss = scores.values.square() + scores.baseline.square() + out["value"].square()
    loss.mean().backward()
    for head in net.heads:
        for parameter in head.parameters():
            assert parameter.grad is None or (parameter.grad == 0).all()
    assert net.value_head[0].weight.grad.abs().sum() > 0
    assert net.lstm.weight_ih_l0.grad.abs().sum() > 0


def test_the_baseline_is_the_mean_over_what_is_sampled_from() -> None:
    net = small_policy()
    masks = random_masks(30)
    states, blueprints = random_inputs(net, 30)
    for explore in (True, False):
        step = net.get_action(states, masks, blueprints, explore=explore)
        probs = probabilities(step.choice_log_probs[:, -1, :NUM_OPS])
        torch.testing.assert_close(step.value, (probs * step.op_values).sum(-1))
        assert (probs[~masks.op] == 0).all()
        form = masks.map(lambda mask: mask[:, None])
        out = net(states[:, None], blueprints[:, None], masks=form, explore=explore)
        torch.testing.assert_close(out["value"][:, 0], step.value)
    assert not torch.allclose(
        net.get_action(states, masks, blueprints, explore=True).value, step.value, atol=1e-4
    )


def test_the_value_of_an_op_is_one_of_all() -> None:
    net = small_policy()
    states, blueprints = random_inputs(net, 3, 4)
    op = torch.randint(NUM_OPS, (3, 4))
    out = net(states, blueprints, op_for_value=op)
    every = net(states, blueprints)["op_values"]
    torch.testing.assert_close(out["value"], every.gather(-1, op[..., None]).squeeze(-1))
    scores = net.evaluate_actions(
        states, blueprints, forced_actions(LifecycleOp.WAIT, 3, 4), None, sampled_op=op
    )
    torch.testing.assert_close(scores.values, out["value"])


def test_the_sampled_critic_values_the_op_it_took() -> None:
    net = small_policy(critic="op_sampled")
    states, blueprints = random_inputs(net, 30)
    step = net.get_action(states, random_masks(30), blueprints)
    torch.testing.assert_close(step.value, step.op_values.gather(1, step.op[:, None]).squeeze(1))
    draws = [
        net(states[:, None], blueprints[:, None], generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0]["value"], draws[1]["value"])
    assert not torch.equal(draws[0]["value"], draws[2]["value"])


def test_the_state_critic_does_not_see_the_op() -> None:
    net = small_policy(critic="state")
    step = net.get_action(*random_inputs(net, 5)[:1])
    assert (step.op_values == step.op_values[:, :1]).all()
    torch.testing.assert_close(step.value, step.op_values[:, 0])


# --------------------------------------------------------------------------------------- prior


def test_the_sentinel_waits_moves_seeds_on_and_rarely_prunes() -> None:
    net = FactoredRecurrentActorCriticV2(lstm_hidden_dim=64)
    states, blueprints = random_inputs(net, 200, 1)
    logits = net(states, blueprints)["op_logits"].mean((0, 1))
    without_seeds = logits[[LifecycleOp.WAIT, LifecycleOp.GERMINATE]].softmax(0)
    assert without_seeds[0] > 0.8
    with_seeds = logits.softmax(0)
    assert with_seeds[LifecycleOp.PRUNE] < 0.01
    # What is begun is finished, or left alone for an epoch.
    moving_on = [LifecycleOp.ADVANCE, LifecycleOp.FOSSILIZE]
    assert with_seeds[moving_on].min() > 2 * with_seeds[LifecycleOp.WAIT]
    others = [LifecycleOp.GERMINATE, LifecycleOp.SET_ALPHA_TARGET]
    assert with_seeds[LifecycleOp.WAIT] > 5 * with_seeds[others].max()
    flat = FactoredRecurrentActorCriticV2(lstm_hidden_dim=64, initial_op_bias=(0.0,) * 6)
    probs = flat(states, blueprints)["op_logits"].softmax(-1).mean((0, 1))
    torch.testing.assert_close(probs, torch.full((6,), 1 / 6), atol=0.02, rtol=0)


# --------------------------------------------------------------------------------------- errors


def test_what_cannot_be_read_is_refused() -> None:
    net = small_policy()
    states, blueprints = random_inputs(net, 2)
    with pytest.raises(UsageError, match="reads 121 features for 3 slots, got 7"):
        net.get_action(torch.randn(2, 7), None, blueprints)
    with pytest.raises(UsageError, match=r"blueprint_indices must be int64 \[2, 3\]"):
        net.get_action(states, None, blueprints[:, :2])
    with pytest.raises(UsageError, match=r"sequences of states must be \[rows, steps, features\]"):
        net(states, blueprints)
    with pytest.raises(UsageError, match=r"hidden must be two tensors \[1, 2, 32\]"):
        net.get_action(states, None, blueprints, hidden=net.initial_hidden(3))
    actions = {head: torch.zeros(2, 1, dtype=torch.int64) for head in HEAD_NAMES[:-1]}
    with pytest.raises(UsageError, match="missing op"):
        net.score(states[:, None], blueprints[:, None], actions, None)


def test_an_empty_mask_and_a_bad_logit_are_named() -> None:
    net = small_policy()
    states, blueprints = random_inputs(net, 3)
    masks = random_masks(3)
    masks.op[1] = False
    with pytest.raises(EmptyMaskError, match="row 1, head 'op'"):
        net.get_action(states, masks, blueprints)
    states[2, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"row 2, head '\w+' has a logit"):
        net.get_action(states, random_masks(3), blueprints)
    actions = forced_actions(LifecycleOp.WAIT, 3, 1)
    with pytest.raises(NonFiniteError, match=r"row 2, step 0, head '\w+'"):
        net.score(states[:, None], blueprints[:, None], actions, None)


def test_checks_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESPER_DEBUG", raising=False)
    net = small_policy(check=False)
    states = torch.full((1, 121), torch.nan)
    net.get_action(states)
    monkeypatch.setenv("ESPER_DEBUG", "1")
    with pytest.raises(NonFiniteError):
        net.get_action(states)


def test_debugging_finds_nothing_wrong_with_good_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops that are not legal have no slot; that is no mistake."""
    monkeypatch.setenv("ESPER_DEBUG", "1")
    net = small_policy()
    batch = act_step_by_step(net, rows=8, steps=10)
    net.score(batch.states, batch.blueprints, batch.actions, batch.masks)


# -------------------------------------------------------------------------------------- compile


def test_the_step_compiles_without_graph_breaks() -> None:
    net = small_policy()
    states, blueprints = random_inputs(net, 4)
    masks = net.table.row_masks(random_masks(4), (4,))

    def step(state: Tensor, indices: Tensor, legal: Tensor, uniforms: Tensor) -> Tensor:
        with torch.no_grad():
            return net.decide(state, indices, legal, uniforms, net.initial_hidden(4))[0].actions

    inputs = (states, blueprints, masks, torch.rand(4, 8))
    # Without this flag Dynamo refuses to look at an nn.LSTM, though a step only reads its weights.
    with torch._dynamo.config.patch(allow_rnn=True):
        report = torch._dynamo.explain(step)(*inputs)
        assert report.graph_break_count == 0, report.break_reasons
        assert report.graph_count == 1
        compiled = torch.compile(step, backend="eager", fullgraph=True)
        assert torch.equal(compiled(*inputs), step(*inputs))
    torch._dynamo.reset()


def test_the_log_probs_of_a_step_are_those_of_its_masks() -> None:
    net = small_policy()
    states, blueprints = random_inputs(net, 9)
    step = net.get_action(states, random_masks(9), blueprints)
    logits = net(states[:, None], blueprints[:, None])
    for index, head in enumerate(HEAD_NAMES):
        size = net.table.sizes[head]
        wanted = masked_log_probs(
            logits[f"{head}_logits"][:, 0], step.masks[:, index, :size], net.floors[index]
        )
        torch.testing.assert_close(step.choice_log_probs[:, index, :size], wanted)
