from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.actions import HEAD_NAMES, LifecycleOp
from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import BUILTIN_KINDS, NOOP, NUM_BLUEPRINTS
from esper.tamiyo.networks import make_network
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.decision import BLUEPRINT, OP, SLOT
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.travelling import TravellingActorCritic
from esper.tamiyo.policy.distribution import probabilities
from esper.testing.controllers import check_actions
from tests.tamiyo.networks.travels import (
    act,
    see,
    shuffled_slots,
    situation,
    travelling,
    with_slots,
)


def test_the_configuration_says_which_network_it_is() -> None:
    config = PolicyConfig(lstm_hidden_dim=16, layout="travelling")
    assert type(make_network(config, BUILTIN_KINDS)).__name__ == "TravellingActorCritic"
    plain = make_network(config.replace(layout="documents"), BUILTIN_KINDS)
    assert isinstance(plain, FactoredRecurrentActorCriticV2)
    with pytest.raises(UsageError, match=f"{NUM_BLUEPRINTS} blueprints need as many kinds"):
        make_network(config, BUILTIN_KINDS[:5])


def test_weights_count_neither_slots_nor_blueprints() -> None:
    net = travelling()
    weights = {name: tuple(weight.shape) for name, weight in net.state_dict().items()}
    assert set(weights) == {name for name, _ in net.named_parameters()}
    for slots, kinds in ((1, BUILTIN_KINDS), (16, (*BUILTIN_KINDS, "other", "mlp"))):
        other = travelling(slots, kinds)
        assert {name: tuple(each.shape) for name, each in other.state_dict().items()} == weights


@pytest.mark.parametrize("slots", [1, 2, 5, 16])
def test_every_number_of_slots_is_served(slots: int) -> None:
    net = with_slots(travelling(), slots)
    signals, masks = situation(20, slots)
    state, blueprints = see(net, signals)
    check_actions(net.get_action(state, masks, blueprints).by_head(), masks)


# --------------------------------------------------------------- what is sampled is what is scored


@pytest.mark.parametrize("critic", ["op_marginal", "op_sampled", "op_soft", "state"])
@pytest.mark.parametrize("layers", [1, 2])
def test_acting_equals_scoring(critic: str, layers: int) -> None:
    net = travelling(critic=critic, lstm_layers=layers, initial_op_bias=(0.0,) * 6)
    lived = act(net, rows=30)
    scores = net.score(lived.states, lived.blueprints, lived.actions, lived.masks)
    torch.testing.assert_close(scores.log_probs, lived.log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.baseline, lived.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.hidden, lived.hidden, rtol=0, atol=1e-5)
    taken = set(lived.actions[..., OP].flatten().tolist())
    assert taken == {int(op) for op in LifecycleOp}, "every op is put to the test"


def test_without_floors_too() -> None:
    net = travelling(initial_op_bias=(0.0,) * 6)
    lived = act(net, explore=False)
    inputs = (lived.states, lived.blueprints, lived.actions, lived.masks)
    scores = net.score(*inputs, explore=False)
    torch.testing.assert_close(scores.log_probs, lived.log_probs, rtol=0, atol=1e-5)
    assert not torch.allclose(net.score(*inputs).log_probs, lived.log_probs, atol=1e-5)


@pytest.mark.parametrize("op", [op for op in LifecycleOp if op is not LifecycleOp.WAIT])
def test_every_condition_is_scored_as_it_is_drawn(op: LifecycleOp) -> None:
    """The rows of the table that an op and a slot select are the logits that are scored."""
    net = travelling()
    signals, _ = situation(5)
    state, blueprints = see(net, signals)
    with torch.no_grad():
        every, _, _ = net.respond(state, blueprints, net.initial_hidden(5))
        rows = net.table.row_logits(every)
        for slot in range(3):
            taken = torch.zeros(5, len(HEAD_NAMES), dtype=torch.int64)
            taken[:, OP], taken[:, SLOT] = int(op), slot
            selected = net.table.select(rows, net.table.rows_of(taken[:, OP], taken[:, SLOT]))
            memory, context, _ = net.remember(state[:, None], blueprints[:, None], None, None)
            scored = net.taken_logits(memory, context, taken[None])[0]
            for index, head in enumerate(HEAD_NAMES):
                if head == "blueprint" and op is not LifecycleOp.GERMINATE:
                    continue
                size = net.table.sizes[head]
                torch.testing.assert_close(selected[:, index, :size], scored[:, index, :size])


