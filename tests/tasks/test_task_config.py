"""TaskConfig: cross-field rules and plain data."""

from __future__ import annotations

from typing import Any

import pytest

from esper.kasmina.hosts import CnnConfig, MlpConfig
from esper.leyline.errors import ConfigError, UsageError
from esper.tasks.task import TaskConfig, TrainingConfig, rate_factor

BASE: dict[str, Any] = {
    "host": "mlp",
    "host_options": MlpConfig(in_features=3, hidden=(4,), num_outputs=2),
    "input_shape": (3,),
    "num_classes": 2,
}


def test_defaults() -> None:
    config = TaskConfig(**BASE)
    assert (config.momentum, config.weight_decay, config.max_grad_norm) == (0.9, 5e-4, 1.0)
    assert config.horizon == 150
    assert config.param_budget == 500_000


def test_how_the_host_is_trained_is_a_part_of_it() -> None:
    config = TaskConfig(**BASE, batch_size=4, learning_rate=0.05)
    assert config.training == TrainingConfig(batch_size=4, learning_rate=0.05)
    assert config.replace(max_grad_norm=0.0).training.max_grad_norm == 0.0


def test_plain_data_round_trip_builds_the_host_s_own_options() -> None:
    config = TaskConfig(**BASE)
    plain = config.to_mapping()
    assert plain["host_options"]["hidden"] == [4]
    assert TaskConfig.from_mapping(plain) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "mpl"}, "did you mean 'mlp'"),
        ({"host_options": CnnConfig()}, "must be a MlpConfig, got a CnnConfig"),
        ({"objective": "regression"}, "num_classes must be empty for regression"),
        ({"num_classes": None}, "num_classes must be empty for regression and only there"),
        ({"target_loss": 9.0}, "must be below baseline_loss"),
        ({"label_noise": 1.5}, "at most 1.0"),
        ({"learning_rate": 0.0}, "above 0.0"),
        ({"augment": "flip"}, "must be one of 'none', 'crop_flip'"),
    ],
)
def test_wrong_values(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TaskConfig(**(BASE | changes))


def test_an_unknown_host_option_is_refused() -> None:
    plain = TaskConfig(**BASE).to_mapping()
    plain["host_options"]["hiden"] = [4]
    with pytest.raises(ConfigError, match="did you mean 'hidden'"):
        TaskConfig.from_mapping(plain)


def test_every_field_has_a_sentence() -> None:
    assert all(sentence.endswith(".") for sentence in TaskConfig.describe().values())


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
