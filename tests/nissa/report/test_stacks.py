"""Lanes of stacks: where bars begin and end, how they are drawn, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from esper.leyline.reasons import why_not_grown
from esper.leyline.records import (
    DeepeningRecord,
    DepthRecord,
    EpochRecord,
    RunSummary,
    StackRecord,
    stacks_at_end,
)
from esper.nissa.report import growth_picture, render_report
from esper.nissa.report.stacks import describe_compute, describe_lane, format_flops, read_stacks
from tests.nissa.report.runs import make_epoch

STEPS = 10
ORIGIN = {"config": {}, "command": "esper grow", "versions": {}}


def woken(before: int, after: int, step: int, stack: str = "h", **changes: str) -> DeepeningRecord:
    told = {"outcome": "done", "reason": f"schedule: {before} to {after} blocks", **changes}
    return DeepeningRecord(stack=stack, before=before, after=after, step=step, **told)


def epoch(
    number: int, awake: dict[str, int], *deepenings: DeepeningRecord, **changes: object
) -> EpochRecord:
    stacks = tuple(StackRecord(name=name, awake=n, blocks=4) for name, n in awake.items())
    step = STEPS * number
    depth = DepthRecord(
        step=step, flops=6e11 * step, static_flops=1e12 * step, stacks=stacks, deepenings=deepenings
    )
    decision = deepenings[0].decision if deepenings else None
    return make_epoch(number, 40.0 + number, slots=(), depth=depth, decision=decision, **changes)


def history() -> list[EpochRecord]:
    return [
        epoch(1, {"h": 1}),
        # Blocks wake within the second epoch, and at the end of the third.
        epoch(2, {"h": 2}, woken(1, 2, 15)),
        epoch(3, {"h": 2}, woken(2, 4, 30)),
        epoch(4, {"h": 4}),
    ]


def summary(records: list[EpochRecord], kept: int) -> RunSummary:
    return RunSummary(
        task="text",
        controller="schedule",
        seed=0,
        epochs=len(records),
        parameters_before=100,
        parameters_after=400,
        flops_before=10,
        flops_after=40,
        val_score=records[kept - 1].val_score,
        test_score=None,
        twin_val_score=41.0,
        twin_test_score=None,
        seeds=(),
        seconds=1.0,
        kept_epoch=kept,
        stacks=stacks_at_end(records, kept),
        training_flops=2.4e13,
        static_flops=4e13,
    )


def test_a_bar_begins_at_the_step_at_which_its_block_woke() -> None:
    (lane,) = read_stacks(history())
    assert (lane.name, lane.blocks) == ("h", 4)
    assert lane.spans == [(0.0, 1.5, 1), (1.5, 3, 2), (3, 4, 4)]
    assert describe_lane(lane) == (
        "Stack h: 1 of 4 blocks awake at first, 2 from epoch 1.5 on, 4 from epoch 3 on."
    )


def test_a_network_that_went_back_has_fewer_bars_again() -> None:
    records = [
        epoch(1, {"h": 4}, woken(1, 4, 5)),
        epoch(2, {"h": 1}, woken(1, 4, 20), rollback="not_finite"),
        epoch(3, {"h": 4}),
    ]
    (lane,) = read_stacks(records)
    # It was measured with one block, and the schedule woke the others at once.
    assert lane.spans == [(0.0, 0.5, 1), (0.5, 2, 4), (2, 2, 1), (2, 3, 4)]


def test_epochs_that_are_left_out_leave_no_gap() -> None:
    (lane,) = read_stacks([record for record in history() if record.epoch % 2 == 0])
    assert [awake for *_, awake in lane.spans] == [1, 2, 4]
    assert lane.spans[-1][1] == 4


def test_a_run_without_stacks_has_no_lanes() -> None:
    assert read_stacks([]) == []
    assert read_stacks([make_epoch(1, 50.0)]) == []


def test_the_picture_has_a_bar_for_each_block_that_is_awake() -> None:
    picture = growth_picture(history())
    assert picture.count('class="fossilized"') == 1 + 2 + 4
    assert "1 → 2 → 4 of 4" in picture
    assert "Training FLOPs: 24.00 T, 60.0 % of the 40.00 T with all blocks awake" in picture
    assert "Slots:" not in picture
    assert growth_picture(history()) == picture


def test_many_stacks_and_blocks_stay_one_picture() -> None:
    many = {f"stack{number}": 2 for number in range(30)}
    picture = growth_picture([epoch(1, many), epoch(2, many)])
    assert "18 more stacks not drawn" in picture
    assert picture.count('class="well"') == 12


def test_a_report_tells_blocks_and_compute() -> None:
    records = [replace(record, twin_score=41.0) for record in history()]
    page = render_report(records, summary(records, 4), **ORIGIN)
    assert "text: a deepened network" in page
    assert "In 4 epochs the rule schedule woke 1 → 2 → 4 of 4 blocks in h." in page
    assert "Training took 24.00 T FLOPs, 60.0 % of the 40.00 T with all blocks awake." in page
    assert "The twin is the static network" in page
    assert "When blocks woke" in page
    assert "Seeds kept" not in page
    assert "germinated" not in page.partition("</style>")[2].partition("<style>")[0]
    unfinished = render_report(records[:2], None, **ORIGIN)
    assert "Blocks awake" in unfinished


@pytest.mark.parametrize(
    ("kept", "stopped", "told"),
    [
        (4, "", ()),
        (2, "", ("The best validation score is that of epoch 2, with 2 of 4 blocks awake;",)),
    ],
)
def test_why_a_network_is_not_as_deep_as_it_was(
    kept: int, stopped: str, told: tuple[str, ...]
) -> None:
    why = why_not_grown(history(), kept, stopped)
    assert len(why) == len(told)
    assert all(line.startswith(start) for line, start in zip(why, told, strict=True))


def test_why_no_more_blocks_woke() -> None:
    refused = woken(2, 2, 30, outcome="illegal", reason="max_parameters is 10")
    limited = [*history()[:2], epoch(3, {"h": 2}, refused)]
    assert why_not_grown(limited, 3) == ("No more than 2 of 4 blocks woke: max_parameters is 10.",)
    early = history()[:2]
    (line,) = why_not_grown(early, 2, "no better validation score in 1 epochs")
    assert line.endswith("with 2 of 4 blocks awake.")


def test_operations_have_a_word_for_their_size() -> None:
    assert format_flops(1.353e12) == "1.35 T"
    assert format_flops(7e18) == "7.00 E"
    assert format_flops(900.0) == "900.0"
    assert describe_compute(5e9, 0.0) == "5.00 G"