def test_frequencies_follow_the_scored_probabilities() -> None:
    net = travelling(initial_op_bias=(0.0, 3.0, 0.0, 0.0, 0.0, 0.0))
    signals, _ = situation(1, seed=3)
    state, blueprints = see(net, signals)
    many, draws = 20_000, torch.Generator().manual_seed(1)
    step = net.get_action(
        state.expand(many, -1), None, blueprints.expand(many, -1), generator=draws
    )
    germinates = step.op == int(LifecycleOp.GERMINATE)
    assert int(germinates.sum()) > 1000
    for slot in range(3):
        here = germinates & (step.slot == slot)
        if int(here.sum()) < 500:
            continue
        found = torch.bincount(step.blueprint_idx[here], minlength=NUM_BLUEPRINTS) / here.sum()
        told = probabilities(step.choice_log_probs[here][0, BLUEPRINT])[:NUM_BLUEPRINTS]
        torch.testing.assert_close(found, told, rtol=0, atol=0.03)


def test_masks_floors_and_entropies_are_kept() -> None:
    net = travelling(initial_op_bias=(0.0,) * 6)
    for seed in range(10):
        signals, masks = situation(40, seed=seed)
        state, blueprints = see(net, signals)
        step = net.get_action(state, masks, blueprints)
        check_actions(step.by_head(), masks)
        germinates = step.op == int(LifecycleOp.GERMINATE)
        assert bool((step.blueprint_idx[~germinates] == NOOP).all())
        chances = probabilities(step.choice_log_probs)
        assert not chances[~step.masks].any()
        legal = step.masks.sum(-1, keepdim=True)
        least = torch.minimum(net.floors[:, None], 0.5 / legal)
        assert bool((chances >= least - 1e-6)[step.masks].all())
    lived = act(net)
    scores = net.score(lived.states, lived.blueprints, lived.actions, lived.masks)
    assert bool(((scores.entropies >= 0) & (scores.entropies <= 1 + 1e-6)).all())


# --------------------------------------------------------------------------- slots and blueprints


def test_slots_that_are_absent_change_nothing() -> None:
    net, rows = travelling(), 12
    signals, masks = situation(rows)
    wide, wide_masks = shuffled_slots(signals, [0, 1, 2, -1, -1], masks)
    few = see(net, signals)
    for other in (see(with_slots(net, 5), wide), see(with_slots(net, 5), signals)):
        larger = with_slots(net, 5)
        draws = torch.rand(rows, 8)
        one = net.get_action(few[0], masks, few[1], uniforms=draws)
        two = larger.get_action(other[0], wide_masks, other[1], uniforms=draws)
        assert torch.equal(one.actions, two.actions)
        torch.testing.assert_close(one.log_probs, two.log_probs)
        torch.testing.assert_close(one.op_values, two.op_values)
        torch.testing.assert_close(one.hidden, two.hidden)


def test_absent_slots_may_lie_anywhere() -> None:
    """Only the order of the slots that are there means anything."""
    net = with_slots(travelling(), 6)
    signals, masks = situation(12)
    first, first_masks = shuffled_slots(signals, [0, 1, 2, -1, -1, -1], masks)
    second, second_masks = shuffled_slots(signals, [-1, 0, -1, 1, -1, 2], masks)
    moved = torch.tensor([1, 3, 5, 0, 2, 4])
    one = net.get_action(*_asked(net, first, first_masks), deterministic=True)
    two = net.get_action(*_asked(net, second, second_masks), deterministic=True)
    acts = one.op != int(LifecycleOp.WAIT)
    assert bool(acts.any())
    assert torch.equal(one.op, two.op)
    assert torch.equal(moved[one.slot][acts], two.slot[acts])
    assert torch.equal(one.actions[:, BLUEPRINT:], two.actions[:, BLUEPRINT:])
    torch.testing.assert_close(one.op_values, two.op_values)


def test_the_blueprint_depends_on_the_slot() -> None:
    net = travelling()
    signals, _ = situation(6)
    state, blueprints = see(net, signals)
    with torch.no_grad():
        features, context = net.read(state, blueprints)
        by_slot = net.blueprint_head(features, context.encoded, net._describe(context.pairs))
    both = signals.enabled[:, 0] & signals.enabled[:, 1]
    assert not torch.allclose(by_slot[both, 0], by_slot[both, 1], atol=1e-3)


def test_slots_are_pointed_at_for_every_op_anew() -> None:
    net = travelling()
    signals, _ = situation(6)
    state, blueprints = see(net, signals)
    with torch.no_grad():
        every, _, _ = net.respond(state, blueprints, net.initial_hidden(6))
    by_op = net.table.row_logits(every)[:, :6, :3]
    spread = by_op - by_op.mean(-1, keepdim=True)
    assert not torch.allclose(spread[:, LifecycleOp.PRUNE], spread[:, LifecycleOp.FOSSILIZE])


