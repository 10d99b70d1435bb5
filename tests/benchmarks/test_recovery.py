"""The demonstration of a rescue: what it asks for can be asked, and it judges what it saw."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.recovery import ARMS, CALM, FRAGILE, HEADS, as_table, judge
from esper.leyline.actions import LifecycleOp
from esper.leyline.settings import change_settings
from esper.simic.training.config import compare_settings
from esper.simic.training.recipes import get_recipe


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_the_collapsed_run_can_be_continued_in_every_way(arm: Any) -> None:
    recipe = get_recipe("digits")
    sick = change_settings(recipe, FRAGILE)
    assert compare_settings(sick, change_settings(sick, {**CALM, **arm.settings}))
    # With ordinary steps: of how the recipe limits and weighs them nothing is left out.
    calm = change_settings(sick, CALM).ppo
    limits = ("target_kl", "clip", "max_grad_norm", "head_weights")
    for name in ("learning_rate", "lr_multipliers", *limits):
        assert getattr(calm, name) == getattr(recipe.ppo, name), name


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
        "collapse": dead,
        "left alone": dead,
        "entropy and its floor penalty": dead,
        "floors and exploration KL": [_round(2, 0.001, 30.0)],
        "the same, heads reset": [_round(2, 0.8, 0.2)],
    }
    assert {*found} == {"collapse", *(arm.name for arm in ARMS)}
    return found | changed


def test_a_rescue_is_told_from_a_collapse_that_lasts() -> None:
    assert [row[-1] for row in judge(_phases())] == ["yes"] * 5
    opened = [_round(2, 0.5, 1.0)]  # neither collapsed nor dead
    for name, wrong in (
        ("collapse", opened),
        ("left alone", opened),
        ("floors and exploration KL", [_round(2, 0.001, 60.0)]),
        ("the same, heads reset", [_round(2, 0.39, 1.0)]),
        ("the same, heads reset", [_round(2, None, 1.0)]),
    ):
        answers = {row[0].split(":")[0]: row[-1] for row in judge(_phases(**{name: wrong}))}
        assert answers[name] == "no", name


def test_a_row_has_the_first_and_the_last_round() -> None:
    header, rows = as_table(_phases())
    assert all(len(row) == len(header) for row in rows)
    assert rows[0][:2] == ["collapse, rounds 1 to 2", "0.500 to 0.001"]
