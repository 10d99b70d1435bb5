"""The learned policy as a controller."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from esper.leyline.actions import CAUSAL_HEADS, HEAD_NAMES, LifecycleOp
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import UsageError
from esper.leyline.reasons import Why
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import BUILTIN_BLUEPRINTS, BUILTIN_KINDS, NUM_BLUEPRINTS
from esper.tamiyo.controllers.learned import LearnedController, follow_urges, looks_at
from esper.tamiyo.controllers.policy_file import Policy, new_policy
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.layers import clear_rows
from esper.testing.controllers import check_actions, check_controller, random_signals
from esper.utils.randomness import generator
from tests.tamiyo.controllers.scenes import CONTEXT, Scene, Slot, join_rows, take_rows

LIVELY = PolicyConfig(lstm_hidden_dim=32, num_slots=8, policy_gain=1.0, initial_op_bias=(0.0,) * 6)


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A policy whose heads are far from uniform and that acts often."""
    policy = new_policy(LIVELY, seed=5)
    situations = torch.rand(100, LIVELY.observation_dim)
    policy.normalizer.update(situations)
    return policy


def situation(rows: int, slots: int = 3, seed: int = 0) -> tuple[Signals, Masks]:
    return random_signals(rows, slots, torch.Generator().manual_seed(seed))


def context(slots: int = 3, **changes: object) -> ControllerContext:
    names = tuple(f"r0c{slot}" for slot in range(slots))
    return replace(ControllerContext(slot_names=names), **changes)


# ---------------------------------------------------------------------------------------- protocol


@pytest.mark.parametrize("greedy", [False, True])
def test_battery(policy: Policy, greedy: bool) -> None:
    check_controller(lambda context: LearnedController(policy, context, greedy=greedy))


@pytest.mark.parametrize("slots", [1, 2, 5, 8])
def test_battery_with_one_slot_and_many(policy: Policy, slots: int) -> None:
    check_controller(lambda context: LearnedController(policy, context), slots=slots, steps=15)


def test_battery_while_exploring(policy: Policy) -> None:
    check_controller(lambda context: LearnedController(policy, context, explore=True), steps=15)


def test_a_row_acts_the_same_whatever_the_number_of_rows(policy: Policy) -> None:
    many, one = (LearnedController(policy, CONTEXT) for _ in range(2))
    many.reset(3, "cpu")
    one.reset(1, "cpu")
    for seed in range(20):
        signals, masks = situation(1, seed=seed)
        others = [situation(1, seed=100 + seed + at) for at in range(2)]
        together = many.act(
            join_rows([signals, *(each for each, _ in others)]),
            join_rows([masks, *(each for _, each in others)]),
        )
        alone = one.act(signals, masks)
        for head in HEAD_NAMES:
            assert int(together[head][0]) == int(alone[head][0])


def test_draws_are_those_of_the_stream_for_seed_row_and_step(policy: Policy) -> None:
    controller = LearnedController(policy, context(seed=11))
    controller.reset(2, "cpu")
    hidden = policy.network.initial_hidden(2)
    for step in range(4):
        signals, masks = situation(2, seed=step)
        taken = controller.act(signals, masks)
        observation, blueprints = policy.layout.observe(signals)
        streams = [generator(11, row, step, "policy") for row in range(2)]
        expected = policy.network.get_action(
            policy.normalizer.normalize(observation),
            masks,
            blueprints,
            clear_rows(hidden, signals.rolled_back),
            explore=False,
            uniforms=torch.stack(
                [torch.rand(8, generator=stream, dtype=torch.float64) for stream in streams]
            ),
        )
        hidden = expected.hidden
        assert torch.equal(torch.stack([*taken.values()], dim=-1), expected.actions)


def test_seeds_differ_and_greedy_does_not_draw(policy: Policy) -> None:
    def ops(seed: int, greedy: bool) -> list[int]:
        controller = LearnedController(policy, context(seed=seed), greedy=greedy)
        controller.reset(40, "cpu")
        taken = [controller.act(*situation(40, seed=at))["op"] for at in range(3)]
        return torch.cat(taken).tolist()

    assert ops(1, False) == ops(1, False)
    assert ops(1, False) != ops(2, False)
    assert ops(1, True) == ops(2, True)


