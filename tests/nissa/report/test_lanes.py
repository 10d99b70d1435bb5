from __future__ import annotations

import math

from esper.leyline.records import EpochRecord, seed_records
from esper.nissa.report.lanes import Lane, read_lanes
from esper.nissa.report.markup import argument_words, describe_decision
from esper.nissa.report.picture import growth_picture
from tests.nissa.report.reading import having, parse, told
from tests.nissa.report.runs import DECISIONS, growing_run, make_decision, make_epoch, make_slot


def lanes_of(history: list[EpochRecord]) -> list[Lane]:
    return read_lanes(history, seed_records(history))


def test_lanes_hold_runs_seeds_and_decisions() -> None:
    first, second, third = lanes_of(growing_run())
    assert [(run.stage, run.begin, run.end) for run in first.runs] == [
        ("GERMINATED", 6, 7),
        ("TRAINING", 7, 12),
        ("BLENDING", 12, 17),
        ("PRUNED", 17, 18),
        ("EMBARGOED", 18, 23),
        ("RESETTING", 23, 24),
    ]
    # A run begins where the decision stands that began it.
    assert [epoch for epoch, _ in first.decisions] == [6, 7, 10, 12, 17]
    assert [(number, seed.fate) for number, seed in first.seeds + second.seeds] == [
        (0, "pruned"),
        (1, "fossilized"),
    ]
    assert (third.name, third.runs, third.seeds) == ("r0c2", [], [])


def test_equal_amplitudes_are_one_step_and_strange_ones_are_bounded() -> None:
    alphas = (0.5, 0.5, 1.7, -1.0, math.nan)
    history = [
        make_epoch(
            epoch, 50.0, slots=(make_slot("a", stage="BLENDING", blueprint="x", alpha=alpha),)
        )
        for epoch, alpha in enumerate(alphas, 1)
    ]
    (lane,) = lanes_of(history)
    assert lane.runs[0].steps == [(0, 2, 0.5), (2, 3, 1.0), (3, 5, 0.0)]


def test_a_slot_named_by_a_decision_alone_has_a_lane() -> None:
    history = [make_epoch(1, 50.0, slots=(), decision=make_decision("PRUNE", "elsewhere"))]
    assert [lane.name for lane in lanes_of(history)] == ["elsewhere"]


def test_a_first_epoch_other_than_one_is_one_epoch_wide() -> None:
    slots = (make_slot("a", stage="TRAINING", blueprint="x"),)
    (lane,) = lanes_of([make_epoch(epoch, 50.0, slots=slots) for epoch in (40, 41)])
    assert (lane.runs[0].begin, lane.runs[0].end) == (39, 41)


def test_every_decision_but_wait_has_a_mark_with_a_tooltip() -> None:
    root = parse(growth_picture(growing_run()))
    marked = [one for one in having(root, "decision") if len(one) == 2]
    assert len(marked) == len(DECISIONS)
    tips = told(root)
    for epoch, decision in DECISIONS.items():
        assert describe_decision(epoch, decision) in tips


def test_refused_decisions_look_different() -> None:
    root = parse(growth_picture(growing_run()))
    refused = [one for one in having(root, "refused") if len(one) == 2]
    assert len(refused) == 2


def test_decisions_are_told_with_arguments_outcome_and_reason() -> None:
    assert describe_decision(36, DECISIONS[36]) == (
        "after epoch 36: set alpha target r0c1 "
        "(style sigmoid_add, alpha target 1.00, speed 3, curve cosine): done"
    )
    assert describe_decision(10, DECISIONS[10]).endswith(
        ": gate failed, G2: 3 of 5 epochs in training"
    )
    assert argument_words(make_decision("PRUNE", "a", alpha_speed=0)) == "speed 0"


def test_an_unknown_operation_still_has_a_mark() -> None:
    root = parse(growth_picture([make_epoch(1, 5.0, decision=make_decision("GRAFT", "r0c0"))]))
    assert "after epoch 1: graft r0c0: done" in told(root)


def test_marks_in_one_place_are_drawn_once() -> None:
    history = [
        make_epoch(epoch, 50.0, decision=make_decision("ADVANCE", "r0c0"))
        for epoch in range(1, 2001)
    ]
    root = parse(growth_picture(history))
    assert len(having(root, "decision")) < 250
    assert any("more like it up to epoch" in tip for tip in told(root))