def test_a_blueprint_is_its_kind_and_its_cost() -> None:
    """Two blueprints of one kind and one cost are one; a stranger is what it says it is."""
    net = travelling(kinds=(*BUILTIN_KINDS, "convolution", "other"))
    layout = net.config.observation
    signals, _ = situation(4)
    alike, other, pad = 1, 14, {"seed_params": 10, "seed_flops": 10}
    wider = {name: F.pad(getattr(signals, name), (0, 2), value=pad[name]) for name in pad}
    for name in wider:
        wider[name][..., NUM_BLUEPRINTS] = wider[name][..., alike]
    state, blueprints = layout.observe(
        type(signals)(
            **{name: wider.get(name, getattr(signals, name)) for name in signals.__slots__}
        )
    )
    with torch.no_grad():
        features, context = net.read(state, blueprints)
        scores = net.blueprint_head(features, context.encoded, net._describe(context.pairs))
    assert torch.equal(scores[..., alike], scores[..., NUM_BLUEPRINTS])
    assert not torch.allclose(scores[..., other], scores[..., NUM_BLUEPRINTS])


# ----------------------------------------------------------------------------------------- learning


def test_every_weight_takes_part_in_the_loss() -> None:
    net = travelling(initial_op_bias=(0.0,) * 6)
    lived = act(net)
    scores = net.score(lived.states, lived.blueprints, lived.actions, lived.masks)
    (scores.log_probs.sum() + scores.values.sum() + scores.entropies.sum()).backward()
    # These two shift the scores of all choices alike, which changes no probability.
    idle = {"slot_head.out.1.bias", "blueprint_head.out.3.bias"}
    for name, weight in net.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.abs().max() > 1e-3) != (name in idle), name


def test_the_value_loss_leaves_the_heads_alone() -> None:
    net = travelling()
    lived = act(net)
    net.score(lived.states, lived.blueprints, lived.actions, lived.masks).baseline.sum().backward()
    for name, weight in net.named_parameters():
        is_head = name.split(".")[0] in {f"{head}_head" for head in HEAD_NAMES}
        assert not (is_head and weight.grad is not None and bool(weight.grad.any())), name


def test_idle_heads_answer_for_the_likeliest_germination() -> None:
    """Exploration needs the heads of steps that waited: as they would be used next."""
    net = travelling()
    signals, _ = situation(8)
    state, blueprints = see(net, signals)
    waits = torch.zeros(8, 1, 8, dtype=torch.int64)
    memory, context, _ = net.remember(state[:, None], blueprints[:, None], None, None)
    idle = net.taken_logits(memory, context, waits.transpose(0, 1))[0]
    free = signals.enabled & ~signals.occupied
    some = free.any(1)
    assert bool(some.any())
    by_op = net.slot_head(memory, context.encoded)[0]
    place = torch.where(free, by_op[..., LifecycleOp.GERMINATE], -torch.inf).argmax(-1)
    taken = waits.clone()
    taken[..., OP], taken[..., SLOT] = int(LifecycleOp.GERMINATE), place[:, None]
    used = net.taken_logits(memory, context, taken.transpose(0, 1))[0]
    torch.testing.assert_close(idle[some], used[some])


def test_the_sentinel_waits_until_it_has_learned() -> None:
    net = travelling(policy_gain=0.01, initial_op_bias=PolicyConfig().initial_op_bias)
    signals, masks = situation(400)
    step = net.get_action(see(net, signals)[0], masks, see(net, signals)[1])
    alone = masks.op.clone()
    alone[:, [0, 1]] = False
    only = masks.op[:, 1] & ~alone.any(1)
    chances = probabilities(step.choice_log_probs[only, OP])[:, 0]
    assert float(chances.mean()) == pytest.approx(0.87, abs=0.03)


def test_a_bad_logit_is_named_by_its_head() -> None:
    net = travelling()
    with torch.no_grad():
        net.tempo_head.out[-1].bias.fill_(torch.nan)
    signals, masks = situation(4)
    state, blueprints = see(net, signals)
    with pytest.raises(NonFiniteError, match="head 'tempo'"):
        net.get_action(state, masks, blueprints)


def _asked(
    net: TravellingActorCritic, signals: Signals, masks: Masks
) -> tuple[Tensor, Masks, Tensor]:
    state, blueprints = see(net, signals)
    return state, masks, blueprints
