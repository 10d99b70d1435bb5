from __future__ import annotations

from esper.report.marks import argument_words, tell_decision
from esper.report.picture import growth_picture
from tests.report.reading import having, parse, told
from tests.report.runs import DECISIONS, growing_run, make_decision, make_epoch


def test_every_decision_but_wait_has_a_mark_with_a_tooltip() -> None:
    root = parse(growth_picture(growing_run()))
    marked = [one for one in having(root, "decision") if len(one) == 2]
    assert len(marked) == len(DECISIONS)
    tips = told(root)
    for epoch, decision in DECISIONS.items():
        assert tell_decision(epoch, decision) in tips


def test_refused_decisions_look_different() -> None:
    root = parse(growth_picture(growing_run()))
    refused = [one for one in having(root, "refused") if len(one) == 2]
    assert len(refused) == 2


def test_decisions_are_told_with_arguments_outcome_and_reason() -> None:
    assert tell_decision(36, DECISIONS[36]) == (
        "after epoch 36: set alpha target r0c1 "
        "(style sigmoid_add, alpha target 1.00, speed 3, curve cosine): done"
    )
    assert tell_decision(10, DECISIONS[10]).endswith(": gate failed, G2: 3 of 5 epochs in training")
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
