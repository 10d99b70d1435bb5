"""A member: its name, its task, its rate, and what cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch

from esper.lab.tasks import Member, get_task
from esper.lab.tasks.member import SCHEDULE, TRAIN_SIZES, WARM_UP, HostKind, SlotPlace, tuned_rate
from esper.leyline.errors import ConfigError

EVEN = (0, 2, 4, 6, 8)


def test_a_member_names_itself_in_one_line() -> None:
    assert Member(data="digits").label == "digits plain 8x3, all images, 60 epochs"
    odd = Member(
        data="cifar16",
        host="residual",
        width=4,
        depth=2,
        slots="pools",
        classes=EVEN,
        train_size=2_000,
        label_noise=0.3,
        horizon=40,
        rate_factor=0.5,
    )
    assert odd.label == (
        "cifar16 residual 4x2 pooled, classes 0-2-4-6-8, 2000 images, noise 0.3, 40 epochs, "
        "rate x0.5"
    )


def test_every_value_reaches_the_task() -> None:
    member = Member(
        data="cifar16",
        width=4,
        depth=2,
        classes=EVEN,
        train_size=2_000,
        label_noise=0.3,
        horizon=40,
        rate_factor=2.0,
    )
    config = member.task().config
    assert (config.host, config.host_options.to_mapping()["channels"]) == ("cnn", [4, 8])
    assert (config.num_classes, config.classes) == (5, EVEN)
    assert (config.train_size, config.label_noise, config.horizon) == (2_000, 0.3, 40)
    assert config.learning_rate == pytest.approx(2 * tuned_rate("cifar16", "plain", 2_000))
    assert (config.schedule, config.warmup) == (SCHEDULE, WARM_UP)
    assert config.baseline_loss == pytest.approx(math.log(5))
    assert replace(member, host="residual").task().config.host == "residual"
    assert member.task(horizon=7).config.horizon == 7


@pytest.mark.parametrize("host", ["plain", "residual"])
def test_seeds_sit_after_blocks_or_after_pools(host: HostKind) -> None:
    before, after = (
        Member(data="cifar16", host=host, depth=2, slots=place) for place in get_args(SlotPlace)
    )
    assert list(before.task().slot_paths.values()) == ["blocks.0", "blocks.1"]
    assert list(after.task().slot_paths.values()) == ["pools.0", "pools.1"]
    assert before.architecture != after.architecture
    assert before.task().host_flops == after.task().host_flops


def test_members_grow_within_the_limit_of_proofs() -> None:
    task = Member(data="cifar16").task()
    assert task.param_limit == 2 * task.host_parameters
    assert task.flop_limit == 2 * task.host_flops


def test_what_is_usual_is_the_data_set_s_own() -> None:
    own, config = get_task("cifar16").config, Member(data="cifar16").task().config
    for name in ("batch_size", "samples_per_step", "input_shape", "val_fraction", "train_size"):
        assert getattr(config, name) == getattr(own, name)


def test_conditions_do_not_change_the_architecture() -> None:
    member = Member(data="cifar16")
    same = replace(member, train_size=100, label_noise=0.4, horizon=9, rate_factor=2.0)
    assert same.architecture == member.architecture
    for other in ({"width": 4}, {"depth": 2}, {"host": "residual"}, {"classes": EVEN}):
        assert replace(member, **other).architecture != member.architecture
    # Which classes are told apart does not change the network, only how many.
    odd = replace(member, classes=(1, 3, 5, 7, 9))
    assert odd.architecture == replace(member, classes=EVEN).architecture


def test_what_the_data_cannot_give_is_not_possible() -> None:
    member = Member(data="cifar16")
    assert replace(member, train_size=27_000).is_possible
    assert not replace(member, train_size=27_001).is_possible
    assert replace(member, train_size=13_500, classes=EVEN).is_possible
    assert not replace(member, train_size=13_501, classes=EVEN).is_possible
    assert replace(member, depth=4).is_possible
    assert not replace(member, depth=5).is_possible
    assert not Member(data="fashion14", depth=4).is_possible


@pytest.mark.parametrize("data", TRAIN_SIZES)
def test_sizes_are_the_data_s(data: str, real: Callable[[Callable[[], object]], None]) -> None:
    real(get_task(data).find)
    assert get_task(data).load().size("train") == TRAIN_SIZES[data]


def test_a_member_can_be_trained_on() -> None:
    member = Member(data="digits", width=4, depth=2, classes=(1, 7), train_size=200)
    noisy = replace(member, label_noise=0.3)
    clean_data, data = member.task().load(), noisy.task().load()
    assert data.size("train") == 200
    assert data.num_classes == 2
    assert int((data.train_targets != clean_data.train_targets).sum()) == 60
    for split in ("val", "test"):
        assert torch.equal(data.splits.targets[split], clean_data.splits.targets[split])
    x, y = data.batch("train", torch.arange(4))
    scores = noisy.task().build_host(0)(x)
    assert scores.shape == (4, 2)
    assert noisy.task().objective(scores, y)[0].isfinite().all()


def test_unknown_data_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of digits, cifar16.*got 'stories'"):
        assert Member(data="stories").is_possible
