"""Keeping optimizers in step with adapters whose rank changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

from esper.growth.depth.blocks import unwrap_optimizers
from esper.leyline.errors import UsageError


def inner_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return optimizers unwrapped; those under which ranks cannot change are refused."""
    found = unwrap_optimizers(optimizer)
    for one in found:
        if type(one).__name__ in ("LBFGS", "ZeroRedundancyOptimizer"):
            raise UsageError(
                f"{type(one).__name__} keeps no state of its own for every parameter, so ranks "
                "cannot change under it; use AdamW or SGD"
            )
    return found


def check_held(parameters: Iterable[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that do not hold all parameters."""
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    missing = sum(id(parameter) not in held for parameter in parameters)
    if missing:
        raise UsageError(
            f"the optimizer does not hold {missing} parameters of the adapters; make it from "
            "adapters.parameters(), after adapters.measure(...) where that is called"
        )


def swap(
    optimizers: Sequence[Optimizer], old: nn.Parameter, new: nn.Parameter, *, keeps_state: bool
) -> None:
    """Let optimizers hold one parameter in place of another, in its group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new if one is old else one for one in group["params"]]
        state = optimizer.state.pop(old, None)
        if state is not None and keeps_state:
            optimizer.state[new] = state
