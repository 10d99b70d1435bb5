"""The residual network of stages: size, slots, arithmetic, and growing deeper by copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from esper.kasmina.flops import count_flops
from esper.kasmina.hosts import ResnetConfig, ResnetHost
from esper.kasmina.hosts.cnn import StandardisedConv
from esper.leyline.errors import ConfigError
from esper.testing import check_host
from tests.kasmina.gardens import assert_copies_train

SMALL = ResnetConfig(channels=(4, 8), in_channels=1)


def test_parameter_counts() -> None:
    def count(config: ResnetConfig) -> int:
        return sum(p.numel() for p in ResnetHost(config).parameters())

    # A block has three norms and two convolutions.
    first, second = 3 * 8 + 2 * 144, 3 * 16 + 2 * 576
    # Stem 36, transition 32, norm 16, classifier 90.
    assert count(SMALL) == first + second + 36 + 32 + 16 + 90
    assert count(SMALL.replace(blocks=3)) - count(SMALL) == 2 * (first + second)


def test_a_slot_follows_every_stage() -> None:
    assert ResnetHost(SMALL).slot_paths == {"r0c0": "stages.0", "r0c1": "stages.1"}
    some = ResnetConfig(channels=(4, 8, 8), slots=("r0c2", "r0c0"))
    assert list(ResnetHost(some).slot_paths.items()) == [
        ("r0c0", "stages.0"),
        ("r0c2", "stages.2"),
    ]


def test_stages_keep_their_shape_and_transitions_halve_it() -> None:
    host = ResnetHost(ResnetConfig(channels=(4, 6, 8)))
    shapes: list[tuple[int, ...]] = []
    for stage in host.stages:
        stage.register_forward_hook(
            lambda _, inputs, output: shapes.extend((inputs[0].shape[1:], output.shape[1:]))
        )
    assert host(torch.randn(2, 3, 14, 14)).shape == (2, 10)
    assert shapes[::2] == shapes[1::2] == [(4, 14, 14), (6, 7, 7), (8, 3, 3)]


@pytest.mark.parametrize(
    ("channels", "blocks"), [((4,), 1), ((16,), 2), ((4, 8), 1), ((4, 8, 16), 2)]
)
def test_contract(channels: tuple[int, ...], blocks: int) -> None:
    config = ResnetConfig(channels=channels, blocks=blocks)
    check_host("resnet", config, torch.randn(2, 3, 8, 8))


def test_a_block_adds_its_branch_to_its_input() -> None:
    (block,) = ResnetHost(SMALL).stages[1]
    images = torch.randn(2, 8, 4, 4)
    assert torch.equal(block(images), images + block.branch(images))
    kinds = [nn.GroupNorm, nn.ReLU, StandardisedConv]
    assert [type(module) for module in block.branch] == [*kinds, *kinds, nn.GroupNorm]


def test_operations_by_hand() -> None:
    stages = 2 * 2 * 9 * (4 * 4 * 64 + 8 * 8 * 16)
    rest = 2 * 9 * 4 * 64 + 2 * 4 * 8 * 16 + 2 * 8 * 10
    images = torch.randn(1, 1, 8, 8)
    assert count_flops(ResnetHost(SMALL), images).total == stages + rest
    assert count_flops(ResnetHost(SMALL.replace(blocks=2)), images).total == 2 * stages + rest


def test_no_sample_depends_on_the_rest_of_the_batch() -> None:
    host = ResnetHost(SMALL).train()
    images = torch.randn(6, 1, 8, 8)
    alone = torch.cat([host(image[None]) for image in images])
    assert torch.allclose(host(images), alone, atol=1e-5)
    assert list(host.buffers()) == []


@pytest.mark.parametrize("blocks", [1, 2])
def test_it_trains_while_its_last_stage_is_doubled_to_eight_times_its_depth(blocks: int) -> None:
    torch.manual_seed(0)
    host = ResnetHost(SMALL.replace(blocks=blocks))
    assert_copies_train(host, "stages.1", torch.randn(24, 1, 8, 8), learning_rate=0.01)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"channels": ()}, r"ResnetConfig\.channels must name at least one width, got none"),
        ({"channels": (4, 0)}, r"channels\[1\] must be at least 1"),
        ({"blocks": 0}, "blocks must be at least 1"),
        ({"slots": ("r1c0",)}, "has only r0c0, r0c1"),
        ({"slots": ()}, "at least one slot"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        ResnetConfig(**options)
    assert "\n" not in str(refused.value)


def test_config_survives_plain_data() -> None:
    config = ResnetConfig(channels=(2, 4), blocks=2, slots=("r0c1",))
    assert ResnetConfig.from_mapping(config.to_mapping()) == config
