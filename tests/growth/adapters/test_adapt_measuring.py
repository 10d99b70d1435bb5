"""Measuring gradients in training: passes that are not finite, scaled losses, own gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from esper.growth.adapters.adapt import Adapt
from esper.leyline.errors import EsperWarning, UsageError
from tests.growth.adapters.test_adapt import STEPS, adamw, batch, loss_of, make


def step(adapters: Adapt, optimizer: torch.optim.Optimizer, scale: float, number: int = 0) -> None:
    (scale * loss_of(adapters.model, number)).backward()
    optimizer.zero_grad()
    adapters.step(optimizer)


def test_passes_with_gradients_that_are_not_finite_are_left_out() -> None:
    expected = Adapt(make(), 500)
    optimizer = adamw(expected)
    for number in range(3):
        step(expected, optimizer, 1.0, number)
    adapters = Adapt(make(), 500)
    optimizer = adamw(adapters)
    nan, inf = float("nan"), float("inf")
    for scale, number in ((1.0, 0), (nan, 1), (1.0, 1), (inf, 0), (1.0, 2)):
        step(adapters, optimizer, scale, number)
    sums = expected.state_dict()["sums"]
    for name, value in adapters.state_dict()["sums"].items():
        assert torch.equal(value, sums[name]), name
    assert not adapters.is_placed
    step(adapters, optimizer, 1.0, 3)
    assert adapters.is_placed


def test_a_run_with_few_finite_gradients_is_warned_once_and_goes_on_measuring() -> None:
    adapters = Adapt(make(), 500, total_steps=STEPS)
    optimizer = adamw(adapters)
    before = adapters.count_parameters()
    for _ in range(39):
        step(adapters, optimizer, float("nan"))
    told = rf"40 backward passes in 40 steps .* only {before} of 500 .* 4 more finite steps"
    with pytest.warns(EsperWarning, match=told):
        step(adapters, optimizer, float("nan"))
    step(adapters, optimizer, float("nan"))
    state = copy.deepcopy(adapters.state_dict())
    adapters = Adapt(make(), 500, total_steps=STEPS)
    adapters.load_state_dict(state)
    optimizer = adamw(adapters)
    with pytest.warns(EsperWarning, match="3 more finite steps"):
        step(adapters, optimizer, 1.0)
    for _ in range(3):
        assert not adapters.is_placed
        step(adapters, optimizer, 1.0)
    assert adapters.count_parameters() > before
    for number in range(STEPS):
        step(adapters, optimizer, float("nan" if number % 2 else 1.0))
    assert "nan" not in repr(adapters)


def test_a_grad_scaler_that_starts_too_high_delays_placement() -> None:
    adapters = Adapt(make(), 500)
    optimizer = adamw(adapters)
    before = adapters.count_parameters()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for number in range(30):
        x, y = batch(number)
        scaler.scale(1_000 * F.cross_entropy(adapters.model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        adapters.step(optimizer)
    assert 5 < adapters.history[-1]["step"] < 30
    assert before < adapters.count_parameters() <= 500
    assert adapters.count_parameters() > 0.95 * 500
    assert "nan" not in str(adapters)


def test_measuring_leaves_all_gradients_as_they_were() -> None:
    model = make()
    loss_of(model, 7).backward()
    adapters = Adapt(model, 300, trainable="head")
    before = {
        id(p): (p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()
    }
    adapters.measure(range(3), lambda step: loss_of(model, step))
    for parameter in model.parameters():
        if id(parameter) not in before:
            assert parameter.grad is None
            continue
        _, gradient, values = before[id(parameter)]
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, values)
    assert any(one.grad is not None for one in model.head.parameters())


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda x: x, r"a tensor \[16, 3\]; return one number, as by \.mean\(\)"),
        (lambda x: x.sum().detach(), "a tensor without a gradient; compute it by the model"),
        (lambda x: None, "returned NoneType; return the loss itself"),
        (lambda x: x.sum().item(), r"returned float; return the loss itself, without \.item"),
        (lambda x: float("nan") * x.sum(), "saw no finite gradient in 2 batches"),
    ],
)
def test_losses_that_cannot_be_measured_are_refused(loss: Any, told: str) -> None:
    model = make()
    with pytest.raises(UsageError, match=told):
        Adapt(model, 500).measure([0, 1], lambda step: loss(model(batch(step)[0])))


def test_measuring_needs_batches() -> None:
    with pytest.raises(UsageError, match=r"measure\(\) got no batch; write measure\(batches"):
        Adapt(make(), 500).measure([], lambda step: torch.zeros(()))
    for batches, loss, got in ((5, torch.sum, "int and builtin"), ([0], "loss", "list and str")):
        with pytest.raises(UsageError, match=rf"got {got}.*; write measure\(batches, lambda"):
            Adapt(make(), 500).measure(batches, loss)  # type: ignore[arg-type]


def test_baking_before_ranks_are_placed_says_how_little_was_trained() -> None:
    adapters = Adapt(make(), 500)
    optimizer = adamw(adapters)
    for number in range(3):
        step(adapters, optimizer, 1.0, number)
    told = r"only 298 of 500 parameters trained: .* after 4 steps .* this run had 3; call adapters"
    with pytest.warns(EsperWarning, match=told):
        adapters.bake()
    Adapt(make(), 500).bake()
