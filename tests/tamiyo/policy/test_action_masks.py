import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import LifecycleConfig, Outcome, check_command
from esper.kasmina.signals import (
    TrackerConfig,
    read_signals,
    row_facts,
    start_tracking,
    unknown_rates,
)
from esper.lab.imagined import ImaginedHosts
from esper.leyline.actions import (
    CAUSAL_HEADS,
    HEAD_NAMES,
    HEAD_SIZES,
    LifecycleOp,
    decode_actions,
    placeholder_actions,
)
from esper.leyline.errors import EmptyMaskError, NonFiniteError, UsageError
from esper.leyline.rules import Masks, RulesConfig
from esper.leyline.signals import Signals
from esper.leyline.slots import NUM_BLUEPRINTS
from esper.leyline.stages import SeedStage
from esper.tamiyo.policy.action_masks import (
    MaskedCategorical,
    available_heads,
    causal_heads,
    compute_action_masks,
)
from esper.testing.controllers import random_signals
from tests.kasmina.gardens import measure, plain_table, same_state, stack_garden
from tests.plots import carry_out, record_epoch

OP, SLOT, BLUEPRINT = (HEAD_NAMES.index(head) for head in ("op", "slot", "blueprint"))


def draw(rows: int, slots: int, seed: int) -> tuple[Signals, Masks]:
    return random_signals(rows, slots, torch.Generator().manual_seed(seed))


def one_choice(mask: Tensor) -> Tensor:
    """Return the only choice of every mask; there must be exactly one."""
    assert bool((mask.sum(-1) == 1).all())
    return mask.to(torch.uint8).argmax(-1)


def garden_signals(garden: Garden) -> Signals:
    def one(value: int) -> Tensor:
        return torch.tensor([value])

    return read_signals(
        plain_table(garden.state),
        start_tracking(1, TrackerConfig()),
        row_facts(1, horizon=60, budget=500),
        train_loss=torch.tensor([math.nan]),
        spent=one(0),
        rates=unknown_rates,
        last_op=one(0),
        last_success=torch.tensor([True]),
        rolled_back=torch.tensor([False]),
        twin_score=torch.tensor([math.nan]),
    )


def garden_masks(garden: Garden) -> Masks:
    rules = garden.config.lifecycle.effective_rules
    return compute_action_masks(garden_signals(garden), garden.table.fits(), rules)


