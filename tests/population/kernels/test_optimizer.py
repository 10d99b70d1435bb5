"""Clipping and SGD over several stacks against the plain functions."""

from __future__ import annotations

import pytest
import torch

from esper.population.parameter_stack import ParameterStack, clip_coefficient, sgd_step
from tests.population.kernels.agreement import draw, on_cuda

pytestmark = on_cuda

RATES = {"momentum": 0.9, "weight_decay": 0.01}


def make_stack(rows: int, shapes: dict[str, tuple[int, ...]], seed: int) -> ParameterStack:
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
    stack = ParameterStack(sizes, torch.float32, torch.device("cuda"), compute=torch.bfloat16)
    stack.resize([], rows)
    stack.flat.copy_(draw(*stack.flat.shape, seed=seed))
    stack.momentum.copy_(draw(*stack.flat.shape, seed=seed + 1))
    stack.refresh()
    return stack


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_everybody_learns_as_in_pytorch(max_norm: float) -> None:
    from esper.population.kernels.optimizer import Optimizer, Owners

    def make() -> list[ParameterStack]:
        return [
            make_stack(4, {"weight": (40, 60), "bias": (3,), "spare": (5,)}, 1),
            make_stack(3, {"weight": (7, 2)}, 3),
            make_stack(2, {"weight": (6,)}, 5),
        ]

    plain, fast = make(), make()
    # The last stack's networks are gates of the second's: 0 of 2 and 1 of 0.
    partner = torch.tensor([-1, -1, -1, -1, 8, -1, 7, 6, 4], device="cuda")
    active = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1], device="cuda")
    # Every row has a rate of its own.
    rates = 0.1 + 0.05 * torch.arange(9, device="cuda", dtype=torch.float32)
    # No gradient reaches the spare tensor of the first stack.
    columns = [stack.columns()[:2] for stack in fast]
    optimizer = Optimizer(
        [Owners(s.flat, s.momentum, s.used, c) for s, c in zip(fast, columns, strict=True)],
        active,
        partner,
        rates,
    )
    tensors = [
        [draw(len(s), size, seed=20 + n) for n, (_, size) in enumerate(c)]
        for s, c in zip(plain, columns, strict=True)
    ]
    tensors[0][0][1] = torch.nan
    gradient = torch.cat([t.flatten() for each in tensors for t in each]).bfloat16()
    optimizer.step(gradient, **RATES, max_norm=max_norm)
    flat = [
        torch.cat([*each, torch.zeros(len(s), s.width - sum(t.shape[1] for t in each)).cuda()], 1)
        for s, each in zip(plain, tensors, strict=True)
    ]
    flat = [each.bfloat16().float() for each in flat]
    own = torch.cat([each.square().sum(1) for each in flat])
    squares = torch.where(partner >= 0, own + own[partner.clamp(min=0)], own)
    start = 0
    for number, stack in enumerate(plain):
        entries = slice(start, start + len(stack))
        start += len(stack)
        learns = (active[entries] > 0)[:, None].expand_as(stack.flat).clone()
        learns[:, sum(size for _, size in columns[number]) :] = False
        step = flat[number]
        if max_norm:
            step = step * clip_coefficient(squares[entries], max_norm)[:, None]
        sgd_step(stack, step, learns, learning_rate=rates[entries][:, None], **RATES)
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one.flat, other.flat, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(
            one.momentum, other.momentum, rtol=1e-5, atol=1e-5, equal_nan=True
        )
    for one, stack_columns in zip(fast, columns, strict=True):
        width = sum(size for _, size in stack_columns)
        moved = one.used[:, :width].float()
        torch.testing.assert_close(
            moved, one.flat[:, :width].bfloat16().float(), rtol=1e-2, atol=1e-2, equal_nan=True
        )
    assert bool(torch.isnan(fast[0].flat[1, 0]))
    assert bool(torch.isfinite(fast[0].flat[[0, 2, 3]]).all())