def test_chances_that_last_are_acted_on_and_small_ones_never_are() -> None:
    legal = torch.tensor([[True, True, False, True, False, False]] * 3)
    chances = torch.tensor(
        [
            [0.6, 0.4, 0.0, 0.0, 0.0, 0.0],
            [0.98, 0.01, 0.0, 0.01, 0.0, 0.0],
            [0.2, 0.2, 0.0, 0.6, 0.0, 0.0],
        ]
    )
    urges, taken = torch.zeros(3, 6), []
    for _ in range(60):
        op, urges = follow_urges(urges, chances, legal)
        taken.append(op.tolist())
    first, never, both = zip(*taken, strict=True)
    assert first[:4] == (LifecycleOp.WAIT, LifecycleOp.GERMINATE) * 2
    assert set(never) == {LifecycleOp.WAIT}
    # The likelier op does not keep the other from its turn.
    assert both[0] == LifecycleOp.PRUNE
    assert 5 < both.count(LifecycleOp.GERMINATE) < both.count(LifecycleOp.PRUNE)


def test_an_urge_ends_with_what_it_was_about() -> None:
    legal = torch.ones(1, 6, dtype=torch.bool)
    chances = torch.tensor([[0.6, 0.4, 0.0, 0.0, 0.0, 0.0]])
    _, urges = follow_urges(torch.zeros(1, 6), chances, legal)
    legal[0, LifecycleOp.GERMINATE] = False
    _, urges = follow_urges(urges, chances * legal, legal)
    legal[0, LifecycleOp.GERMINATE] = True
    op, _ = follow_urges(urges, chances, legal)
    assert op.tolist() == [LifecycleOp.WAIT]


def test_a_greedy_decision_is_whole_and_goes_on_where_it_was(policy: Policy) -> None:
    controller = LearnedController(policy, CONTEXT, greedy=True)
    signals, masks = situation(8)
    controller.reset(8, "cpu")
    likeliest = policy.network.get_action(
        policy.normalizer.normalize(policy.layout.observe(signals)[0]),
        masks,
        policy.layout.observe(signals)[1],
        deterministic=True,
        explore=False,
    )
    with_urges = []
    for _ in range(12):
        actions = controller.act(signals, masks)
        check_actions(actions, masks)
        with_urges.append(actions["op"])
        again = LearnedController(policy, CONTEXT, greedy=True)
        again.load_state_dict(controller.state_dict())
    assert not all(torch.equal(op, likeliest.op) for op in with_urges)
    assert torch.equal(controller.act(signals, masks)["op"], again.act(signals, masks)["op"])
    told = controller.explain(0)
    assert sum(told.probabilities["op"].values()) == pytest.approx(1.0)
    assert max(told.probabilities["op"].values()) < 1.0


def test_memory_matters_and_a_rollback_clears_it(policy: Policy) -> None:
    controller = LearnedController(policy, CONTEXT, greedy=True)
    signals, masks = situation(2)
    calm = replace(signals, rolled_back=torch.tensor([False, False]))
    struck = replace(signals, rolled_back=torch.tensor([True, False]))
    controller.reset(2, "cpu")
    controller.act(calm, masks)
    first = controller.state_dict()
    controller.act(calm, masks)
    second = controller.state_dict()
    assert not torch.equal(first["state"], second["state"])
    controller.load_state_dict(first)
    controller.act(struck, masks)
    after = controller.state_dict()
    torch.testing.assert_close(after["state"][:, 0], first["state"][:, 0])
    torch.testing.assert_close(after["state"][:, 1], second["state"][:, 1])


def test_acting_learns_nothing(policy: Policy) -> None:
    before = {name: value.clone() for name, value in policy.network.state_dict().items()}
    mean = policy.normalizer.mean.clone()
    controller = LearnedController(policy, CONTEXT)
    controller.reset(4, "cpu")
    actions = controller.act(*situation(4))
    assert not any(values.requires_grad for values in actions.values())
    assert torch.equal(policy.normalizer.mean, mean)
    now = policy.network.state_dict()
    assert all(torch.equal(now[name], before[name]) for name in before)


def test_reset_comes_first_and_rows_must_agree(policy: Policy) -> None:
    controller = LearnedController(policy, CONTEXT)
    assert controller.state_dict() == {"step": 0, "state": None, "cell": None, "urges": None}
    with pytest.raises(UsageError, match=r"reset for 0 rows but is shown 2; call reset\(2"):
        controller.act(*situation(2))
    controller.reset(3, "cpu")
    with pytest.raises(UsageError, match="reset for 3 rows but is shown 2"):
        controller.act(*situation(2))
    controller.load_state_dict({"step": 4, "state": None, "cell": None})
    assert controller.state_dict()["step"] == 4


