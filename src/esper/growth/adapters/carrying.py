"""Keeping optimizers in step with adapters whose rank changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.leyline.errors import UsageError

_SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""What optimizers divide by; a zero there would make the first steps of a new component long."""


def inner_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return optimizers without what trainers wrap around them."""
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    found = []
    for one in given:
        # Accelerate and Lightning keep the owner's optimizer under this name.
        while isinstance(inner := getattr(one, "optimizer", None), Optimizer):
            one = inner
        if not isinstance(one, Optimizer):
            raise UsageError(
                "adapters.step takes a torch.optim.Optimizer or several of them, got a "
                f"{type(one).__name__}"
            )
        if type(one).__name__ in ("LBFGS", "ZeroRedundancyOptimizer"):
            raise UsageError(
                f"{type(one).__name__} keeps no state of its own for every parameter, so ranks "
                "cannot change under it; use AdamW or SGD"
            )
        found.append(one)
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


def swap(optimizers: Sequence[Optimizer], old: nn.Parameter, new: nn.Parameter) -> None:
    """Let optimizers hold one parameter in place of another, with its group and state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new if one is old else one for one in group["params"]]
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def resize_state(
    optimizers: Sequence[Optimizer], old: Tensor, new: nn.Parameter, kept: Tensor, dim: int
) -> None:
    """Keep the state of the components that are kept; new ones have no momentum.

    Squares of gradients start at the mean of those kept: optimizers correct them only in the first
    steps of a parameter, so that zeros would give new components steps several times too long.
    """
    added = new.shape[dim] - len(kept)
    for optimizer in optimizers:
        state = optimizer.state.get(new)
        if not state:
            continue
        if not len(kept):
            # All components are new: so is the state.
            del optimizer.state[new]
            continue
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.shape != old.shape:
                continue
            own = value.index_select(dim, kept)
            shape = list(own.shape)
            shape[dim] = added
            fresh = own.new_zeros(shape)
            if key in _SECOND_MOMENTS:
                fresh += own.mean(dim, keepdim=True)
            state[key] = torch.cat([own, fresh], dim)
