"""Clipping and steps of stacked networks against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.training import OptimizerName, TrainingConfig, build_optimizer
from esper.lab.population.parameter_stack import ParameterStack
from esper.lab.population.train_step import OwnerTraining, clip_coefficient, move
from tests.lab.population.test_parameter_stack import CPU, SHAPES, make_values

EVERYTHING = slice(None)


def make_stack(rows: int, optimizer: OptimizerName) -> ParameterStack:
    stack = ParameterStack(SHAPES, torch.float64, CPU, has_squares=optimizer == "adamw")
    stack.resize([], rows)
    stack.fill([make_values(row) for row in range(rows)])
    return stack


def training_of(settings: list[TrainingConfig]) -> OwnerTraining:
    how = OwnerTraining.zeros(len(settings), torch.zeros(0, dtype=torch.float64))
    for row, each in enumerate(settings):
        how.rates[row], how.decays[row] = each.learning_rate, each.weight_decay
        how.momenta[row], how.clips[row] = each.momentum, each.max_grad_norm
    return how


def take_step(stack: ParameterStack, gradient: Tensor, active: Tensor, how: OwnerTraining) -> None:
    """Take a step as a `TrainStep` does, without clipping."""
    stack.steps += active[:, 0].to(torch.int64)
    how.correct(stack.steps)
    move(stack, gradient, active, how.of(EVERYTHING))


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1.0, 100.0])
def test_clipping_per_row_is_that_of_pytorch(max_norm: float) -> None:
    rows = [make_values(seed) for seed in range(4)]
    flat = torch.stack([torch.cat([v.flatten() for v in row.values()]) for row in rows])
    # The last row has a limit of its own.
    limits = torch.tensor([max_norm, max_norm, max_norm, 0.5], dtype=torch.float64)
    clipped = flat * clip_coefficient(flat.square().sum(1), limits)[:, None]
    for row, values in enumerate(rows):
        parameters = [nn.Parameter(torch.zeros_like(value)) for value in values.values()]
        for parameter, value in zip(parameters, values.values(), strict=True):
            parameter.grad = value.clone()
        if limits[row]:
            nn.utils.clip_grad_norm_(parameters, float(limits[row]))
        expected = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        torch.testing.assert_close(clipped[row], expected, rtol=1e-14, atol=0)


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "all alike": [{"momentum": 0.9, "weight_decay": 0.05}] * 3,
    "no momentum, no decay": [{"momentum": 0.0, "weight_decay": 0.0}] * 3,
    "each its own": [
        {"learning_rate": 0.3, "momentum": 0.5, "weight_decay": 0.2},
        {"momentum": 0.0, "weight_decay": 0.05},
        {"learning_rate": 0.01, "momentum": 0.95, "weight_decay": 0.0},
    ],
}


@pytest.mark.parametrize("which", SETTINGS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_several_steps_are_those_of_pytorch(optimizer: OptimizerName, which: str) -> None:
    settings = [
        TrainingConfig(optimizer=optimizer, **{"learning_rate": 0.1, **each})
        for each in SETTINGS[which]
    ]
    stack, how = make_stack(3, optimizer), training_of(settings)
    networks = [[nn.Parameter(v) for v in make_values(row).values()] for row in range(3)]
    optimizers = [build_optimizer(s, n) for s, n in zip(settings, networks, strict=True)]
    for step in range(6):
        # The last row begins to learn later and pauses, as a seed does that is frozen.
        active = torch.tensor([[True], [True], [step in (2, 3, 5)]])
        gradients = [make_values(10 * step + row) for row in range(3)]
        flat = torch.stack([torch.cat([v.flatten() for v in g.values()]) for g in gradients])
        take_step(stack, flat, active, how)
        for row, (network, plain) in enumerate(zip(networks, optimizers, strict=True)):
            for parameter, value in zip(network, gradients[row].values(), strict=True):
                parameter.grad = value.clone() if bool(active[row, 0]) else None
            plain.step()
    assert stack.steps.tolist() == [6, 6, 3]
    for row, network in enumerate(networks):
        for parameter, value in zip(network, stack.read(row)[0].values(), strict=True):
            torch.testing.assert_close(value, parameter.detach(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_rows_that_do_not_learn_are_not_touched_by_what_is_not_finite(
    optimizer: OptimizerName,
) -> None:
    stack = make_stack(3, optimizer)
    stack.momentum.fill_(0.3)
    before, rest = stack.flat.clone(), stack.momentum.clone()
    gradient = torch.full_like(stack.flat, torch.nan)
    gradient[2] = 1.0
    active = torch.tensor([[False], [True], [True]])
    take_step(stack, gradient, active, training_of([TrainingConfig(optimizer=optimizer)] * 3))
    assert torch.equal(stack.flat[0], before[0])
    assert torch.equal(stack.momentum[0], rest[0])
    if stack.squares is not None:
        assert not bool(stack.squares[0].any())
    assert bool(torch.isnan(stack.flat[1]).all())
    assert bool(torch.isfinite(stack.flat[2]).all())


def test_what_is_not_finite_is_forgotten_without_momentum() -> None:
    stack = make_stack(1, "sgd")
    stack.momentum.fill_(torch.nan)
    how = training_of([TrainingConfig(momentum=0.0)])
    take_step(stack, torch.ones_like(stack.flat), torch.tensor([[True]]), how)
    assert bool(torch.isfinite(stack.flat).all())


def test_in_single_precision_the_first_step_is_as_long_as_it_should_be() -> None:
    how = OwnerTraining.zeros(2, torch.zeros(0))
    how.momenta.fill_(0.9)
    how.correct(torch.tensor([1, 0]))
    assert how.first.tolist() == pytest.approx([10.0, 10.0], rel=1e-6)
    assert how.second.tolist() == pytest.approx([0.001**-0.5] * 2, rel=1e-6)