# ------------------------------------------------------------------------- slots and blueprints


def test_more_slots_than_it_serves_are_refused() -> None:
    small = new_policy(PolicyConfig(lstm_hidden_dim=16, num_slots=2))
    with pytest.raises(UsageError, match="serves 2 slots, and the network has 3"):
        LearnedController(small, CONTEXT)


def with_stranger(masks: Masks, *, alone: bool = False) -> Masks:
    """Return masks of a host that has one more blueprint, which fits everywhere."""
    fits = masks.blueprint_by_slot & (not alone)
    stranger = torch.ones_like(fits[..., :1])
    return replace(masks, blueprint_by_slot=torch.cat([fits, stranger], dim=-1))


def showing_stranger(signals: Signals) -> Signals:
    """Return signals of a host that has one more blueprint."""
    wider = {
        name: F.pad(getattr(signals, name), (0, 1), value=7)
        for name in ("seed_params", "seed_flops")
    }
    return replace(signals, **wider)


@pytest.mark.parametrize("told", [(), ("hyper_conv",)])
def test_a_blueprint_installed_later_changes_nothing_a_policy_does(
    policy: Policy, told: tuple[str, ...]
) -> None:
    """Whether or not the controller was told of it when it was made."""
    names = (*BUILTIN_BLUEPRINTS, *told)
    before = LearnedController(policy, context(), greedy=True)
    after = LearnedController(policy, context(blueprint_names=names), greedy=True)
    for controller in (before, after):
        controller.reset(60, "cpu")
    germinated = 0
    for seed in range(10):
        signals, masks = situation(60, seed=seed)
        mine = before.act(signals, masks)
        theirs = after.act(showing_stranger(signals), with_stranger(masks))
        for head in HEAD_NAMES:
            assert torch.equal(mine[head], theirs[head])
        germinated += int((theirs["op"] == LifecycleOp.GERMINATE).sum())
    assert germinated > 0


def test_where_only_strangers_fit_a_policy_does_not_germinate(policy: Policy) -> None:
    names = (*BUILTIN_BLUEPRINTS, "hyper_conv")
    controller = LearnedController(policy, context(blueprint_names=names))
    controller.reset(60, "cpu")
    for seed in range(5):
        signals, masks = situation(60, seed=seed)
        # A seed of another controller may be one it does not know.
        signals = showing_stranger(signals)
        signals = replace(signals, blueprint=torch.where(signals.blueprint > 0, 13, -1))
        actions = controller.act(signals, with_stranger(masks, alone=True))
        assert not bool((actions["op"] == LifecycleOp.GERMINATE).any())


def test_fewer_blueprints_than_it_knows_are_fine() -> None:
    wide = new_policy(LIVELY.replace(num_blueprints=14), blueprint_names=(*BUILTIN_BLUEPRINTS, "x"))
    check_controller(lambda context: LearnedController(wide, context), steps=15)


def test_blueprints_are_matched_by_name_not_by_number() -> None:
    """A policy trained with another order of names decides the same, name for name."""
    own = new_policy(LIVELY, seed=2)
    order = [0, *range(12, 0, -1)]
    names = tuple(BUILTIN_BLUEPRINTS[index] for index in order)
    shuffled = new_policy(LIVELY, blueprint_names=names, seed=2)
    with torch.no_grad():
        table = shuffled.network.blueprint_embedding.embedding.weight
        table[:NUM_BLUEPRINTS] = own.network.blueprint_embedding.embedding.weight[order]
        for name in ("weight", "bias"):
            theirs = getattr(shuffled.network.blueprint_head[-1], name)
            theirs.copy_(getattr(own.network.blueprint_head[-1], name)[order])
    one = LearnedController(own, context(), greedy=True)
    two = LearnedController(shuffled, context(), greedy=True)
    germinated = 0
    for controller in (one, two):
        controller.reset(60, "cpu")
    for seed in range(10):
        signals, masks = situation(60, seed=seed)
        mine, theirs = one.act(signals, masks), two.act(signals, masks)
        check_actions(theirs, masks)
        for head in HEAD_NAMES:
            assert torch.equal(mine[head], theirs[head])
        germinated += int((mine["op"] == LifecycleOp.GERMINATE).sum())
    assert germinated > 0


# ------------------------------------------------------------------------------------- explain


