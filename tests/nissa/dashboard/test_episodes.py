from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import Element

import pytest

from esper.nissa.dashboard import episodes
from tests.nissa.dashboard.stores import asked, deepening, growing, training
from tests.nissa.report.reading import having, parse, told, written


def lanes(folder: Path, low: float = 1, high: float = 20, width: float = 1000) -> Element:
    return parse(
        asked(
            folder,
            episodes.draw_lanes,
            0,
            0,
            epochs=(low, high),
            left=58,
            right=width - 14,
            width=width,
        )
    )


def test_lanes_show_stages_decisions_and_seeds_to_open(tmp_path: Path) -> None:
    growing(tmp_path)
    drawn = lanes(tmp_path)
    tips = told(drawn)
    assert "r0c0: conv_light, training, epochs 4 to 7, alpha 0.00" in tips
    assert "r0c0: conv_light, blending, epochs 8 to 11, alpha 0.25 to 1.00" in tips
    assert "after epoch 11: fossilize r0c0: done" in tips
    assert "never used" in written(drawn)
    (seed,) = having(drawn, "seed")
    assert (seed.get("data-seed"), seed.get("role"), seed.get("tabindex")) == ("0", "button", "0")
    assert "conv_light, germinated after epoch 3" in seed.get("aria-label", "")
    garden = asked(tmp_path, episodes.read_garden, 0, 0)
    assert (garden["slots"], garden["stacks"]) == (["r0c0", "r0c1"], [])
    assert garden["seeds"][0]["contribution"] == 10.0


def test_lanes_show_a_part_of_a_run_at_the_width_of_the_page(tmp_path: Path) -> None:
    growing(tmp_path)
    drawn = lanes(tmp_path, 8.5, 10, width=650)
    assert drawn.get("viewBox", "").startswith("0 0 1000.0 ")
    assert not any("fossilize r0c0" in tip or "training" in tip for tip in told(drawn))
    (seed,) = having(drawn, "hit")
    left, right = 58 / 0.65, (650 - 14) / 0.65
    assert float(seed.get("x", "")) == pytest.approx(left, abs=0.01)
    assert float(seed.get("width", "")) == pytest.approx(right - left, abs=0.02)


def test_a_deepened_network_has_a_lane_for_each_stack(tmp_path: Path) -> None:
    deepening(tmp_path)
    garden = asked(tmp_path, episodes.read_garden, 0, 0)
    assert garden["slots"] == garden["seeds"] == []
    text = "layers: 1 → 2 → 4 of 4 blocks awake"
    assert garden["stacks"] == [{"awake": 4, "blocks": 4, "text": text}]
    drawn = lanes(tmp_path, 1, 10)
    assert drawn.get("aria-label") == text
    assert len(having(drawn, "fossilized")) == 1 + 2 + 4
    (last, first) = asked(tmp_path, episodes.read_decisions, acted=True)["decisions"]
    assert (first["blocks_before"], first["blocks_after"], last["blocks_after"]) == (1, 2, 4)


def test_a_long_garden_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growing(tmp_path)
    monkeypatch.setattr(episodes, "MOST_EPOCHS", 5)
    monkeypatch.setattr(episodes, "MOST_LANE_EPOCHS", 5)
    garden = asked(tmp_path, episodes.read_garden, 0, 0)
    assert garden["every"] == 4
    assert len(garden["epochs"]) == 5
    assert len(having(lanes(tmp_path), "alpha", "blending")) == 1
    # A part of the run that is short enough is drawn epoch by epoch.
    assert len(having(lanes(tmp_path, 8, 11), "alpha", "blending")) == 4


def test_lanes_of_a_round_are_those_of_its_row(tmp_path: Path) -> None:
    training(tmp_path)
    drawn = asked(tmp_path, episodes.draw_lanes, 1, 0, epochs=(1, 3), left=58, right=586, width=600)
    assert [tip for tip in told(parse(drawn)) if "germinate" in tip] == [
        "after epoch 1: germinate r0c0 (blueprint norm): done"
    ]


def test_a_seed_has_a_life(tmp_path: Path) -> None:
    growing(tmp_path)
    life = asked(tmp_path, episodes.read_seed, 0, 0, 0)
    assert life is not None
    assert life["seed"]["fate"] == "fossilized"
    assert [stage["step"] for stage in life["stages"]] == list(range(4, 21))
    assert [(one["step"], one["op"]) for one in life["decisions"]] == [
        (3, "GERMINATE"),
        (7, "ADVANCE"),
        (11, "FOSSILIZE"),
    ]
    assert asked(tmp_path, episodes.read_seed, 0, 0, 7) is None


def test_a_decision_says_why(tmp_path: Path) -> None:
    training(tmp_path)
    found = asked(tmp_path, episodes.read_decisions, round=2, op="GERMINATE")["decisions"]
    assert len(found) == 1
    assert found[0]["heads"]["op"] == {"choice": "GERMINATE", "probability": 0.75, "valid": 2}
    assert found[0]["alternatives"] == {"op": [["WAIT", 0.25]]}
    assert found[0]["reward_terms"] == {"gain": 1.0, "rent": 0.0}
    assert found[0]["explanation"] is None


def test_decisions_are_filtered_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training(tmp_path)
    monkeypatch.setattr(episodes, "MOST_DECISIONS", 4)

    def ids(**conditions: object) -> list[int]:
        found = asked(tmp_path, episodes.read_decisions, **conditions)  # type: ignore[arg-type]
        return [one["id"] for one in found["decisions"]]

    assert ids() == [9, 8, 7, 6]
    assert ids(before=6) == [5, 4, 3, 2]
    assert ids(acted=True) == [7, 4, 1]
    assert ids(slot="r0c0", round=1) == [4]
    assert ids(outcome="illegal") == []


def test_what_was_foreseen_stands_beside_what_came(tmp_path: Path) -> None:
    training(tmp_path)
    found = asked(tmp_path, episodes.read_foreseen, 1)
    # Rewards 1, 2, 3, discounted by a half: 3, then 2 + 1.5, then 1 + 1.75.
    assert [(point[0], point[1]) for point in found["points"]] == [
        (1.0, 3.0),
        (1.0, 3.5),
        (1.0, 2.75),
    ]


def test_interactions_are_told(tmp_path: Path) -> None:
    training(tmp_path)
    worth = asked(tmp_path, episodes.read_garden, 0, 0)["worth"]
    assert [(one["kind"], one["slot"], one["other"], one["value"]) for one in worth] == [
        ("interaction", "r0c0", "r0c1", 2.0)
    ]
