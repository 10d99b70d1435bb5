"""The vector host."""

from __future__ import annotations

import pytest
import torch

from esper.kasmina.hosts import MlpConfig, MlpHost
from esper.leyline.errors import ConfigError
from esper.testing import check_host


def test_parameter_count() -> None:
    # Per block: weights, bias, and two vectors of the norm.
    expected = (64 * 16 + 3 * 16) + 2 * (16 * 16 + 3 * 16) + (16 * 10 + 10)
    assert sum(p.numel() for p in MlpHost(MlpConfig()).parameters()) == expected == 1_850


def test_contract_and_slots() -> None:
    config = MlpConfig(in_features=6, hidden=(8, 4), num_outputs=3)
    assert MlpHost(config).slot_paths == {"r0c0": "blocks.0", "r0c1": "blocks.1"}
    check_host("mlp", config, torch.randn(4, 6))


def test_images_are_flattened() -> None:
    assert MlpHost(MlpConfig()).forward(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_empty_hidden_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one block"):
        MlpConfig(hidden=())
