"""What a schedule would do in rows that others have acted in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from esper.lab.population.population import Population
from esper.lab.proof.clone import ScheduleTeacher, advise_row
from esper.leyline.actions import LifecycleOp, placeholder_actions
from esper.leyline.controller import ControllerContext
from esper.leyline.stages import AlphaMode, SeedStage
from esper.tamiyo.controllers.registry import RowView
from esper.tamiyo.controllers.schedule import Schedule, parse_schedule
from tests.lab.proof.small import member, play_config

CONTEXT = ControllerContext(
    slot_names=("r0c0", "r0c1"), blueprint_names=("noop", "conv", "norm", "attention"), seed=0
)
CONV, NORM, ATTENTION = 1, 2, 3
PLAN: Schedule = parse_schedule(
    [
        {"epoch": 0, "op": "grow", "slot": "r0c0", "blueprint": ["conv", "norm"], "tempo": 5},
        {"epoch": "50%", "op": "grow", "slot": "r0c1", "blueprint": "norm"},
    ],
    CONTEXT,
)
OPS = len(LifecycleOp)


def row(stages: list[SeedStage], blueprints: list[int], **changes: Any) -> RowView:
    """Return a row of 20 epochs in which everything is legal and fits."""
    values: dict[str, Any] = {
        **{"epoch": 5, "horizon": 20, "score": 0.0, "best_score": 0.0, "plateau_epochs": 0},
        "loss_history": [1.0] * 5,
        **{"stabilized": True, "rolled_back": False, "last_op": 0, "last_success": True},
        **{"train_loss": 1.0, "flops": 100, "compute_budget": -1, "compute_spent": 0},
        **{"host_params": 100, "enabled": [True, True], "stage": [int(each) for each in stages]},
        **{"blueprint": blueprints, "algorithm": [0, 0], "alpha_mode": [int(AlphaMode.HOLD)] * 2},
        **{"alpha": [0.0, 0.0], "alpha_target": [1.0, 1.0], "epochs_in_stage": [1, 1]},
        **{"age": [9, 9], "copies": [0, 0]},
        **{"counterfactual_age": [0, 0], "contribution": [0.0, 0.0], "contribution_se": [0.0, 0.0]},
        "seed_flops": [[10] * 4] * 2,
        **{"legal": [[True, True]] * OPS, "fits": [[True] * 4] * 2},
    }
    return RowView(**{**values, **changes})


EMPTY, TRAINING, FOSSIL = SeedStage.DORMANT, SeedStage.TRAINING, SeedStage.FOSSILIZED


def test_what_is_missing_is_germinated_when_its_time_has_come() -> None:
    choice = advise_row(row([EMPTY, EMPTY], [-1, -1]), PLAN)
    assert (choice["op"], choice["slot"], choice["blueprint"]) == (LifecycleOp.GERMINATE, 0, CONV)
    late = row([FOSSIL, EMPTY], [CONV, -1], epoch=10)
    assert advise_row(late, PLAN)["slot"] == 1
    assert advise_row(replace(late, epoch=9), PLAN)["op"] == LifecycleOp.WAIT


def test_the_first_that_fits_is_taken_and_nothing_where_none_does() -> None:
    small = row([EMPTY, EMPTY], [-1, -1], fits=[[False, False, True, True]] * 2)
    assert advise_row(small, PLAN)["blueprint"] == NORM
    full = replace(small, fits=[[False] * 4] * 2)
    assert advise_row(full, PLAN)["op"] == LifecycleOp.WAIT


def test_a_seed_of_the_plan_is_brought_up_whoever_planted_it() -> None:
    choice = advise_row(row([TRAINING, EMPTY], [NORM, -1]), PLAN)
    assert (choice["op"], choice["slot"]) == (LifecycleOp.ADVANCE, 0)


@pytest.mark.parametrize(
    ("stages", "blueprints", "slot"),
    [([TRAINING, EMPTY], [ATTENTION, -1], 0), ([FOSSIL, TRAINING], [CONV, CONV], 1)],
)
def test_a_seed_that_the_plan_does_not_want_is_pruned(
    stages: list[SeedStage], blueprints: list[int], slot: int
) -> None:
    choice = advise_row(row(stages, blueprints), PLAN)
    assert (choice["op"], choice["slot"]) == (LifecycleOp.PRUNE, slot)
    illegal = row(stages, blueprints, legal=[[False, False]] * OPS)
    assert advise_row(illegal, PLAN)["op"] == LifecycleOp.WAIT


def test_whoever_should_wait_prunes_what_is_there() -> None:
    assert advise_row(row([EMPTY, TRAINING], [-1, NORM]), ())["op"] == LifecycleOp.PRUNE
    assert advise_row(row([EMPTY, FOSSIL], [-1, NORM]), ())["op"] == LifecycleOp.WAIT


def test_what_has_just_failed_lets_another_go_first() -> None:
    advance = int(LifecycleOp.ADVANCE)
    both = row([TRAINING, EMPTY], [CONV, -1], epoch=12)
    assert advise_row(both, PLAN)["op"] == advance
    refused = replace(both, last_op=advance, last_success=False)
    assert advise_row(refused, PLAN)["op"] == LifecycleOp.GERMINATE
    alone = replace(refused, epoch=5)
    assert advise_row(alone, PLAN)["op"] == advance


def test_a_whole_episode_ends_with_what_the_schedule_asks_for() -> None:
    play = play_config(rows=2)
    population = Population(
        member(2, horizon=20).task(), 2, device="cpu", strategy="sequential", config=play.population
    )
    names = population.known_blueprints()
    context = ControllerContext(slot_names=("r0c0", "r0c1", "r0c2"), blueprint_names=names, seed=0)
    grows = parse_schedule(
        [{"epoch": 1, "op": "grow", "slot": "r0c0", "blueprint": "norm", "tempo": 3}], context
    )
    teacher = ScheduleTeacher([grows, ()])
    signals = population.reset()
    # A pupil has planted the wrong thing in the wrong place of both rows.
    wrong = placeholder_actions(2)
    wrong["op"][:], wrong["slot"][:] = int(LifecycleOp.GERMINATE), 1
    wrong["blueprint"][:] = names.index("norm")
    signals = population.step(wrong)
    while bool((signals.epoch < signals.max_epochs).any()):
        signals = population.step(teacher.advise(signals, population.masks()))
    fossil = signals.stage == int(SeedStage.FOSSILIZED)
    assert fossil.tolist() == [[True, False], [False, False]]
    population.close()


def test_a_teacher_doubles_a_block_as_often_as_the_schedule_has_come_to() -> None:
    doubling = {"op": "germinate", "slot": "all", "blueprint": "norm"}
    plan = parse_schedule([{**doubling, "epoch": 3}, {**doubling, "epoch": 6}], CONTEXT)
    blending = SeedStage.BLENDING
    for epoch, copies, wanted in ((2, 0, None), (3, 0, 1), (5, 1, None), (6, 1, 1), (9, 3, None)):
        stage = blending if copies else EMPTY
        seen = row([FOSSIL, stage], [NORM, NORM], epoch=epoch, copies=[3, copies])
        choice = advise_row(seen, plan)
        assert (choice["op"] == LifecycleOp.GERMINATE) == (wanted is not None), epoch
        assert wanted is None or choice["slot"] == wanted
