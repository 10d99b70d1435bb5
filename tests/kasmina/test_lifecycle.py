"""The life of a seed: operations, ticks and records over [R, S] states."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.kasmina.lifecycle import (
    Applied,
    LifecycleConfig,
    Outcome,
    apply_command,
    enter_stage,
    record_epoch,
    remove_seeds,
    tick,
)
from esper.kasmina.operations import make_command
from esper.kasmina.state import GateConfig, SlotState, empty_state
from esper.leyline.actions import Command, LifecycleOp
from esper.leyline.rules import Refusal, RulesConfig
from esper.leyline.stages import AlphaAlgorithm, AlphaCurve, AlphaMode, BlendStyle, SeedStage
from tests.kasmina.gardens import one_slot, same_state

QUICK = LifecycleConfig(gates=GateConfig(min_training_epochs=0))
HERE = torch.tensor([[True]])


def apply(
    state: SlotState,
    op: LifecycleOp,
    slot: int = 0,
    config: LifecycleConfig = QUICK,
    fits: Tensor | None = None,
    **arguments: Any,
) -> tuple[SlotState, Applied]:
    return apply_command(
        state,
        make_command(op, slot, **arguments),
        enabled=torch.ones(1, state.num_slots, dtype=torch.bool),
        fits=torch.ones(1, state.num_slots, 4, dtype=torch.bool) if fits is None else fits,
        config=config,
    )


def done(state: SlotState, op: LifecycleOp, **arguments: Any) -> SlotState:
    """The state after an operation that must take effect."""
    after, applied = apply(state, op, **arguments)
    assert int(applied.outcome) == Outcome.DONE
    assert bool(applied.took_effect)
    return after


def stage_of(state: SlotState, slot: int = 0) -> SeedStage:
    return SeedStage(int(state.stage[0, slot]))


def score(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


# -- operations -----------------------------------------------------------------------------------


def test_germination_writes_down_what_was_asked_for() -> None:
    state = done(
        empty_state(1, 1),
        LifecycleOp.GERMINATE,
        blueprint=2,
        style=BlendStyle.GATED_GATE,
        tempo=8,
        target=0.7,
    )
    assert stage_of(state) is SeedStage.GERMINATED
    assert int(state.blueprint) == 2
    assert int(state.algorithm) == AlphaAlgorithm.GATE
    assert int(state.ramp) == AlphaCurve.LINEAR
    assert (int(state.tempo), float(state.blend_target), float(state.alpha)) == (8, 0.7, 0.0)
    assert int(state.previous_stage) == SeedStage.DORMANT


def test_a_seed_advances_through_its_stages_and_fossilizes() -> None:
    state = done(empty_state(1, 1), LifecycleOp.GERMINATE, blueprint=1, tempo=3)
    state = done(state, LifecycleOp.ADVANCE)
    assert stage_of(state) is SeedStage.TRAINING
    assert float(state.alpha) == 0
    state = done(state, LifecycleOp.ADVANCE)
    assert stage_of(state) is SeedStage.BLENDING
    assert int(state.alpha_mode) == AlphaMode.UP
    assert int(state.alpha_curve) == AlphaCurve.SIGMOID
    for _ in range(3):
        state = tick(state, QUICK)
    assert (float(state.alpha), int(state.alpha_mode)) == (1.0, AlphaMode.HOLD)
    state = done(state, LifecycleOp.ADVANCE)
    assert stage_of(state) is SeedStage.HOLDING
    state = state.where(HERE, contribution=0.1)
    state = done(state, LifecycleOp.FOSSILIZE)
    assert stage_of(state) is SeedStage.FOSSILIZED
    assert float(state.alpha) == 1.0


@pytest.mark.parametrize(
    ("op", "stage"),
    [
        (LifecycleOp.ADVANCE, SeedStage.TRAINING),
        (LifecycleOp.ADVANCE, SeedStage.BLENDING),
        (LifecycleOp.FOSSILIZE, SeedStage.HOLDING),
    ],
)
def test_a_closed_gate_changes_nothing(op: LifecycleOp, stage: SeedStage) -> None:
    state = one_slot(stage, alpha=0.5, alpha_target=0.5)
    after, applied = apply(state, op, config=LifecycleConfig())
    assert int(applied.outcome) == Outcome.GATE_FAILED
    assert int(applied.refusal) == Refusal.NONE
    assert same_state(after, state)


def test_waiting_is_always_done_whatever_the_slot_says() -> None:
    state = one_slot(SeedStage.TRAINING)
    for slot in (0, 99, -1):
        after, applied = apply(state, LifecycleOp.WAIT, slot)
        assert int(applied.outcome) == Outcome.DONE
        assert same_state(after, state)


@pytest.mark.parametrize(
    ("state", "op", "arguments", "refusal"),
    [
        (
            one_slot(SeedStage.TRAINING),
            LifecycleOp.GERMINATE,
            {"blueprint": 1},
            Refusal.SLOT_OCCUPIED,
        ),
        (empty_state(1, 1), LifecycleOp.ADVANCE, {}, Refusal.SLOT_EMPTY),
        (empty_state(1, 1), LifecycleOp.PRUNE, {}, Refusal.SLOT_EMPTY),
        (one_slot(SeedStage.EMBARGOED), LifecycleOp.PRUNE, {}, Refusal.SLOT_COOLING),
        (one_slot(SeedStage.TRAINING, age=0), LifecycleOp.PRUNE, {}, Refusal.TOO_YOUNG),
        (one_slot(SeedStage.FOSSILIZED, age=9), LifecycleOp.PRUNE, {}, Refusal.FOSSILIZED),
        (one_slot(SeedStage.TRAINING), LifecycleOp.SET_ALPHA_TARGET, {}, Refusal.NOT_BLENDED),
        (one_slot(SeedStage.BLENDING), LifecycleOp.FOSSILIZE, {}, Refusal.NOT_HOLDING),
        (one_slot(SeedStage.HOLDING), LifecycleOp.ADVANCE, {}, Refusal.STAGE_HAS_NO_NEXT),
        (
            one_slot(SeedStage.BLENDING, alpha_mode=1, age=9),
            LifecycleOp.PRUNE,
            {},
            Refusal.ALPHA_MOVING,
        ),
        (
            one_slot(SeedStage.BLENDING),
            LifecycleOp.SET_ALPHA_TARGET,
            {"target": 0.0},
            Refusal.BAD_ARGUMENT,
        ),
        (
            one_slot(SeedStage.BLENDING),
            LifecycleOp.SET_ALPHA_TARGET,
            {"target": math.nan},
            Refusal.BAD_ARGUMENT,
        ),
        (
            one_slot(SeedStage.BLENDING, age=9),
            LifecycleOp.PRUNE,
            {"speed": -1},
            Refusal.BAD_ARGUMENT,
        ),
        (
            empty_state(1, 1),
            LifecycleOp.GERMINATE,
            {"blueprint": 1, "tempo": 0},
            Refusal.BAD_ARGUMENT,
        ),
        (
            empty_state(1, 1),
            LifecycleOp.GERMINATE,
            {"blueprint": 1, "target": 1.01},
            Refusal.BAD_ARGUMENT,
        ),
        (
            empty_state(1, 1),
            LifecycleOp.GERMINATE,
            {"blueprint": 9},
            Refusal.BLUEPRINT_DOES_NOT_FIT,
        ),
        (
            empty_state(1, 1),
            LifecycleOp.GERMINATE,
            {"blueprint": -1},
            Refusal.BLUEPRINT_DOES_NOT_FIT,
        ),
        (
            empty_state(1, 1),
            LifecycleOp.GERMINATE,
            {"slot": 1, "blueprint": 1},
            Refusal.BAD_ARGUMENT,
        ),
    ],
)
def test_an_illegal_operation_changes_nothing_and_says_why(
    state: SlotState, op: LifecycleOp, arguments: dict[str, Any], refusal: Refusal
) -> None:
    after, applied = apply(state, op, **arguments)
    assert int(applied.outcome) == Outcome.ILLEGAL
    assert int(applied.refusal) == refusal
    assert same_state(after, state)


def test_a_blueprint_that_does_not_fit_is_illegal() -> None:
    fits = torch.tensor([[[False, True, False, True]]])
    _, applied = apply(empty_state(1, 1), LifecycleOp.GERMINATE, blueprint=2, fits=fits)
    assert int(applied.refusal) == Refusal.BLUEPRINT_DOES_NOT_FIT
    done(empty_state(1, 1), LifecycleOp.GERMINATE, blueprint=3, fits=fits)


def test_rows_act_apart() -> None:
    both = [make_command(LifecycleOp.GERMINATE, 1, blueprint=1), make_command(LifecycleOp.WAIT, 0)]
    command = Command(
        *(
            torch.cat([getattr(one, field.name) for one in both])
            for field in dataclasses.fields(Command)
        )
    )
    state, applied = apply_command(
        empty_state(2, 2),
        command,
        enabled=torch.ones(2, 2, dtype=torch.bool),
        fits=torch.ones(2, 2, 4, dtype=torch.bool),
        config=QUICK,
    )
    assert state.stage.tolist() == [[1, 2], [1, 1]]
    assert applied.took_effect.tolist() == [True, True]


@pytest.mark.parametrize("target", [1.0, 0.5])
def test_an_immediate_seed_is_at_its_amplitude_when_it_is_germinated(target: float) -> None:
    """In the rows that ask for it, by legal changes of stage; its style adds."""
    one = make_command(
        LifecycleOp.GERMINATE,
        1,
        blueprint=1,
        style=BlendStyle.GATED_GATE,
        tempo=8,
        target=target,
    )
    fields = [field.name for field in dataclasses.fields(Command)]
    state, applied = apply_command(
        empty_state(3, 2),
        Command(*(torch.cat([getattr(one, name)] * 3) for name in fields)),
        enabled=torch.ones(3, 2, dtype=torch.bool),
        fits=torch.tensor([True, True, False])[:, None, None].expand(3, 2, 4),
        config=QUICK,
        immediate=torch.tensor([True, False, True]),
    )
    assert applied.took_effect.tolist() == [True, True, False]
    blending, germinated = int(SeedStage.BLENDING), int(SeedStage.GERMINATED)
    assert state.stage[:, 1].tolist() == [blending, germinated, int(SeedStage.DORMANT)]
    assert state.alpha[:, 1].tolist() == [target, 0.0, 0.0]
    assert state.alpha_mode[:, 1].tolist() == [int(AlphaMode.HOLD)] * 3
    assert state.previous_stage[0, 1] == int(SeedStage.TRAINING)
    assert state.algorithm[:2, 1].tolist() == [int(AlphaAlgorithm.ADD), int(AlphaAlgorithm.GATE)]
    later = tick(state, QUICK)
    assert same_state(later, state), "it has arrived"
    holding = tick(state, LifecycleConfig(auto_holding=True)).stage[0, 1]
    assert holding == (int(SeedStage.HOLDING) if target == 1 else blending)


def test_max_seeds_and_sequential_development_stop_germination() -> None:
    training = empty_state(1, 2).where(torch.tensor([[True, False]]), stage=3)
    _, applied = apply(training, LifecycleOp.GERMINATE, 1, blueprint=1)
    assert int(applied.refusal) == Refusal.DEVELOPMENT_RUNNING
    fossil = empty_state(1, 2).where(torch.tensor([[True, False]]), stage=7)
    one_seed = LifecycleConfig(rules=RulesConfig(max_seeds=1))
    _, applied = apply(fossil, LifecycleOp.GERMINATE, 1, one_seed, blueprint=1)
    assert int(applied.refusal) == Refusal.SEED_LIMIT
    done(fossil, LifecycleOp.GERMINATE, slot=1, blueprint=1)


# -- amplitude ------------------------------------------------------------------------------------


def test_a_low_target_parks_a_seed_in_blending_until_it_is_raised() -> None:
    state = done(empty_state(1, 1), LifecycleOp.GERMINATE, blueprint=1, tempo=1, target=0.5)
    state = done(done(state, LifecycleOp.ADVANCE), LifecycleOp.ADVANCE)
    for _ in range(3):
        state = tick(state, QUICK)
    assert (stage_of(state), float(state.alpha)) == (SeedStage.BLENDING, 0.5)
    _, applied = apply(state, LifecycleOp.ADVANCE)
    assert int(applied.outcome) == Outcome.GATE_FAILED
    state = done(state, LifecycleOp.SET_ALPHA_TARGET, target=1.0, speed=0)
    assert stage_of(done(state, LifecycleOp.ADVANCE)) is SeedStage.HOLDING


def test_a_lower_target_takes_a_holding_seed_back_to_blending() -> None:
    state = one_slot(SeedStage.HOLDING, alpha=1.0, alpha_target=1.0, epochs_in_stage=4)
    back = done(
        state,
        LifecycleOp.SET_ALPHA_TARGET,
        target=0.7,
        speed=3,
        curve=AlphaCurve.COSINE,
        style=BlendStyle.LINEAR_MULTIPLY,
    )
    assert stage_of(back) is SeedStage.BLENDING
    assert (int(back.previous_stage), int(back.previous_epochs)) == (SeedStage.HOLDING, 4)
    assert int(back.alpha_mode) == AlphaMode.DOWN
    assert int(back.algorithm) == AlphaAlgorithm.MULTIPLY
    for _ in range(3):
        back = tick(back, QUICK)
    assert (stage_of(back), float(back.alpha)) == (SeedStage.BLENDING, 0.7)
    full = done(state, LifecycleOp.SET_ALPHA_TARGET, target=1.0, speed=5)
    assert (stage_of(full), int(full.alpha_mode)) == (SeedStage.HOLDING, AlphaMode.HOLD)


# -- pruning and cooldown -------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [SeedStage.GERMINATED, SeedStage.TRAINING])
def test_a_seed_without_amplitude_is_pruned_at_once_at_any_speed(stage: SeedStage) -> None:
    state = done(one_slot(stage, age=1, blueprint=1), LifecycleOp.PRUNE, speed=8)
    assert stage_of(state) is SeedStage.PRUNED


@pytest.mark.parametrize("stage", [SeedStage.BLENDING, SeedStage.HOLDING])
def test_a_scheduled_prune_fades_the_seed_out_and_then_removes_it(stage: SeedStage) -> None:
    state = one_slot(stage, age=5, alpha=1.0, alpha_target=1.0, contribution=2.0, params=9)
    state = done(state, LifecycleOp.PRUNE, speed=3, curve=AlphaCurve.LINEAR)
    seen = []
    for _ in range(4):
        assert stage_of(state) is SeedStage.BLENDING or len(seen) == 3
        state = tick(state, QUICK)
        seen.append((stage_of(state).name, round(float(state.alpha), 4)))
    assert seen == [("BLENDING", 0.6667), ("BLENDING", 0.3333), ("PRUNED", 0), ("EMBARGOED", 0)]
    assert bool(state.contribution.isnan())
    assert int(state.params) == 0


def test_an_immediate_prune_at_decision_e_frees_the_slot_at_decision_e_plus_7() -> None:
    state = done(one_slot(SeedStage.TRAINING, age=1, blueprint=1), LifecycleOp.PRUNE)
    seen = []
    for decision in range(1, 8):
        state = tick(state, QUICK)
        # What accuracy does in the meantime must not shorten the embargo.
        state = record_epoch(state, score(50.0))
        seen.append(stage_of(state))
        _, applied = apply(state, LifecycleOp.GERMINATE, blueprint=1)
        assert bool(applied.took_effect) == (decision == 7)
    embargo = [SeedStage.EMBARGOED] * 5
    assert seen == [*embargo, SeedStage.RESETTING, SeedStage.DORMANT]
    assert same_state(state, empty_state(1, 1))


def test_a_slot_pruned_by_a_tick_starts_its_cooldown_with_the_next_tick() -> None:
    state = one_slot(SeedStage.BLENDING, age=3, alpha=0.4, alpha_target=0.4)
    state = done(state, LifecycleOp.PRUNE, speed=1)
    state = tick(state, QUICK)
    assert (stage_of(state), int(state.cooldown)) == (SeedStage.PRUNED, 0)
    ticks = 0
    while stage_of(state) is not SeedStage.DORMANT:
        state, ticks = tick(state, QUICK), ticks + 1
    assert ticks == 7


def test_the_length_of_the_embargo_is_an_option() -> None:
    config = QUICK.replace(embargo_ticks=1)
    state = one_slot(SeedStage.PRUNED)
    seen = []
    for _ in range(3):
        state = tick(state, config)
        seen.append(stage_of(state))
    assert seen == [SeedStage.EMBARGOED, SeedStage.RESETTING, SeedStage.DORMANT]


def test_removal_forgets_every_measurement_and_interaction() -> None:
    state = empty_state(1, 2).where(
        torch.tensor([[True, True]]), stage=4, alpha=1.0, contribution=3.0, grad_norm=2.0, params=7
    )
    state = dataclasses.replace(state, interaction=torch.ones(1, 2, 2, dtype=torch.float64))
    state = remove_seeds(state, torch.tensor([[True, False]]))
    assert state.stage.tolist() == [[8, 4]]
    assert state.alpha.tolist() == [[0.0, 1.0]]
    assert bool(state.contribution[0, 0].isnan())
    assert float(state.contribution[0, 1]) == 3.0
    assert state.interaction.tolist() == [[[0, 0], [0, 1]]]


def test_a_rollback_removes_even_a_fossil_but_nothing_that_is_not_there() -> None:
    fossil = remove_seeds(one_slot(SeedStage.FOSSILIZED), HERE)
    assert stage_of(fossil) is SeedStage.PRUNED
    assert stage_of(remove_seeds(empty_state(1, 1), HERE)) is SeedStage.DORMANT
    cooling = one_slot(SeedStage.EMBARGOED, cooldown=3)
    assert same_state(remove_seeds(cooling, HERE), cooling)


# -- automatic gates ------------------------------------------------------------------------------

AUTO = QUICK.replace(auto_training=True, auto_blending=True, auto_holding=True)


def test_one_setting_makes_every_gate_automatic() -> None:
    once = QUICK.replace(auto_advance=True)
    assert once.forwards == AUTO.forwards == (True, True, True)
    assert once.effective_rules == AUTO.effective_rules
    assert not once.effective_rules.advance_allowed
    ready = one_slot(SeedStage.TRAINING).where(HERE, tempo=2, blend_target=1.0)
    assert same_state(tick(ready, once), tick(ready, AUTO))
    assert stage_of(tick(ready, once)) is SeedStage.BLENDING


def test_automatic_gates_start_the_ramp_in_the_tick_that_passes_them() -> None:
    state = done(
        empty_state(1, 1),
        LifecycleOp.GERMINATE,
        blueprint=1,
        tempo=2,
        style=BlendStyle.LINEAR_ADD,
    )
    state = tick(state, AUTO)
    assert (stage_of(state), float(state.alpha)) == (SeedStage.BLENDING, 0.5)
    state = tick(state, AUTO)
    assert (stage_of(state), float(state.alpha)) == (SeedStage.HOLDING, 1.0)
    assert stage_of(tick(state, AUTO)) is SeedStage.HOLDING


def test_each_automatic_gate_works_alone() -> None:
    germinated, training = one_slot(SeedStage.GERMINATED), one_slot(SeedStage.TRAINING)
    full = one_slot(SeedStage.BLENDING, alpha=1.0, alpha_target=1.0)
    ready = training.where(HERE, tempo=2, blend_target=1.0)
    only = {
        name: QUICK.replace(**{name: True})
        for name in ("auto_training", "auto_blending", "auto_holding")
    }
    for name, config in only.items():
        assert stage_of(tick(germinated, config)) is (
            SeedStage.TRAINING if name == "auto_training" else SeedStage.GERMINATED
        )
        assert stage_of(tick(ready, config)) is (
            SeedStage.BLENDING if name == "auto_blending" else SeedStage.TRAINING
        )
        assert stage_of(tick(full, config)) is (
            SeedStage.HOLDING if name == "auto_holding" else SeedStage.BLENDING
        )


def test_automatic_gates_wait_for_their_conditions() -> None:
    config = AUTO.replace(gates=GateConfig(min_training_epochs=10))
    young = one_slot(SeedStage.TRAINING, epochs_in_stage=9)
    assert stage_of(tick(young, config)) is SeedStage.TRAINING
    half = one_slot(SeedStage.BLENDING, alpha=0.5, alpha_target=0.5)
    assert stage_of(tick(half, config)) is SeedStage.BLENDING


def test_advance_is_illegal_only_when_every_gate_forwards_itself() -> None:
    state = one_slot(SeedStage.GERMINATED)
    _, applied = apply(state, LifecycleOp.ADVANCE, config=AUTO)
    assert int(applied.refusal) == Refusal.ADVANCE_DISABLED
    _, applied = apply(state, LifecycleOp.ADVANCE, config=AUTO.replace(auto_holding=False))
    assert int(applied.outcome) == Outcome.DONE


# -- records --------------------------------------------------------------------------------------


def test_the_first_record_sets_the_scores_that_improvements_count_from() -> None:
    state = done(empty_state(1, 1), LifecycleOp.GERMINATE, blueprint=1)
    state = record_epoch(state, score(40.0))
    assert (float(state.score_initial), float(state.score_stage)) == (40.0, 40.0)
    assert (int(state.age), int(state.epochs_in_stage)) == (1, 1)
    state = record_epoch(state, score(43.0))
    state = done(state, LifecycleOp.ADVANCE)
    assert (int(state.epochs_in_stage), int(state.previous_epochs)) == (0, 2)
    state = record_epoch(state, score(44.0))
    assert (float(state.score_initial), float(state.stage_improvement)) == (40.0, 1.0)
    assert (int(state.age), int(state.epochs_in_stage)) == (3, 1)


def test_a_stage_entered_before_any_record_starts_from_the_first_one() -> None:
    state = enter_stage(one_slot(SeedStage.GERMINATED), HERE, SeedStage.TRAINING)
    state = record_epoch(state, score(40.0))
    assert float(state.stage_improvement) == 0.0


def test_records_touch_only_slots_with_a_module() -> None:
    for stage in (SeedStage.DORMANT, SeedStage.PRUNED, SeedStage.EMBARGOED, SeedStage.RESETTING):
        state = one_slot(stage)
        assert same_state(record_epoch(state, score(1.0)), state)


def test_a_record_ages_the_last_ablation_and_remembers_the_last_health() -> None:
    state = one_slot(SeedStage.BLENDING, counterfactual_age=0, grad_health=0.4)
    state = record_epoch(state, score(1.0))
    assert (int(state.counterfactual_age), float(state.grad_health_prev)) == (1, 0.4)
    never = record_epoch(one_slot(SeedStage.BLENDING), score(1.0))
    assert int(never.counterfactual_age) == -1


def test_a_seed_counts_the_epochs_since_it_began_to_learn() -> None:
    state = done(empty_state(1, 1), LifecycleOp.GERMINATE, blueprint=1)
    for _ in range(3):
        state = record_epoch(state, score(50.0))
    assert (int(state.age), int(state.learned)) == (3, 0)
    state = record_epoch(done(state, LifecycleOp.ADVANCE), score(50.0))
    assert stage_of(state) is SeedStage.TRAINING
    assert (int(state.age), int(state.learned)) == (4, 1)
    state = record_epoch(enter_stage(state, HERE, SeedStage.FOSSILIZED), score(50.0))
    assert (int(state.age), int(state.learned)) == (5, 2)
    # The next seed in the slot starts anew.
    assert int(state.clear(HERE).learned) == 0
