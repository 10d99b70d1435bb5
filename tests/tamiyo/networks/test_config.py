from __future__ import annotations

import pytest

from esper.leyline.actions import HEAD_SIZES
from esper.leyline.errors import ConfigError
from esper.tamiyo.networks.config import SENTINEL_PRIOR, PolicyConfig


def test_defaults_are_the_documents() -> None:
    config = PolicyConfig()
    assert (config.observation_dim, config.input_dim, config.lstm_hidden_dim) == (121, 133, 512)
    assert config.head_sizes == HEAD_SIZES
    assert config.critic == "op_marginal"
    assert config.initial_op_bias == SENTINEL_PRIOR
    assert config.floor.kind == "mixture"


def test_sizes_follow_slots_and_blueprints() -> None:
    config = PolicyConfig(num_slots=5, num_blueprints=20)
    assert (config.observation_dim, config.input_dim) == (181, 201)
    assert config.head_sizes["slot"] == 5
    assert config.head_sizes["blueprint"] == 20
    assert PolicyConfig(state_dim=112).input_dim == 124


def test_plain_data_and_back() -> None:
    config = PolicyConfig(num_slots=8, critic="state", lstm_layers=2)
    assert PolicyConfig.from_mapping(config.to_mapping()) == config


def test_mistakes_are_one_line() -> None:
    with pytest.raises(ConfigError, match="initial_op_bias must have 6 entries"):
        PolicyConfig(initial_op_bias=(0.0,))
    with pytest.raises(ConfigError, match="num_slots must be"):
        PolicyConfig(num_slots=0)
    with pytest.raises(ConfigError, match="blueprint_layers is the documents' alone"):
        PolicyConfig(layout="travelling", blueprint_layers=2)
