"""What settings of training mean: an optimizer, and a rate for every epoch and seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.kasmina.training import (
    TrainingConfig,
    build_optimizer,
    epoch_rates,
    rate_factor,
    seed_rate_factor,
)


def test_the_optimizer_is_what_the_settings_say() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    training = TrainingConfig(learning_rate=0.3, momentum=0.5, weight_decay=0.1)
    sgd = build_optimizer(training, parameters)
    (group,) = sgd.param_groups
    assert isinstance(sgd, torch.optim.SGD)
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.5, 0.1)
    adamw = build_optimizer(training.replace(optimizer="adamw"), [{"params": parameters}])
    (group,) = adamw.param_groups
    assert isinstance(adamw, torch.optim.AdamW)
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.3, (0.5, 0.999), 0.1)


def test_a_constant_rate_does_not_move() -> None:
    assert [rate_factor(TrainingConfig(), epoch, 10) for epoch in (1, 5, 10, 11)] == [1.0] * 4


@pytest.mark.parametrize("horizon", [1, 2, 7, 60, 150])
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_rate_goes_up_and_comes_down_and_never_ends(schedule: Any, horizon: int) -> None:
    training = TrainingConfig(schedule=schedule)
    factors = [rate_factor(training, epoch, horizon) for epoch in range(1, horizon + 1)]
    assert all(0 < factor <= 1 for factor in factors)
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert rate_factor(training, horizon + 5, horizon) == factors[-1]
    if horizon >= 60:
        assert max(factors) == 1.0
        assert factors[0] < 0.3
        assert factors[-1] < 0.1


def test_a_stable_rate_is_level_between_rise_and_fall() -> None:
    training = TrainingConfig(schedule="wsd", warmup=0.1, decay=0.2)
    factors = [rate_factor(training, epoch, 100) for epoch in range(1, 101)]
    assert factors[10:80] == [1.0] * 70
    assert factors[9] < 1 > factors[80]


def seed_factors(training: TrainingConfig, born: int, horizon: int) -> list[float]:
    """Return the shares of a seed that begins to learn in an epoch, to the end of the run."""
    return [
        seed_rate_factor(training, epoch, horizon, epoch - born)
        for epoch in range(born, horizon + 1)
    ]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_by_default_a_seed_learns_at_the_rate_of_its_host(schedule: Any) -> None:
    training = TrainingConfig(schedule=schedule, learning_rate=0.3)
    for epoch in (1, 7, 40, 60, 70):
        host, seeds = epoch_rates(training, epoch, 60, [0, 3])
        assert host == 0.3 * rate_factor(training, epoch, 60)
        assert seeds == [host, host]


def test_a_seed_may_learn_faster_or_slower_than_its_host() -> None:
    training = TrainingConfig(learning_rate=0.5, seed_factor=0.1, schedule="cosine")
    host, seeds = epoch_rates(training, 20, 60, [5, 0])
    assert seeds == pytest.approx([0.1 * host] * 2)
    assert epoch_rates(training, 20, 60, []) == (host, [])


@pytest.mark.parametrize("born", [1, 30, 55, 60])
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_seed_with_a_schedule_of_its_own_starts_high_and_comes_down(
    schedule: Any, born: int
) -> None:
    training = TrainingConfig(schedule=schedule, seed_rate="own")
    factors = seed_factors(training, born, 60)
    assert factors[0] == 1.0 if born < 60 else factors[0] > 0
    assert all(0 < factor <= 1 for factor in factors)
    assert factors == sorted(factors, reverse=True)
    assert born == 60 or factors[-1] < 0.6
    # What comes after the horizon stays what it was there.
    assert seed_rate_factor(training, 65, 60, 65 - born) == factors[-1]
    if born == 55:
        follower = training.replace(seed_rate="host")
        assert seed_factors(follower, born, 60)[0] < 0.5 < factors[0]


def test_its_own_schedule_has_the_shape_of_the_hosts() -> None:
    training = TrainingConfig(schedule="cosine", warmup=0.0, seed_rate="own")
    host = [rate_factor(training, epoch, 20) for epoch in range(1, 21)]
    assert seed_factors(training, 41, 60) == host
    level = TrainingConfig(seed_rate="own")
    assert seed_factors(level, 50, 60) == [1.0] * 11


@pytest.mark.parametrize("policy", ["host", "own"])
def test_a_seeds_rate_first_goes_up(policy: Any) -> None:
    cold = TrainingConfig(schedule="cosine", seed_rate=policy)
    warm = cold.replace(seed_warmup=3)
    pairs = zip(seed_factors(warm, 20, 60), seed_factors(cold, 20, 60), strict=True)
    shares = [one / other for one, other in pairs]
    assert shares[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert set(shares[4:]) == {1.0}


def test_a_seed_born_after_the_horizon_learns_all_the_same() -> None:
    training = TrainingConfig(schedule="cosine", seed_rate="own")
    assert [seed_rate_factor(training, 70 + n, 60, n) for n in range(3)] == [1.0] * 3
