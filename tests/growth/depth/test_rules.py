from __future__ import annotations

from typing import Any

import pytest

from esper.growth.depth.rules import Plateau, Progress, Schedule, Slope, make_rule
from esper.leyline.errors import UsageError


def progress(losses: list[float], *, step: int = 1, awake: int = 1, **others: Any) -> Progress:
    flops = [(10.0 * (number + 1), loss) for number, loss in enumerate(losses)]
    return Progress(
        **{
            "step": step,
            "total_steps": 100,
            "awake": {"h": awake},
            "blocks": {"h": 4},
            "doubled": {"h": 2 * awake},
            "flops": 10.0 * len(losses),
            "flops_per_step": 1.0,
            "flops_per_step_doubled": 1.8,
            "losses": flops,
            "windows_since_growth": len(losses),
            **others,
        }
    )


def test_plateau_compares_the_last_windows_with_those_before() -> None:
    rule = Plateau(windows=2, least=0.1)
    assert rule(progress([4, 4, 4])) is None
    assert rule(progress([4, 4, 4, 4])) == {"h": 2}
    assert rule(progress([4, 4, 3, 3])) is None
    assert rule(progress([9, 9, 4, 4, 3.9, 3.9])) == {"h": 2}
    # Windows before the last growth do not count.
    assert rule(progress([4, 4, 4, 4], windows_since_growth=3)) is None


def test_slope_compares_what_a_flop_buys_with_what_it_bought() -> None:
    rule = Slope(windows=1)
    # It bought 1 a window, and a step will cost 1.8 times as much.
    assert rule(progress([9, 8])) is None
    assert rule(progress([9, 8, 7.4])) is None
    assert rule(progress([9, 8, 7.5])) == {"h": 2}
    assert rule(progress([9, 8, 7.5], flops_per_step_doubled=3.0)) is None
    assert rule(progress([9, 9, 9])) == {"h": 2}
    assert rule(progress([9, 10, 9])) is None


@pytest.mark.parametrize("rule", [Plateau(), Slope()])
def test_all_blocks_are_awake_by_sixty_percent(rule: Any) -> None:
    falling = [9.0 - number for number in range(4)]
    for step, awake, expected in (
        (29, 1, None),
        (30, 1, {"h": 2}),
        (59, 2, None),
        (60, 2, {"h": 4}),
    ):
        assert rule(progress(falling, step=step, awake=awake)) == expected


def test_a_schedule_is_steps_and_blocks() -> None:
    rule = make_rule("schedule", {30: 4, 10: 2})
    assert isinstance(rule, Schedule)
    assert list(rule.moments(None, {"h": 1}, lambda awake: awake).items()) == [(10, 2), (30, 4)]
    with pytest.raises(UsageError, match="whole steps from 1, got 0"):
        Schedule({0: 3})
