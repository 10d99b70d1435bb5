"""The limits on growth that several tasks and families have in common."""

from __future__ import annotations

from collections.abc import Iterable

from esper.leyline.controller import GrowthLimits
from esper.tasks.family import FAMILIES, get_family
from esper.tasks.task import TaskConfig, get_task


def common_limits(names: Iterable[str]) -> GrowthLimits:
    """Return the limits that hold on all of these tasks and families; none where they differ."""
    configs = [_config(name) for name in names]
    parameters = {config.param_limit for config in configs}
    flops = {config.flop_limit for config in configs}
    return GrowthLimits(
        parameters=parameters.pop() if len(parameters) == 1 else None,
        flops=flops.pop() if len(flops) == 1 else None,
    )


def _config(name: str) -> TaskConfig:
    """Return the settings of a task, or of a member that stands for its family."""
    if name in FAMILIES:
        return get_family(name).members("train")[0].task().config
    return get_task(name).config
