from __future__ import annotations

from esper.leyline.controller import GrowthLimits
from esper.tasks.limits import common_limits
from esper.tasks.member import GROWTH_LIMIT

TWICE = GrowthLimits(parameters=GROWTH_LIMIT, flops=GROWTH_LIMIT)


def test_limits_are_those_that_all_tasks_have() -> None:
    assert common_limits(["digits_family", "image16_family"]) == TWICE
    assert common_limits(["digits"]) == GrowthLimits()
    assert common_limits(["digits_family", "digits"]) == GrowthLimits()
