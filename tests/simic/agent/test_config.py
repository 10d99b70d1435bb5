from __future__ import annotations

import pytest

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.controller import DEFAULT_GAMMA, ENTROPY_COEF_PER_HEAD
from esper.leyline.errors import ConfigError
from esper.simic.agent.config import PerHead, PPOConfig
from esper.simic.agent.objective import FORCED_VALUE_WEIGHT
from esper.simic.agent.ppo import ADAM_EPS


def test_defaults_are_those_of_the_documents() -> None:
    config = PPOConfig()
    assert config.gamma == DEFAULT_GAMMA
    assert (config.gae_lambda, config.learning_rate, ADAM_EPS) == (0.98, 3e-4, 1e-5)
    assert (config.clip, config.target_kl, FORCED_VALUE_WEIGHT) == (0.2, 0.015, 0.2)
    assert config.epochs >= 3
    by_head = dict(zip(HEAD_NAMES, config.entropy_multipliers.by_head(), strict=True))
    assert by_head == ENTROPY_COEF_PER_HEAD


def test_it_survives_plain_data() -> None:
    config = PPOConfig(ratio="joint", lr_multipliers=PerHead.same(2.0), minibatches=4)
    assert PPOConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [("epochs", 0), ("gamma", 1.5), ("ratio", "both"), ("clip", 0.0), ("value_coef", -1.0)],
)
def test_nonsense_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        PPOConfig(**{key: value})