def same_masks(one: Masks, other: Masks) -> bool:
    return all(
        torch.equal(getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(Masks)
    )


# ------------------------------------------------------------- masks and execution say the same


def legal_by_masks(masks: Masks, op: int, slot: int, blueprint: int) -> bool:
    if op == LifecycleOp.WAIT:
        return bool(masks.op[0, op])
    fits = bool(masks.blueprint_by_slot[0, slot, blueprint])
    return bool(masks.slot_by_op[0, op, slot]) and (op != LifecycleOp.GERMINATE or fits)


def random_action(masks: Masks, generator: torch.Generator) -> dict[str, Tensor]:
    """Anything the heads can say, or as often a legal action that seldom prunes."""

    def pick(mask: Tensor) -> Tensor:
        return MaskedCategorical(torch.zeros(mask.shape), mask).sample(generator)

    action = {
        head: torch.randint(0, size, (1,), generator=generator)
        for head, size in {**HEAD_SIZES, "slot": masks.slot_by_op.shape[-1]}.items()
    }
    if torch.rand((), generator=generator) < 0.5:
        allowed = masks.op.clone()
        allowed[0, LifecycleOp.PRUNE] &= torch.rand((), generator=generator) < 0.1
        action["op"] = pick(allowed)
        action["slot"] = pick(masks.slot_by_op[[0], action["op"]])
        blueprints = masks.blueprint_by_slot[[0], action["slot"]]
        if bool(blueprints.any()):
            action["blueprint"] = pick(blueprints)
    return action


@pytest.mark.parametrize("seed", range(4))
def test_masks_and_execution_agree_in_every_state_a_garden_reaches(seed: int) -> None:
    """An op the mask allows never fails as illegal; one it forbids never takes effect."""
    garden = stack_garden(lifecycle={"rules": {"max_seeds": (0, 0, 2, 1)[seed]}})
    generator = torch.Generator().manual_seed(seed)
    outcomes = dict.fromkeys(Outcome, 0)
    reached = set()
    for _ in range(150):
        masks = garden_masks(garden)
        assert same_masks(masks, garden.table.masks())
        actions = random_action(masks, generator)
        op, slot, blueprint = (int(actions[head]) for head in ("op", "slot", "blueprint"))
        before = garden.state
        result = carry_out(garden, actions)
        legal = legal_by_masks(masks, op, slot, blueprint)
        assert (result.outcome is not Outcome.ILLEGAL) == legal, result.reason
        if result.outcome is not Outcome.DONE:
            assert same_state(before, garden.state)
        outcomes[result.outcome] += 1
        garden.tick()
        record_epoch(garden, 50.0)
        for name, view in garden.slots.items():
            reached.add(view.stage)
            if view.stage in (SeedStage.BLENDING, SeedStage.HOLDING) and view.alpha > 0:
                measure(garden, name)
    assert all(outcomes.values()), outcomes
    assert len(reached) >= 6


def test_every_choice_agrees_with_execution_in_lives_of_hosts() -> None:
    """All ops, slots and blueprints of many hosts at once, not only those that were drawn."""
    lifecycle = LifecycleConfig(
        rules=RulesConfig(max_seeds=2), gates=ImaginedHosts(1).lifecycle.gates
    )
    hosts = ImaginedHosts(24, 3, seed=1, lifecycle=lifecycle)
    for _ in range(30):
        masks = compute_action_masks(hosts.signals(), hosts.fits, lifecycle.effective_rules)
        for op in LifecycleOp:
            for slot in range(3):
                for blueprint in (0, 1, 8):
                    actions = placeholder_actions(24)
                    for head, value in (("op", op), ("slot", slot), ("blueprint", blueprint)):
                        actions[head] = torch.full((24,), int(value))
                    codes = check_command(
                        hosts.state, decode_actions(actions), hosts.enabled, hosts.fits, lifecycle
                    )
                    allowed = masks.slot_by_op[:, op, slot].clone()
                    if op == LifecycleOp.GERMINATE:
                        allowed &= masks.blueprint_by_slot[:, slot, blueprint]
                    assert torch.equal(codes == 0, allowed)
        applied = hosts.step(hosts.random_actions(prune_chance=0.3))
        assert bool((applied.outcome != int(Outcome.ILLEGAL)).all())


def test_masks_come_from_signals_as_from_the_lifecycle_itself() -> None:
    for seed in range(20):
        signals, masks = draw(8, 3, seed)
        fits = masks.blueprint_by_slot
        most = int(signals.occupied.sum()) + 1
        ours = compute_action_masks(signals, fits, RulesConfig(max_seeds=most))
        assert torch.equal(ours.blueprint_by_slot, fits)
        assert bool(ours.op[:, LifecycleOp.WAIT].all())
        for op in (LifecycleOp.ADVANCE, LifecycleOp.PRUNE, LifecycleOp.SET_ALPHA_TARGET):
            assert torch.equal(ours.slot_by_op[:, op], masks.slot_by_op[:, op])


def test_the_rules_count() -> None:
    hosts = ImaginedHosts(1, 2)
    hosts.step({**placeholder_actions(1), "op": torch.tensor([1]), "blueprint": torch.tensor([1])})
    signals = hosts.signals()
    strict = RulesConfig(min_prune_age=5, advance_allowed=False)
    assert bool(compute_action_masks(signals, hosts.fits).op[0, LifecycleOp.PRUNE])
    masks = compute_action_masks(signals, hosts.fits, strict)
    legal = [op.name for op in LifecycleOp if masks.op[0, op]]
    assert legal == ["WAIT"]


# ------------------------------------------------------------------------------- which heads count


def test_causal_heads_are_those_of_the_table() -> None:
    ops = torch.arange(6).view(2, 3)
    causal = causal_heads(ops)
    assert causal.shape == (2, 3, 8)
    for op, heads in CAUSAL_HEADS.items():
        row = causal.view(6, 8)[int(op)].tolist()
        assert [head for head, counts in zip(HEAD_NAMES, row, strict=True) if counts] == [
            head for head in HEAD_NAMES if head in heads
        ]


@given(st.integers(0, 10**6))
def test_a_head_is_available_where_a_legal_op_uses_it(seed: int) -> None:
    _, masks = draw(6, 3, seed)
    available = available_heads(masks)
    for row in range(6):
        legal = [op for op in LifecycleOp if masks.op[row, op]]
        used = {head for op in legal for head in CAUSAL_HEADS[op]}
        assert {head for i, head in enumerate(HEAD_NAMES) if available[row, i]} == used


# ------------------------------------------------------------------------------------ empty masks


def test_a_row_without_slots_has_no_action() -> None:
    hosts = ImaginedHosts(2, 2)
    hosts.step(
        {**placeholder_actions(2), "op": torch.ones(2).long(), "blueprint": torch.ones(2).long()}
    )
    off = torch.tensor([[True, True], [False, False]])
    signals = dataclasses.replace(hosts.signals(), enabled=off)
    with pytest.raises(EmptyMaskError, match=r"row 1, head 'op': .*slots: 0 off, 1 off"):
        compute_action_masks(signals, hosts.fits)


def test_what_cannot_be_is_refused() -> None:
    hosts = ImaginedHosts(2, 2)
    with pytest.raises(UsageError, match=r"fits must be \[2, 2, blueprints\], got "):
        compute_action_masks(hosts.signals(), torch.ones(2, 3, NUM_BLUEPRINTS, dtype=torch.bool))
    strange = dataclasses.replace(
        hosts.signals(),
        occupied=torch.tensor([[False, False], [False, True]]),
        stage=torch.tensor([[-1, -1], [-1, 5]]),
    )
    with pytest.raises(UsageError, match=r"row 1, slot 1: .*value 5"):
        compute_action_masks(strange, hosts.fits)


# -------------------------------------------------------------------------------------- one head


def test_a_masked_categorical_is_a_distribution_over_what_is_legal() -> None:
    logits = torch.randn(5, 6, requires_grad=True)
    mask = torch.rand(5, 6) < 0.6
    mask[:, 2] = True
    head = MaskedCategorical(logits, mask, floor=0.02)
    assert head.probs.shape == (5, 6)
    torch.testing.assert_close(head.probs.sum(-1), torch.ones(5))
    assert bool((head.probs[~mask] == 0).all())
    legal = mask.sum(-1)
    least = torch.minimum(torch.tensor(0.02), 0.5 / legal)
    assert bool((head.probs >= least[:, None] - 1e-7)[mask].all())
    choice = head.sample()
    assert (choice.dtype, choice.shape) == (torch.int64, (5,))
    assert bool(mask.gather(-1, choice[:, None]).all())
    torch.testing.assert_close(
        head.log_prob(choice), head.probs.gather(-1, choice[:, None])[:, 0].log()
    )
    head.log_prob(choice).sum().backward()
    assert bool(torch.isfinite(logits.grad if logits.grad is not None else logits).all())


def test_masked_head_log_probs_finite() -> None:
    """A head with its placeholder alone takes it with probability 1 and log-probability 0."""
    mask = torch.zeros(4, NUM_BLUEPRINTS, dtype=torch.bool)
    mask[:, 0] = True
    for floor in (0.0, 0.1):
        head = MaskedCategorical(50 * torch.randn(4, NUM_BLUEPRINTS), mask, floor)
        assert head.sample().tolist() == [0] * 4
        assert head.log_prob(torch.zeros(4).long()).tolist() == [0.0] * 4
        assert bool(torch.isfinite(head.log_probs).all())
        assert head.entropy().tolist() == [0.0] * 4


def test_entropy_is_that_of_the_softmax_without_the_floor() -> None:
    mask = torch.tensor([True, True, True, False])
    even = MaskedCategorical(torch.zeros(4), mask)
    assert float(even.entropy()) == pytest.approx(1.0)
    logits = torch.tensor([2.0, 0.0, -1.0, 9.0])
    probs = torch.softmax(logits[:3], 0)
    expected = float(-(probs * probs.log()).sum() / math.log(3))
    for floor in (0.0, 0.1):
        assert float(MaskedCategorical(logits, mask, floor).entropy()) == pytest.approx(expected)


def test_draws_follow_the_numbers_they_are_given() -> None:
    head = MaskedCategorical(torch.zeros(4), torch.tensor([False, True, True, False]))
    assert head.sample(uniforms=torch.tensor(0.25)).item() == 1
    assert head.sample(uniforms=torch.tensor(0.75)).item() == 2
    generator = torch.Generator().manual_seed(3)
    drawn = MaskedCategorical(torch.zeros(10_000, 4), torch.ones(4).bool()).sample(generator)
    assert drawn.bincount(minlength=4).tolist() == pytest.approx([2_500] * 4, rel=0.1)


def test_empty_masks_and_lost_logits_raise() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    with pytest.raises(NonFiniteError, match="row 1"):
        MaskedCategorical(torch.tensor([[0.0] * 4, [math.nan] * 4, [0.0] * 4]), mask)
    mask[2] = False
    with pytest.raises(EmptyMaskError, match="row 2"):
        MaskedCategorical(torch.zeros(3, 4), mask)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_masks_on_a_device_are_those_on_the_cpu() -> None:
    hosts = ImaginedHosts(32, seed=8)
    for _ in range(20):
        hosts.step(hosts.random_actions(prune_chance=0.1))
    op = hosts.random_actions()["op"]
    on_gpu = compute_action_masks(hosts.signals().to("cuda"), hosts.fits.to("cuda"))
    # Tables go to the device once, and wait for it.
    available_heads(on_gpu), causal_heads(op.to("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        available, causal = available_heads(on_gpu), causal_heads(op.to("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(available_heads(hosts.masks()), available.cpu())
    assert torch.equal(causal_heads(op), causal.cpu())