def test_an_explanation_is_complete(policy: Policy) -> None:
    controller = LearnedController(policy, CONTEXT)
    controller.reset(6, "cpu")
    signals, masks = situation(6)
    actions = controller.act(signals, masks)
    for row in range(6):
        explanation = controller.explain(row)
        assert explanation.op == LifecycleOp(int(actions["op"][row])).name
        assert tuple(explanation.probabilities) == HEAD_NAMES
        for head, chances in explanation.probabilities.items():
            assert sum(chances.values()) == pytest.approx(1.0, abs=1e-5), head
        assert set(explanation.probabilities["slot"]) == set(CONTEXT.slot_names)
        assert set(explanation.probabilities["blueprint"]) == set(BUILTIN_BLUEPRINTS)
        for op in LifecycleOp:
            if not masks.op[row, op]:
                assert explanation.probabilities["op"][op.name] == 0.0
        assert set(explanation.values) == {op.name for op in LifecycleOp}
        assert len(explanation.contributors) == 3
        strengths = [abs(each.influence) for each in explanation.contributors]
        assert strengths == sorted(strengths, reverse=True)
        assert strengths[0] > 0
        used = [head for head in CAUSAL_HEADS[LifecycleOp[explanation.op]] if head != "op"]
        assert list(explanation.choices) == used
        for head, choice in explanation.choices.items():
            assert explanation.probabilities[head][choice] > 0
        assert len(explanation.lines()) == 3 + bool(used)
        assert explanation.to_mapping()["contributors"][0]["feature"]


def test_contributors_are_measured_by_leaving_them_out(policy: Policy) -> None:
    controller = LearnedController(policy, CONTEXT, greedy=True)
    controller.reset(1, "cpu")
    for seed in range(40):
        signals, masks = situation(1, seed=seed)
        controller.act(signals, masks)
        explanation = controller.explain()
        if explanation.measured_on == "op":
            break
    assert explanation.measured_on == "op"
    strongest = explanation.contributors[0]
    last = controller._last
    assert last is not None
    observation, blueprints = last.observation.clone(), last.blueprints.clone()
    if strongest.feature.endswith(".blueprint"):
        slot = CONTEXT.slot_names.index(strongest.feature.removesuffix(".blueprint"))
        blueprints[0, slot] = -1
    else:
        labels = policy.layout.labels(CONTEXT.slot_names, BUILTIN_BLUEPRINTS)
        index = labels.index(strongest.feature)
        assert strongest.value == pytest.approx(float(last.raw[0, index]))
        observation[0, index] = 0.0
    without = policy.network.get_action(
        observation, masks, blueprints, last.hidden, deterministic=True, explore=False
    )
    op = LifecycleOp[explanation.op]
    gone = without.choice_log_probs[0, -1, op]
    here = last.step.choice_log_probs[0, -1, op]
    assert strongest.influence == pytest.approx(float(here - gone), abs=1e-4)


def test_a_forced_decision_is_explained_by_its_value(policy: Policy) -> None:
    scene = Scene(slots=[Slot()], fitting=("none",))
    controller = LearnedController(policy, context(1))
    controller.reset(1, "cpu")
    controller.act(scene.signals(), scene.masks())
    explanation = controller.explain()
    assert explanation.op == "WAIT"
    assert explanation.probabilities["op"]["WAIT"] == pytest.approx(1.0)
    assert explanation.measured_on == "value"
    assert len(explanation.contributors) == 3


def test_a_critic_of_states_has_one_value() -> None:
    plain = new_policy(LIVELY.replace(critic="state"))
    controller = LearnedController(plain, CONTEXT)
    controller.reset(1, "cpu")
    controller.act(*situation(1))
    explanation = controller.explain()
    assert explanation.values == {}
    assert f"values: {explanation.value:+.2f}" in explanation.lines()


def test_explaining_changes_nothing(policy: Policy) -> None:
    one, two = (LearnedController(policy, CONTEXT) for _ in range(2))
    one.reset(2, "cpu")
    two.reset(2, "cpu")
    for seed in range(5):
        signals, masks = situation(2, seed=seed)
        mine, theirs = one.act(signals, masks), two.act(signals, masks)
        assert all(torch.equal(mine[head], theirs[head]) for head in HEAD_NAMES)
        one.explain(1)
    assert torch.equal(one.state_dict()["cell"], two.state_dict()["cell"])


