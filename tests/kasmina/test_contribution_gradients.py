"""Gradient statistics of seeds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.contribution import (
    EXPLODING,
    VANISHING,
    GradientSample,
    record_gradients,
    sample_gradients,
    summarise,
    tensor_norms,
)
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import one_slot


def sample(norms: list[float], *, host: float = 1.0, seed_size: int = 4, host_size: int = 100):
    return summarise(
        torch.tensor(norms, dtype=torch.float64),
        seed_size,
        torch.tensor(host, dtype=torch.float64),
        host_size,
    )


def test_norms_are_those_of_the_gradients_that_exist() -> None:
    with_gradient = nn.Parameter(torch.zeros(2))
    with_gradient.grad = torch.tensor([3.0, 4.0])
    norms = tensor_norms([with_gradient, nn.Parameter(torch.zeros(3))])
    assert norms.tolist() == [5.0]
    assert norms.dtype == torch.float64
    assert tensor_norms([nn.Parameter(torch.zeros(1))]).shape == (0,)


@pytest.mark.parametrize(
    ("norms", "health", "vanishing", "exploding"),
    [
        ([1.0, 2.0], 1.0, False, False),
        ([VANISHING * 0.99, 1.0], 0.75, True, False),
        ([VANISHING, 1.0], 1.0, False, False),
        ([EXPLODING, 1.0], 1.0, False, False),
        ([EXPLODING * 1.01, 1.0], 0.6, False, True),
        ([0.0, 0.0], 0.5, True, False),
        ([100.0, 100.0], 0.2, False, True),
        ([0.0, 100.0], 0.35, True, True),
        ([math.inf, 1.0], 0.6, False, True),
        ([math.nan, 1.0], 0.6, False, True),
        ([], 1.0, False, False),
    ],
)
def test_health_falls_with_vanished_and_exploded_tensors(
    norms: list[float], health: float, vanishing: bool, exploding: bool
) -> None:
    result = sample(norms)
    assert float(result.health) == pytest.approx(health)
    assert bool(result.vanishing) is vanishing
    assert bool(result.exploding) is exploding


def test_the_ratio_compares_gradients_per_parameter() -> None:
    # (5 / sqrt 4) / (2 / sqrt 100)
    assert float(sample([3.0, 4.0], host=2.0).ratio) == pytest.approx(10.0)
    assert float(sample([0.3, 0.4], host=2.0).ratio) == pytest.approx(1.25)
    assert float(sample([3.0, 4.0]).norm) == 5.0


def test_the_ratio_is_capped_and_zero_where_a_norm_is_tiny() -> None:
    assert float(sample([1000.0]).ratio) == 10.0
    assert float(sample([0.9e-8]).ratio) == 0.0
    assert float(sample([1.0], host=0.9e-8).ratio) == 0.0
    assert float(sample([]).ratio) == 0.0


def test_a_batch_of_seeds_is_summarised_at_once() -> None:
    norms = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    result = summarise(norms, torch.tensor([4, 4]), torch.ones(2).double(), torch.tensor([9, 9]))
    assert result.norm.tolist() == [5.0, 1.0]
    assert result.vanishing.tolist() == [False, True]


def _sample(ratio: float, norm: float = 1.0) -> GradientSample:
    def value(number: float) -> Tensor:
        return torch.tensor([[number]], dtype=torch.float64)

    return GradientSample(
        value(norm), value(0.5), torch.tensor([[True]]), torch.tensor([[False]]), value(ratio)
    )


def test_the_first_ratio_is_taken_as_it_is_and_later_ones_are_smoothed() -> None:
    here = torch.tensor([[True]])
    state = one_slot(SeedStage.TRAINING)
    assert bool(state.grad_ratio.isnan())
    state = record_gradients(state, here, _sample(2.0))
    assert float(state.grad_ratio) == 2.0
    state = record_gradients(state, here, _sample(4.0))
    assert float(state.grad_ratio) == pytest.approx(0.9 * 2 + 0.1 * 4)
    assert (float(state.grad_norm), float(state.grad_health)) == (1.0, 0.5)
    assert bool(state.vanishing)
    assert not bool(state.exploding)


def test_a_norm_that_is_no_number_is_recorded_as_infinite() -> None:
    state = record_gradients(
        one_slot(SeedStage.TRAINING), torch.tensor([[True]]), _sample(1.0, math.nan)
    )
    assert float(state.grad_norm) == math.inf


def test_nothing_is_recorded_outside_the_mask() -> None:
    state = record_gradients(
        one_slot(SeedStage.TRAINING), torch.tensor([[False]]), _sample(1.0, 3.0)
    )
    assert float(state.grad_norm) == 0.0


@pytest.mark.parametrize("stage", [SeedStage.TRAINING, SeedStage.BLENDING])
def test_a_learning_seed_is_sampled_against_its_host(stage: SeedStage) -> None:
    host, seed = nn.Linear(1, 1, bias=False), nn.Linear(2, 2, bias=False)
    host.weight.grad = torch.full((1, 1), 2.0)
    seed.weight.grad = torch.ones(2, 2)
    found = sample_gradients(one_slot(stage, params=4), host, [seed])
    assert list(found) == [0]
    assert float(found[0].norm) == 2.0
    assert float(found[0].ratio) == 0.5


@pytest.mark.parametrize("stage", [SeedStage.DORMANT, SeedStage.HOLDING, SeedStage.FOSSILIZED])
def test_a_seed_that_does_not_learn_is_not_sampled(stage: SeedStage) -> None:
    assert sample_gradients(one_slot(stage), nn.Linear(1, 1), [nn.Linear(2, 2)]) == {}
