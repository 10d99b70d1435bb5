from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from esper.leyline.reasons import (
    decision_line,
    describe_kept,
    epoch_line,
    format_contribution,
    format_gain,
    format_score,
)
from esper.leyline.records import (
    DecisionRecord,
    EpochRecord,
    ModuleRecord,
    RunSummary,
    SeedRecord,
    SizeRecord,
    SlotRecord,
    best_by_size,
    copy_fields,
    seed_records,
)


def slot(
    stage: str, contribution: float | None = None, *, name: str = "a", parameters: int = 7
) -> SlotRecord:
    empty = stage == "DORMANT"
    return SlotRecord(
        name=name,
        stage=stage,
        blueprint=None if empty else "norm",
        alpha=0.0,
        alpha_target=0.0,
        parameters=0 if empty else parameters,
        flops=0 if empty else 3 * parameters,
        epochs_in_stage=0,
        age=0,
        contribution=contribution,
        contribution_se=None if contribution is None else 0.5,
    )


def epoch(number: int, *slots: SlotRecord, decision: DecisionRecord | None = None) -> EpochRecord:
    return EpochRecord(
        epoch=number,
        train_loss=None,
        val_loss=1.5,
        val_score=50.0,
        twin_score=None,
        stabilized=False,
        plateau_epochs=0,
        parameters=100,
        flops=300,
        slots=slots,
        decision=decision,
        seconds=0.25,
    )


WAIT = DecisionRecord(
    op="WAIT",
    slot=None,
    blueprint=None,
    style=None,
    tempo=None,
    alpha_target=None,
    alpha_speed=None,
    alpha_curve=None,
    outcome="done",
    reason="legal",
)


@pytest.mark.parametrize("decision", [None, WAIT], ids=["last", "wait"])
def test_an_epoch_survives_json(decision: DecisionRecord | None) -> None:
    record = epoch(3, slot("BLENDING", 1.25), slot("DORMANT", name="b"), decision=decision)
    assert EpochRecord.from_mapping(json.loads(json.dumps(record.to_mapping()))) == record


def test_a_summary_survives_json() -> None:
    seed = SeedRecord(
        slot="a",
        blueprint="norm",
        germinated=1,
        ended=None,
        fate="blending",
        parameters=7,
        flops=21,
        contribution=None,
        contribution_se=None,
    )
    summary = RunSummary(
        task="digits",
        controller="heuristic",
        seed=0,
        epochs=60,
        parameters_before=100,
        parameters_after=107,
        flops_before=300,
        flops_after=321,
        val_score=95.0,
        test_score=None,
        twin_val_score=94.0,
        twin_test_score=None,
        seeds=(seed,),
        seconds=1.0,
        kept_epoch=40,
        twin_kept_epoch=60,
    )
    assert describe_kept(summary) == "epoch 40 kept, the best validated of 60"
    assert describe_kept(dataclasses.replace(summary, kept_epoch=60)) == "epoch 60 kept, the last"
    early = dataclasses.replace(summary, stopped="on_epoch raised StopIteration")
    assert describe_kept(early).endswith("of 60; stopped early: on_epoch raised StopIteration")


def lives(*stages: str) -> list[tuple[int, int | None, str]]:
    history = [epoch(number, slot(stage)) for number, stage in enumerate(stages, start=1)]
    return [(seed.germinated, seed.ended, seed.fate) for seed in seed_records(history)]


def test_no_epochs_and_no_seeds_are_no_lives() -> None:
    assert seed_records([]) == ()
    assert lives("DORMANT", "DORMANT") == []


def test_a_seed_is_dated_by_the_decisions_that_made_and_ended_it() -> None:
    assert lives("DORMANT", "GERMINATED", "TRAINING") == [(1, None, "training")]
    assert lives("DORMANT", "GERMINATED", "PRUNED", "EMBARGOED") == [(1, 2, "pruned")]
    assert lives("DORMANT", "HOLDING", "FOSSILIZED", "FOSSILIZED") == [(1, 2, "fossilized")]


def test_a_slot_used_twice_has_two_lives() -> None:
    cooling = ("PRUNED", "EMBARGOED", "RESETTING", "DORMANT")
    assert lives("DORMANT", "GERMINATED", *cooling, "GERMINATED", "TRAINING") == [
        (1, 2, "pruned"),
        (6, None, "training"),
    ]


def test_the_last_measurement_is_kept_when_a_later_epoch_has_none() -> None:
    history = [epoch(1, slot("BLENDING", 1.0)), epoch(2, slot("HOLDING", 2.0))]
    history += [epoch(3, slot("HOLDING")), epoch(4, slot("PRUNED", parameters=0))]
    (seed,) = seed_records(history)
    assert (seed.contribution, seed.contribution_se, seed.parameters) == (2.0, 0.5, 7)


