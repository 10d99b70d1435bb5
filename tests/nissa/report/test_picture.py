from __future__ import annotations

import re
from dataclasses import replace

import pytest

from esper.leyline.records import EpochRecord
from esper.nissa.report.picture import DEFAULT_TITLE, growth_picture
from tests.nissa.report.reading import SVG, having, parse, told, written
from tests.nissa.report.runs import growing_run, make_decision, make_epoch, make_slot

HOSTILE = '</text><script>alert("1")</script>&\'\x1b[31m\x00\u202e\udcff'


@pytest.fixture
def history() -> list[EpochRecord]:
    return growing_run()


def test_picture_is_xml_with_a_name_a_description_and_a_role(history: list[EpochRecord]) -> None:
    root = parse(growth_picture(history, title="Digits & more"))
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"]
    assert root[0].text == "Digits & more"
    assert "Digits & more" in written(root)
    assert "60 epochs" in (root[1].text or "")
    assert "conv_light, germinated after epoch 25, fossilized after epoch 44" in (
        root[1].text or ""
    )


def test_every_slot_blueprint_and_contribution_is_written(history: list[EpochRecord]) -> None:
    texts = written(parse(growth_picture(history)))
    for text in ("r0c0", "r0c1", "r0c2", "norm", "conv_light", "−0.82 ± 0.31", "+1.87 ± 0.42"):
        assert text in texts
    assert "never used" in texts


def test_legend_names_every_stage_and_every_mark(history: list[EpochRecord]) -> None:
    texts = written(parse(growth_picture(history)))
    for text in ("germinated", "training", "blending", "holding", "fossilized", "cooldown"):
        assert text in texts
    for text in ("germinate", "advance", "set alpha target", "fossilize", "prune"):
        assert text in texts


def test_twin_is_drawn_only_where_one_ran(history: list[EpochRecord]) -> None:
    with_twin = parse(growth_picture(history))
    assert len(having(with_twin, "curve", "twin")) == 1
    assert any(text.startswith("twin ") for text in written(with_twin))
    without = parse(growth_picture(growing_run(with_twin=False)))
    assert len(having(without, "curve", "grown")) == 1
    assert not having(without, "curve", "twin")
    assert not any("twin" in text for text in written(without) + told(without))


def test_same_history_gives_the_same_bytes(history: list[EpochRecord]) -> None:
    assert growth_picture(history) == growth_picture(tuple(growing_run()))


def test_hostile_names_stay_text_in_labels_and_tooltips(history: list[EpochRecord]) -> None:
    hostile = [
        replace(
            record,
            slots=tuple(
                replace(
                    slot,
                    name=HOSTILE + slot.name,
                    blueprint=slot.blueprint and HOSTILE,
                    stage=HOSTILE if slot.stage == "HOLDING" else slot.stage,
                )
                for slot in record.slots
            ),
            decision=record.decision
            and replace(
                record.decision,
                slot=record.decision.slot and HOSTILE + record.decision.slot,
                blueprint=record.decision.blueprint and HOSTILE,
                outcome=HOSTILE,
                reason=HOSTILE,
            ),
        )
        for record in history
    ]
    picture = growth_picture(hostile, title=HOSTILE)
    picture.encode()
    root = parse(picture)
    assert not list(root.iter(f"{SVG}script"))
    assert "<script" not in picture
    tips = told(root)
    assert any("</text><script>" in tip and r"\x1b[31m\x00\u202e\udcff" in tip for tip in tips)


def test_no_script_and_nothing_from_elsewhere(history: list[EpochRecord]) -> None:
    picture = growth_picture(history)
    assert not re.search(r"href|src=|url\(|@import|<script|\son\w+=", picture)
    assert "prefers-color-scheme:dark" in picture


def test_text_is_readable_on_a_phone(history: list[EpochRecord]) -> None:
    picture = growth_picture(history)
    _, _, width, _ = map(float, (parse(picture).get("viewBox") or "").split())
    found = re.search(r"max-width:520px\)\{\.growth text\{font-size:(\d+)px", picture)
    assert found
    # A page on a 390-pixel phone leaves about 366 pixels for the picture.
    assert int(found[1]) * 366 / width >= 11


def test_an_empty_history_says_so() -> None:
    root = parse(growth_picture([]))
    assert written(root) == [DEFAULT_TITLE, "No epochs were recorded yet."]


def test_one_epoch_is_enough() -> None:
    root = parse(growth_picture([make_epoch(1, 55.0, decision=None)]))
    assert "score 55.00" in written(root)
    assert having(root, "curve", "grown")[0].get("d", "").endswith("h0")


def test_scores_may_be_negative_losses() -> None:
    history = [make_epoch(epoch, -2.0 / epoch) for epoch in range(1, 21)]
    texts = written(parse(growth_picture(history)))
    assert "score −0.1000" in texts
    assert "−1.5" in texts


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -1e300, 0.0, 1e-9, 7e11])
def test_strange_scores_do_not_break_the_picture(score: float) -> None:
    picture = growth_picture([make_epoch(epoch, score) for epoch in (1, 2, 3)])
    parse(picture)
    assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', picture)


def test_long_histories_stay_small() -> None:
    stages = ("TRAINING", "BLENDING", "PRUNED")
    history = [
        make_epoch(
            epoch,
            50 + epoch % 7,
            slots=tuple(
                make_slot(name, stage=stages[epoch % 3], blueprint="norm", alpha=(epoch % 10) / 10)
                for name in "abcd"
            ),
            decision=make_decision("ADVANCE", "abcd"[epoch % 4]),
        )
        for epoch in range(1, 5001)
    ]
    picture = growth_picture(history)
    parse(picture)
    assert len(picture) < 2_000_000
    assert "labels found no room" in picture


def test_a_picture_of_very_many_slots_is_bounded() -> None:
    names = [f"slot{number}" for number in range(150)]
    stages = ("TRAINING", "BLENDING", "HOLDING")
    history = [
        make_epoch(
            epoch,
            50.0,
            slots=tuple(
                make_slot(name, stage=stages[epoch % 3], blueprint="norm", alpha=(epoch % 10) / 10)
                for name in names
            ),
        )
        for epoch in range(1, 601)
    ]
    picture = growth_picture(history)
    parse(picture)
    assert len(picture) < 3_500_000
    assert "110 slots not drawn" in picture
