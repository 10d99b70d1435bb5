from __future__ import annotations

from pathlib import Path

import pytest

from esper.nissa.dashboard import episodes
from tests.nissa.dashboard.stores import asked, deepening, growing, training


def test_a_garden_has_a_stretch_for_each_stage(tmp_path: Path) -> None:
    growing(tmp_path)
    garden = asked(tmp_path, episodes.read_garden, 0, 0)
    assert garden["slots"] == ["r0c0", "r0c1"]
    assert garden["stacks"] == []
    assert [(span["stage"], span["from"], span["to"]) for span in garden["spans"]] == [
        ("TRAINING", 3, 7),
        ("BLENDING", 7, 11),
        ("FOSSILIZED", 11, 20),
    ]
    assert garden["spans"][1]["alpha"] == [[8, 0.25], [9, 0.5], [10, 0.75], [11, 1.0]]
    assert garden["spans"][2]["alpha"] == [[12, 1.0], [20, 1.0]]
    assert [mark["op"] for mark in garden["marks"]] == ["GERMINATE", "ADVANCE", "FOSSILIZE"]
    assert garden["seeds"][0]["contribution"] == 10.0


def test_a_deepened_network_has_a_lane_for_each_stack(tmp_path: Path) -> None:
    deepening(tmp_path)
    garden = asked(tmp_path, episodes.read_garden, 0, 0)
    assert garden["slots"] == garden["spans"] == garden["seeds"] == []
    assert garden["stacks"] == [
        {"name": "layers", "blocks": 4, "spans": [(0.0, 3, 1), (3, 5.5, 2), (5.5, 10, 4)]}
    ]
    (last, first) = asked(tmp_path, episodes.read_decisions, acted=True)["decisions"]
    assert (first["blocks_before"], first["blocks_after"], last["blocks_after"]) == (1, 2, 4)


def test_a_long_garden_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growing(tmp_path)
    monkeypatch.setattr(episodes, "MOST_EPOCHS", 5)
    garden = asked(tmp_path, episodes.read_garden, 0, 0)
    assert garden["every"] == 4
    assert [span["stage"] for span in garden["spans"]] == ["TRAINING", "BLENDING", "FOSSILIZED"]
    assert len(garden["epochs"]) == 5


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
