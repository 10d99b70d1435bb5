"""The convolutional host: the documents' parameter counts, slots and shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from esper.kasmina.hosts import CnnConfig, CnnHost, doubling
from esper.leyline.errors import ConfigError
from esper.testing import check_host


def count(config: CnnConfig) -> int:
    return sum(p.numel() for p in CnnHost(config).parameters())


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (CnnConfig(channels=doubling(8, 3)), 6_418),
        (CnnConfig(channels=doubling(8, 5)), 99_922),
        (CnnConfig(channels=doubling(1, 3), kernel_size=1), 77),
        (CnnConfig(channels=doubling(2, 3), kernel_size=1, pool_layers=0), 164),
        (CnnConfig(channels=doubling(16, 3)), 24_346),
        (CnnConfig(channels=doubling(2, 5), kernel_size=1), 1_140),
        (CnnConfig(channels=(4, 8, 8), in_channels=1), 1_030),
    ],
)
def test_parameter_counts(config: CnnConfig, parameters: int) -> None:
    assert count(config) == parameters


def test_slots_are_row_major_and_follow_blocks_and_pools() -> None:
    config = CnnConfig(channels=(4, 8, 8), slots=("r1c1", "r0c2", "r0c0", "r1c0"))
    assert list(CnnHost(config).slot_paths.items()) == [
        ("r0c0", "blocks.0"),
        ("r0c2", "blocks.2"),
        ("r1c0", "pools.0"),
        ("r1c1", "pools.1"),
    ]
    assert list(CnnHost(CnnConfig()).slot_paths) == ["r0c0", "r0c1", "r0c2"]


def test_execution_interleaves_the_rows() -> None:
    host = CnnHost(CnnConfig(channels=(4, 4), slots=("r0c0", "r0c1", "r1c0", "r1c1")))
    seen: list[str] = []
    for slot, path in host.slot_paths.items():
        host.get_submodule(path).register_forward_hook(lambda *_, slot=slot: seen.append(slot))
    host(torch.zeros(1, 3, 8, 8))
    assert seen == ["r0c0", "r1c0", "r0c1", "r1c1"]


def test_row_zero_lies_before_the_pool() -> None:
    host = CnnHost(CnnConfig(slots=("r0c0", "r1c0")))
    sizes: dict[str, int] = {}
    for slot, path in host.slot_paths.items():
        host.get_submodule(path).register_forward_hook(
            lambda module, inputs, output, slot=slot: sizes.update({slot: output.shape[-1]})
        )
    assert host(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sizes == {"r0c0": 32, "r1c0": 16}


@pytest.mark.parametrize("pool_layers", [0, 1, 3])
def test_contract(pool_layers: int) -> None:
    rows = ["r0c0", "r0c1", "r0c2", *(f"r1c{column}" for column in range(pool_layers))]
    config = CnnConfig(channels=(4, 8, 8), pool_layers=pool_layers, slots=tuple(rows))
    check_host("cnn", config, torch.randn(2, 3, 16, 16))


def test_no_batch_norm_and_no_conv_bias() -> None:
    modules = list(CnnHost(CnnConfig()).modules())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in modules)
    assert all(module.bias is None for module in modules if isinstance(module, nn.Conv2d))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"channels": ()}, "at least one width"),
        ({"channels": (4, 0)}, r"channels\[1\] must be at least 1"),
        ({"kernel_size": 2}, "must be odd"),
        ({"pool_layers": 4}, "at most the number of blocks, 3"),
        ({"slots": ("r0c3",)}, "this host has only r0c0, r0c1, r0c2"),
        ({"pool_layers": 1, "slots": ("r1c1",)}, "has only r0c0, r0c1, r0c2, r1c0"),
        ({"slots": ()}, "at least one slot"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CnnConfig(**options)


def test_config_survives_plain_data() -> None:
    config = CnnConfig(channels=(2, 4), slots=("r0c1",), pool_layers=1)
    assert CnnConfig.from_mapping(config.to_mapping()) == config