def test_slots_live_apart() -> None:
    history = [
        epoch(1, slot("DORMANT"), slot("HOLDING", name="b")),
        epoch(2, slot("GERMINATED"), slot("FOSSILIZED", name="b")),
    ]
    assert [(seed.slot, seed.fate) for seed in seed_records(history)] == [
        ("b", "fossilized"),
        ("a", "germinated"),
    ]


def test_a_record_comes_back_from_plain_data() -> None:
    for shape in ((4, 8, 8), (), None):
        record = ModuleRecord(
            path="blocks.0", kind="Sequential", parameters=44, shape=shape, slots=("r0c0",)
        )
        assert ModuleRecord.from_mapping(json.loads(json.dumps(record.to_mapping()))) == record


def test_a_record_of_another_kind_takes_over_what_both_have() -> None:
    @dataclasses.dataclass(frozen=True)
    class Row:
        stage: str
        alpha: float | None = None
        slot: str | None = None
        unknown: int | None = None

    found = copy_fields(Row, slot("HOLDING"), slot="a", alpha=0.5)
    assert found == Row(stage="HOLDING", alpha=0.5, slot="a", unknown=None)


def test_every_size_a_network_had_has_its_best_epoch() -> None:
    """A seed in isolation is not counted; one that was pruned gives the size back."""

    def scored(number: int, score: float, stage: str) -> EpochRecord:
        here = slot(stage)
        return dataclasses.replace(
            epoch(number, here),
            val_score=score,
            parameters=100 + here.parameters,
            flops=300 + here.flops,
        )

    told = [(50.0, "DORMANT"), (52.0, "TRAINING"), (55.0, "BLENDING"), (54.0, "HOLDING")]
    history = [scored(1 + index, *each) for index, each in enumerate([*told, (51.0, "DORMANT")])]
    assert best_by_size(history) == (
        SizeRecord(parameters=100, flops=300, val_score=52.0, epoch=2),
        SizeRecord(parameters=107, flops=321, val_score=55.0, epoch=3),
    )
    assert best_by_size([]) == ()


def test_a_loss_is_told_as_a_loss_and_as_finely_as_it_is_small() -> None:
    assert (format_score(91.919), format_score(-0.00123456)) == ("91.92", "loss 0.001235")
    assert format_gain(91.0, 90.5) == "+0.50"
    assert format_gain(-0.0011, -0.0013) == "loss lower by 0.0002"
    assert format_gain(-0.0013, -0.0011) == "loss higher by 0.0002"
    assert format_contribution(1.234, 0.5) == "+1.23 ± 0.50"
    assert format_contribution(0.00312, 0.00047) == "+0.00312 ± 0.00047"
    assert format_contribution(0.0) == "+0.00"
    # Value and error have the same decimals.
    assert format_contribution(0.01, 0.0074) == "+0.0100 ± 0.0074"
    assert format_contribution(0.667, 0.667) == "+0.67 ± 0.67"
    assert format_contribution(0.0, 0.0) == "+0.00 ± 0.00"
    of_loss = dataclasses.replace(epoch(1), val_score=-0.0021, val_loss=0.0021, twin_score=-0.0022)
    assert epoch_line(of_loss) == "val loss 0.0021  twin loss 0.0022  100 parameters"
    assert epoch_line(epoch(1)) == "val score 50.00  val loss 1.5000  100 parameters"


def test_a_decision_fits_in_a_line() -> None:
    planted = dataclasses.replace(WAIT, op="GERMINATE", slot="a", blueprint="norm")
    assert decision_line(4, planted) == "epoch 4: GERMINATE a norm"
    refused = dataclasses.replace(WAIT, op="PRUNE", slot="a", outcome="illegal", reason="too young")
    assert decision_line(4, refused) == "epoch 4: PRUNE a (too young)"
    assert [one.is_act for one in (planted, refused, WAIT)] == [True, False, False]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("flops",), [1, 2]),
        (("val_score",), "x"),
        (("stabilized",), None),
        (("slots",), [{"name": "a"}]),
        (("slots", 0, "alpha"), "x"),
        (("decision", "op"), 3),
        (("unknown",), 1),
    ],
    ids=str,
)
def test_a_saved_epoch_with_another_type_is_refused(place: tuple[Any, ...], value: Any) -> None:
    data = json.loads(json.dumps(epoch(3, slot("BLENDING", 1.25), decision=WAIT).to_mapping()))
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(TypeError):
        EpochRecord.from_mapping(data)
