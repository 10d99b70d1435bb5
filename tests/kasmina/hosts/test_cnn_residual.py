"""The residual host: its size, slots and arithmetic, and that ablations of it are exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from esper.kasmina.hosts import ResidualConfig, ResidualHost, doubling
from esper.kasmina.hosts.cnn import StandardisedConv
from esper.leyline.errors import ConfigError
from esper.testing import check_host


def test_parameter_counts() -> None:
    def count(config: ResidualConfig) -> int:
        return sum(p.numel() for p in ResidualHost(config).parameters())

    assert count(ResidualConfig()) == 18_626
    assert count(ResidualConfig(channels=doubling(4, 2), in_channels=1)) == 1_182


def test_slots_follow_blocks_and_pools() -> None:
    assert ResidualHost(ResidualConfig()).slot_paths == {
        "r0c0": "blocks.0",
        "r0c1": "blocks.1",
        "r0c2": "blocks.2",
    }
    both = ResidualConfig(channels=(4, 8), slots=("r1c0", "r0c1"))
    assert list(ResidualHost(both).slot_paths.items()) == [
        ("r0c1", "blocks.1"),
        ("r1c0", "pools.0"),
    ]


@pytest.mark.parametrize("channels", [(8, 16, 32), (3, 6), (4,)])
def test_contract(channels: tuple[int, ...]) -> None:
    check_host("residual", ResidualConfig(channels=channels), torch.randn(2, 3, 16, 16))


def test_filters_are_standardised_whatever_the_weights() -> None:
    conv = StandardisedConv(3, 5)
    images = torch.randn(2, 3, 6, 6)
    before = conv(images)
    with torch.no_grad():
        conv.weight.mul_(7.0).add_(0.3)
    assert torch.allclose(conv(images), before, atol=1e-5)
    filters = conv.weight - conv.weight.mean((1, 2, 3), keepdim=True)
    filters = filters / filters.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    assert torch.allclose(F.conv2d(images, filters, padding=1), before, atol=1e-5)


def test_a_block_adds_its_branch_to_what_it_has() -> None:
    host = ResidualHost(ResidualConfig(channels=(4,)))
    block = host.blocks[0]
    images = torch.randn(2, 3, 8, 8)
    hidden = block.widen(images)
    assert torch.equal(block(images), F.relu(hidden + block.branch(hidden)))


def test_no_sample_depends_on_the_rest_of_the_batch() -> None:
    host = ResidualHost(ResidualConfig()).train()
    images = torch.randn(6, 3, 16, 16)
    alone = torch.cat([host(image[None]) for image in images])
    assert torch.allclose(host(images), alone, atol=1e-5)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in host.modules())
    assert list(host.buffers()) == []


def test_empty_channels_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one width"):
        ResidualConfig(channels=())
