"""Clipping and one step of SGD or AdamW for stacked networks, as `torch.optim` takes it for one.

An owner is whoever has parameters: a host, a seed or a gate. All of them are numbered, stack by
stack, and each learns in its own way: `OwnerTraining`. The kernels (`kernels.optimizer`) take the
same steps in two launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.population.parameter_stack import ParameterStack
from esper.tasks.training import EPSILON, SECOND_BETA


@dataclass(frozen=True, slots=True)
class OwnerTraining:
    """How every owner learns: tensors [owners] of their parameters' precision, kept in place."""

    rates: Tensor
    decays: Tensor
    momenta: Tensor
    clips: Tensor
    """Norm to which a gradient is clipped; 0 is off."""
    first: Tensor
    """What AdamW multiplies its mean of gradients by, which began at zero; for SGD nobody reads."""
    second: Tensor
    """The same for the root of its mean of squares."""

    @classmethod
    def zeros(cls, owners: int, like: Tensor) -> OwnerTraining:
        """Return memory for some owners."""
        return cls(*(like.new_zeros(owners) for _ in range(6)))

    def of(self, owners: slice) -> OwnerTraining:
        """Return that of some owners, as columns [n, 1]."""
        return OwnerTraining(
            *(getattr(self, name)[owners][:, None] for name in OwnerTraining.__slots__)
        )

    def correct(self, steps: Tensor) -> None:
        """Make up for moments that began at zero so many steps ago, int64 [owners]."""
        # In double precision: in single, 1 - 0.999 has four digits. Who has taken no step yet does
        # not learn, and is spared an infinity.
        taken = steps.clamp(min=1).to(torch.float64)
        self.first.copy_(1 / (1 - self.momenta.to(torch.float64) ** taken))
        self.second.copy_((1 - torch.full_like(taken, SECOND_BETA) ** taken).rsqrt())


def clip_coefficient(square_norm: Tensor, max_norm: Tensor) -> Tensor:
    """Return the factor [n] that brings each network's gradient to at most its norm; 0 is off."""
    factor = (max_norm / (square_norm.sqrt() + 1e-6)).clamp(max=1.0)
    return torch.where(max_norm > 0, factor, torch.ones_like(factor))


@torch.no_grad()
def move(stack: ParameterStack, gradient: Tensor, active: Tensor, how: OwnerTraining) -> None:
    """Move what is `active` ([n, 1] or [n, width]) by one step; the rest stays as it is.

    `how` has columns [n, 1]. A stack that keeps squares takes a step of AdamW, any other of SGD.
    """
    if stack.squares is None:
        _sgd(stack, gradient, active, how)
    else:
        _adamw(stack, stack.squares, gradient, active, how)


def _sgd(stack: ParameterStack, gradient: Tensor, active: Tensor, how: OwnerTraining) -> None:
    gradient = gradient + how.decays * stack.flat
    # `where`, not a product: zero times NaN would spoil a network that has no momentum.
    carried = torch.where(how.momenta > 0, how.momenta * stack.momentum, 0.0)
    velocity = carried + gradient
    _put(stack.momentum, velocity, active)
    _put(stack.flat, stack.flat - how.rates * velocity, active)


def _adamw(
    stack: ParameterStack, squares: Tensor, gradient: Tensor, active: Tensor, how: OwnerTraining
) -> None:
    momentum = torch.lerp(stack.momentum, gradient, 1 - how.momenta)
    square = SECOND_BETA * squares + (1 - SECOND_BETA) * gradient.square()
    step = how.first * momentum / (how.second * square.sqrt() + EPSILON)
    _put(stack.momentum, momentum, active)
    _put(squares, square, active)
    # The decay is no part of the gradient: it does not enter the moments.
    _put(stack.flat, stack.flat * (1 - how.rates * how.decays) - how.rates * step, active)


def _put(where: Tensor, values: Tensor, active: Tensor) -> None:
    where.copy_(torch.where(active, values, where))
