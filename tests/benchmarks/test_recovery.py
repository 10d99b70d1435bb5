"""The demonstration of a rescue: what it asks for can be asked, and it judges what it saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery import ARMS, CERTAIN, HEADS, SICK, as_table, judge, make_one_sided
from esper.leyline.actions import LifecycleOp
from esper.simic.training.config import compare_settings, get_recipe
from esper.tamiyo.controllers.policy_file import load_policy
from esper.utils.settings import change_settings


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_the_collapsed_run_can_be_continued_in_every_way(arm: Any) -> None:
    sick = change_settings(get_recipe("digits"), SICK)
    assert sick.policy.floor.kind == "off"
    assert bool(compare_settings(sick, change_settings(sick, arm.settings))) == bool(arm.settings)


def test_it_starts_from_heads_that_are_certain(tmp_path: Path) -> None:
    make_one_sided(tmp_path / "start", seed=0)
    network = load_policy(tmp_path / "start").network
    for head in HEADS:
        first, second = getattr(network, f"{head}_head")[-1].bias.topk(2).values.tolist()
        assert first - second == pytest.approx(CERTAIN)


def _round(number: int, entropy: float | None, from_uniform: float) -> dict[str, Any]:
    head = {"entropy": entropy, "from_uniform": from_uniform, "chosen": 1}
    return {
        "round": number,
        "return_mean": 0.5,
        "gain_mean": 1.0,
        "op_counts": {op.name: 1 for op in LifecycleOp},
        "heads": dict.fromkeys(HEADS, head),
    }


def _phases(**changed: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    dead = [_round(0, 0.5, 1.0), _round(1, 0.001, 100.0)]
    found = {
        "collapsed": dead,
        "left as it is": dead,
        "floors and exploration KL": [_round(2, 0.001, 30.0)],
        "the same, heads reset": [_round(2, 0.8, 0.2)],
    }
    assert {*found} == {"collapsed", *(arm.name for arm in ARMS)}
    return found | changed


def test_a_rescue_is_told_from_a_collapse_that_lasts() -> None:
    assert [row[-1] for row in judge(_phases())] == ["yes"] * 4
    opened = [_round(2, 0.5, 1.0)]  # neither collapsed nor dead
    for name, wrong in (
        ("collapsed", opened),
        ("left as it is", opened),
        ("floors and exploration KL", [_round(2, 0.001, 100.0)]),
        ("the same, heads reset", [_round(2, 0.39, 1.0)]),
        ("the same, heads reset", [_round(2, None, 1.0)]),
    ):
        answers = {row[0].split(":")[0]: row[-1] for row in judge(_phases(**{name: wrong}))}
        assert answers[name] == "no", name


def test_a_row_has_the_first_and_the_last_round() -> None:
    header, rows = as_table(_phases())
    assert all(len(row) == len(header) for row in rows)
    assert rows[0][:2] == ["collapsed, rounds 1 to 2", "0.500 to 0.001"]
