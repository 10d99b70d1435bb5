"""Cost of sudden changes of amplitude: slow ramps cost less than fast ones."""

from __future__ import annotations

from torch import Tensor

from esper.simic.rewards.view import StepView


def shock(view: StepView) -> Tensor:
    """Return [R], 0 or less: squared changes of alpha, weighted by the size of the seed."""
    config = view.config.shock
    change = view.after.alpha - view.before.alpha
    host = view.before.host_params.float().clamp(min=max(config.min_host, 1.0))
    size = view.before.slot_params.float() / host[:, None]
    cost = config.weight * (change.square() * size).sum(1)
    return -(cost if config.limit is None else cost.clamp(max=config.limit))