@pytest.mark.parametrize("greedy", [False, True])
def test_a_wait_that_was_a_choice_has_a_reason(policy: Policy, greedy: bool) -> None:
    controller = LearnedController(policy, context(), greedy=greedy)
    assert controller.reasons() == ()
    controller.reset(40, "cpu")
    signals, masks = situation(40)
    waited = controller.act(signals, masks)["op"] == LifecycleOp.WAIT
    free = masks.op[:, LifecycleOp.GERMINATE]
    assert 0 < int((waited & free).sum()) < int(waited.sum()) < 40
    told = list(controller.reasons())
    assert [bool(each) for each in told] == (waited & free).tolist()
    figures = re.compile(
        re.escape(f"{Why.LEARNED} (chance of germinating ")
        + r"\d+ %, (validation loss (falls by|rises by|stands still).*, )?\d+ epochs? left\)"
    )
    assert all(figures.fullmatch(each) for each in told if each)


def test_a_run_much_shorter_than_those_it_learned_in_is_a_reason_of_its_own(policy: Policy) -> None:
    signals, masks = situation(40)
    signals = replace(signals, max_epochs=torch.tensor([11, 12] * 20))
    controller = LearnedController(replace(policy, horizon=40), context())
    controller.reset(40, "cpu")
    waited = controller.act(signals, masks)["op"] == LifecycleOp.WAIT
    free = (waited & masks.op[:, LifecycleOp.GERMINATE]).tolist()
    both = [f"{Why.SHORT_RUN} (11 epochs instead of 40 or more)", Why.LEARNED] * 20
    for told, why, each in zip(controller.reasons(), both, free, strict=True):
        assert told.startswith(why) if each else not told
    assert any(free[::2])
    assert any(free[1::2])


def test_in_short_runs_it_looks_more_often_than_it_acts(policy: Policy) -> None:
    assert [looks_at(torch.tensor([3, epochs]), 40) for epochs in (5, 10, 13, 14, 20, 60)] == [
        *(4, 2, 2, 1, 1, 1)
    ]
    assert looks_at(torch.tensor([5]), 0) == 1, "nobody knows what it learned in"
    signals, masks = situation(4)
    short = replace(signals, max_epochs=torch.full((4,), 10))
    calm, hasty = (LearnedController(replace(policy, horizon=h), context()) for h in (0, 40))
    for controller in (calm, hasty):
        controller.reset(4, "cpu")
    calm.act(short, masks)
    calm.act(short, masks)
    hasty.act(short, masks)
    twice, once = calm.state_dict(), hasty.state_dict()
    torch.testing.assert_close(once["state"], twice["state"])
    assert not hasty.act(short, masks)["tempo"].any(), "the fastest tempo"
    assert (once["step"], twice["step"]) == (1, 2)
    assert calm.act(signals, masks)["tempo"].any()


def test_what_cannot_be_explained(policy: Policy) -> None:
    controller = LearnedController(policy, CONTEXT)
    controller.reset(2, "cpu")
    with pytest.raises(UsageError, match="no decision to explain yet"):
        controller.explain()
    signals, masks = situation(2)
    controller.act(signals, masks)
    with pytest.raises(UsageError, match="row must be 0 to 1, got 2"):
        controller.explain(2)
    controller.load_state_dict(controller.state_dict())
    with pytest.raises(UsageError, match="no decision"):
        controller.explain()
    assert take_rows(signals, slice(0, 1)).rows == 1


@pytest.mark.gpu
def test_battery_of_a_policy_on_the_device(policy: Policy) -> None:
    cpu, gpu = (LearnedController(policy, CONTEXT, greedy=True) for _ in range(2))
    taken = []
    for controller, device in ((cpu, "cpu"), (gpu, "cuda")):
        controller.reset(8, device)
        for seed in range(5):
            signals, masks = situation(8, seed=seed)
            here = Masks(
                **{name: getattr(masks, name).to(device) for name in Masks.__dataclass_fields__}
            )
            actions = controller.act(signals.to(device), here)
            taken.append({head: values.cpu() for head, values in actions.items()})
            check_actions(taken[-1], masks)
        assert controller.explain().contributors
    policy.network.cpu()
    policy.normalizer.cpu()


# --------------------------------------------------------------------------------------- travelling


@pytest.fixture(scope="module")
def traveller() -> Policy:
    """A travelling policy, laid out for three slots, whose heads are far from uniform."""
    config = LIVELY.replace(layout="travelling", num_slots=3, slot_width=16)
    policy = new_policy(config, seed=5)
    policy.normalizer.update(policy.layout.observe(situation(100)[0])[0])
    return policy


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_a_traveller_passes_the_battery_on_any_host(traveller: Policy, slots: int) -> None:
    check_controller(lambda context: LearnedController(traveller, context), slots=slots, steps=10)


