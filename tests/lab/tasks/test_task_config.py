"""TaskConfig: cross-field rules and plain data."""

from __future__ import annotations

from typing import Any

import pytest

from esper.kasmina.hosts import CnnConfig, MlpConfig
from esper.kasmina.training import TrainingConfig
from esper.lab.tasks.task import TaskConfig
from esper.leyline.errors import ConfigError, UsageError

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
        ({"classes": (1, 2, 3)}, "must be 2 different classes"),
        ({"classes": (1, 1)}, "must be 2 different classes"),
        ({"classes": (0, 1), "objective": "language"}, "classes is for classification"),
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
