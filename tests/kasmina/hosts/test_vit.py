"""The vision transformer: size, slots, patches, sight, and growing deeper by copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from esper.kasmina.flops import count_flops
from esper.kasmina.garden import Garden
from esper.kasmina.hosts import VitConfig, VitHost
from esper.leyline.errors import ConfigError, UsageError
from esper.testing import check_host
from tests.kasmina.gardens import assert_copies_train

SMALL = VitConfig(dim=8, layers=2, segments=2, image_size=8, patch=2, in_channels=1)


def test_parameter_counts() -> None:
    def count(config: VitConfig) -> int:
        return sum(p.numel() for p in VitHost(config).parameters())

    layer = 4 * 8 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)
    # Patches 40, positions 128, norm 16, classifier 90.
    assert count(SMALL) == 2 * layer + 40 + 128 + 16 + 90
    assert count(SMALL.replace(layers=6)) - count(SMALL) == 4 * layer


def test_a_slot_follows_every_segment() -> None:
    host = VitHost(SMALL.replace(layers=6, segments=2))
    assert host.slot_paths == {"r0c0": "segments.0", "r0c1": "segments.1"}
    assert [len(segment) for segment in host.segments] == [3, 3]
    assert VitHost(SMALL.replace(slots=("r0c1",))).slot_paths == {"r0c1": "segments.1"}


@pytest.mark.parametrize(("layers", "segments", "patch"), [(1, 1, 8), (2, 1, 4), (4, 2, 2)])
def test_contract(layers: int, segments: int, patch: int) -> None:
    config = VitConfig(layers=layers, segments=segments, patch=patch)
    check_host("vit", config, torch.randn(2, 3, 16, 16))


@pytest.mark.parametrize("patch", [1, 2, 4, 8])
def test_patches_are_those_of_a_strided_convolution(patch: int) -> None:
    host = VitHost(SMALL.replace(in_channels=3, patch=patch))
    images = torch.randn(5, 3, 8, 8)
    filters = host.patches.weight.reshape(8, 3, patch, patch)
    expected = F.conv2d(images, filters, host.patches.bias, stride=patch).flatten(2).mT
    assert torch.allclose(host.patches(host._cut(images)), expected, atol=1e-6)


def test_every_patch_sees_every_other_and_knows_its_place() -> None:
    host = VitHost(SMALL)
    images = torch.randn(1, 1, 8, 8)
    with torch.no_grad():
        hidden = torch.randn(1, 16, 8)
        for changed in (0, 15):
            other = hidden.clone()
            other[:, changed] += torch.randn(8)
            difference = host.segments[0](hidden) - host.segments[0](other)
            assert bool((difference.abs().amax(-1) > 0).all())
        # Patches in another order: a bag of patches without positions would not notice.
        assert not torch.allclose(host(images), host(images.roll(2, -1)), atol=1e-7)


@pytest.mark.parametrize("blueprint", ["attention", "flex_attention"])
def test_attention_that_grows_in_it_sees_later_patches(blueprint: str) -> None:
    garden = Garden(VitHost(SMALL), ["segments.0"], torch.zeros(2, 1, 8, 8))
    assert garden.seedbed[0].symmetry == "bidirectional"
    assert garden.germinate("segments.0", blueprint)
    (attention,) = (
        part for part in garden.modules() if isinstance(getattr(part, "is_causal", None), bool)
    )
    assert attention.is_causal is False


def test_operations_by_hand() -> None:
    attention = 2 * 16 * 8 * 32 + 4 * 16 * 16 * 8
    layer = attention + 2 * 2 * 16 * 8 * 32
    rest = 2 * 16 * 4 * 8 + 2 * 8 * 10
    images = torch.randn(1, 1, 8, 8)
    assert count_flops(VitHost(SMALL), images).total == 2 * layer + rest
    assert count_flops(VitHost(SMALL.replace(layers=4)), images).total == 4 * layer + rest


@pytest.mark.parametrize("layers", [1, 2])
def test_it_trains_while_its_segment_is_doubled_to_eight_times_its_depth(layers: int) -> None:
    torch.manual_seed(0)
    host = VitHost(SMALL.replace(layers=layers, segments=1))
    assert_copies_train(host, "segments.0", torch.randn(24, 1, 8, 8), learning_rate=0.01)


def test_an_image_of_another_size_is_refused() -> None:
    with pytest.raises(UsageError, match="an image of 6x8 does not fit the host's image_size of 8"):
        VitHost(SMALL)(torch.zeros(1, 1, 6, 8))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 5}, r"VitConfig\.heads must divide dim \(32\), got 5"),
        ({"segments": 2}, r"VitConfig\.segments must divide layers \(1\), got 2"),
        ({"patch": 3}, r"VitConfig\.patch must divide image_size \(16\), got 3"),
        ({"patch": 0}, "patch must be at least 1"),
        ({"slots": ("r0c1",)}, "has only r0c0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        VitConfig(**options)
    assert "\n" not in str(refused.value)


def test_config_survives_plain_data() -> None:
    config = SMALL.replace(slots=("r0c1",))
    assert VitConfig.from_mapping(config.to_mapping()) == config