def test_a_traveller_takes_a_stranger_for_its_kind_and_cost(traveller: Policy) -> None:
    names = (*BUILTIN_BLUEPRINTS, "hyper_conv")
    place = context(blueprint_names=names, blueprint_kinds=(*BUILTIN_KINDS, "convolution"))
    controller = LearnedController(traveller, place)
    controller.reset(200, "cpu")
    chosen = []
    for seed in range(4):
        signals, masks = situation(200, seed=seed)
        fits = F.pad(masks.blueprint_by_slot, (0, 1), value=True)
        costs = {
            name: F.pad(getattr(signals, name), (0, 1), value=100)
            for name in ("seed_params", "seed_flops")
        }
        masks = replace(masks, blueprint_by_slot=fits)
        actions = controller.act(replace(signals, **costs), masks)
        check_actions(actions, masks)
        chosen.append(actions["blueprint"])
    assert len(names) - 1 in torch.cat(chosen).tolist()


def test_a_traveller_leaves_out_copies_that_it_has_not_learned_with(traveller: Policy) -> None:
    names = (*BUILTIN_BLUEPRINTS, "kin", "hyper_conv")
    kinds = (*BUILTIN_KINDS, "other", "convolution")
    place = context(blueprint_names=names, blueprint_kinds=kinds, copies=("kin",))
    assert traveller.fitted(place).blueprint_names == (*BUILTIN_BLUEPRINTS, "hyper_conv")
    controller = LearnedController(traveller, place)
    controller.reset(200, "cpu")
    chosen = []
    for seed in range(4):
        signals, masks = situation(200, seed=seed)
        fits = F.pad(masks.blueprint_by_slot, (0, 2), value=True)
        masks = replace(masks, blueprint_by_slot=fits)
        actions = controller.act(showing_stranger(showing_stranger(signals)), masks)
        check_actions(actions, masks)
        chosen += actions["blueprint"][actions["op"] == LifecycleOp.GERMINATE].tolist()
    assert names.index("kin") not in chosen
    assert names.index("hyper_conv") in chosen
    learned = traveller.fitted(replace(place, copies=()))
    assert learned.fitted(place).blueprint_names == names


def test_a_traveller_says_why(traveller: Policy) -> None:
    controller = LearnedController(traveller, context(2), greedy=True)
    controller.reset(3, "cpu")
    controller.act(*situation(3, 2))
    told = controller.explain(1)
    labels = traveller.fitted(context(2)).layout.labels(("r0c0", "r0c1"), BUILTIN_BLUEPRINTS)
    slots = {"r0c0.blueprint", "r0c1.blueprint"}
    assert all(each.feature in {*labels, *slots} for each in told.contributors)
    assert set(told.probabilities["slot"]) == {"r0c0", "r0c1"}
    assert len(told.lines()) >= 3


# ---------------------------------------------------------------------------- losses not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_row_whose_loss_is_not_finite_waits_and_the_others_do_not_notice(
    policy: Policy, traveller: Policy, value: float, greedy: bool
) -> None:
    for one in (policy, traveller):
        calm, struck = (LearnedController(one, CONTEXT, greedy=greedy) for _ in range(2))
        calm.reset(3, "cpu")
        struck.reset(3, "cpu")
        for seed in range(6):
            signals, masks = situation(3, seed=seed)
            signals = replace(signals, rolled_back=torch.zeros(3, dtype=torch.bool))
            spoiled = signals
            if seed == 3:
                loss, history = signals.val_loss.clone(), signals.loss_history.clone()
                loss[1] = history[1, -1] = value
                spoiled = replace(signals, val_loss=loss, val_score=-loss, loss_history=history)
                signals = replace(signals, val_score=-signals.val_loss)
                before = struck.state_dict()
            expected, found = calm.act(signals, masks), struck.act(spoiled, masks)
            check_actions(found, masks)
            for head in HEAD_NAMES:
                assert torch.equal(found[head][[0, 2]], expected[head][[0, 2]])
            if seed == 3:
                assert int(found["op"][1]) == LifecycleOp.WAIT
                assert struck.reasons()[1] == Why.NOT_FINITE
                assert torch.equal(struck.state_dict()["state"][:, 1], before["state"][:, 1])
        assert bool(struck.state_dict()["state"].isfinite().all())
