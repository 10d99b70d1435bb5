"""Clipping, SGD and AdamW over several stacks against the plain functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.kasmina.training import OptimizerName
from esper.lab.population.parameter_stack import ParameterStack
from esper.lab.population.train_step import OwnerTraining, clip_coefficient, move
from tests.lab.population.kernels.agreement import draw, on_cuda

pytestmark = on_cuda

OWNERS = 9


def make_stack(
    rows: int, shapes: dict[str, tuple[int, ...]], seed: int, optimizer: OptimizerName
) -> ParameterStack:
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
    stack = ParameterStack(
        sizes,
        torch.float32,
        torch.device("cuda"),
        compute=torch.bfloat16,
        has_squares=optimizer == "adamw",
    )
    stack.resize([], rows)
    stack.flat.copy_(draw(*stack.flat.shape, seed=seed))
    stack.momentum.copy_(draw(*stack.flat.shape, seed=seed + 1))
    if stack.squares is not None:
        stack.squares.copy_(draw(*stack.flat.shape, seed=seed + 2).square())
    stack.refresh()
    return stack


def make_stacks(optimizer: OptimizerName) -> list[ParameterStack]:
    return [
        make_stack(4, {"weight": (40, 60), "bias": (3,), "spare": (5,)}, 1, optimizer),
        make_stack(3, {"weight": (7, 2)}, 3, optimizer),
        make_stack(2, {"weight": (6,)}, 5, optimizer),
    ]


def make_training(max_norm: float) -> OwnerTraining:
    """Return values of which everybody has its own; one has no momentum, one no clipping."""
    numbers = torch.arange(OWNERS, device="cuda", dtype=torch.float32)
    how = OwnerTraining.zeros(OWNERS, numbers)
    how.rates.copy_(0.1 + 0.05 * numbers)
    how.decays.copy_(0.01 * numbers)
    how.momenta.copy_(0.9 - 0.05 * numbers)
    how.momenta[3] = 0.0
    how.clips.copy_(max_norm * (1 + 0.1 * numbers))
    how.clips[5] = 0.0
    return how


def move_plainly(
    stacks: list[ParameterStack],
    gradients: list[Tensor],
    active: Tensor,
    partner: Tensor,
    how: OwnerTraining,
    reached: list[int],
) -> None:
    """Do in PyTorch what the kernels do; a stack's columns are reached up to a number."""
    own = torch.cat([each.square().sum(1) for each in gradients])
    squares = torch.where(partner >= 0, own + own[partner.clamp(min=0)], own)
    start = 0
    for stack, gradient, width in zip(stacks, gradients, reached, strict=True):
        entries = slice(start, start + len(stack))
        start += len(stack)
        learns = (active[entries] > 0)[:, None].expand_as(stack.flat).clone()
        learns[:, width:] = False
        factor = clip_coefficient(squares[entries], how.clips[entries])[:, None]
        move(stack, gradient * factor, learns, how.of(entries))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_everybody_learns_as_in_pytorch(max_norm: float, optimizer: OptimizerName) -> None:
    from esper.lab.population.kernels.optimizer import Optimizer, Owners

    plain, fast = make_stacks(optimizer), make_stacks(optimizer)
    # The last stack's networks are gates of the second's: 0 of 2 and 1 of 0.
    partner = torch.tensor([-1, -1, -1, -1, 8, -1, 7, 6, 4], device="cuda")
    active = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1], device="cuda")
    how = make_training(max_norm)
    # Some have just begun, others have long been at it, and one has never learned.
    steps = torch.tensor([1, 40, 0, 5, 1, 2, 3, 900, 1], device="cuda")
    # No gradient reaches the spare tensor of the first stack.
    columns = [stack.columns()[:2] for stack in fast]
    kernels = Optimizer(
        [
            Owners(s.flat, s.momentum, s.squares, s.used, c)
            for s, c in zip(fast, columns, strict=True)
        ],
        active,
        partner,
        how,
    )
    tensors = [
        [draw(len(s), size, seed=20 + n) for n, (_, size) in enumerate(c)]
        for s, c in zip(plain, columns, strict=True)
    ]
    tensors[0][0][1] = torch.nan
    gradient = torch.cat([t.flatten() for each in tensors for t in each]).bfloat16()
    flat = [
        torch.cat([*each, torch.zeros(len(s), s.width - sum(t.shape[1] for t in each)).cuda()], 1)
        for s, each in zip(plain, tensors, strict=True)
    ]
    flat = [each.bfloat16().float() for each in flat]
    widths = [sum(size for _, size in each) for each in columns]
    for _ in range(3):
        how.correct(steps)
        kernels.step(gradient)
        move_plainly(plain, flat, active, partner, how, widths)
        steps += active
    for one, other in zip(fast, plain, strict=True):
        pairs = [(one.flat, other.flat), (one.momentum, other.momentum)]
        if one.squares is not None and other.squares is not None:
            pairs.append((one.squares, other.squares))
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    for one, width in zip(fast, widths, strict=True):
        moved = one.used[:, :width].float()
        torch.testing.assert_close(
            moved, one.flat[:, :width].bfloat16().float(), rtol=1e-2, atol=1e-2, equal_nan=True
        )
    assert bool(torch.isnan(fast[0].flat[1, 0]))
    assert bool(torch.isfinite(fast[0].flat[[0, 2, 3]]).all())
    # What was not to move has not.
    assert torch.equal(fast[0].flat[2], make_stacks(optimizer)[0].flat[2])
    assert torch.equal(fast[0].flat[:, widths[0] :], make_stacks(optimizer)[0].flat[:, widths[0] :])
