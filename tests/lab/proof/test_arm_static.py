from __future__ import annotations

import pytest

from esper.kasmina.hosts import BuiltInSeed, ResnetConfig, TransformerConfig, VitConfig
from esper.lab.proof.arm import commonest, from_scratch, widened
from esper.lab.tasks.task import get_task
from esper.leyline.errors import UsageError
from tests.lab.proof.small import member


def test_channels_and_rate_change_and_nothing_else() -> None:
    task = member(4).task()
    wide = widened(task, 1.5, 0.2)
    assert wide.config.host_options.channels == (6, 6)
    assert wide.config.learning_rate == 0.2
    same = {"host_options": task.config.host_options, "learning_rate": task.config.learning_rate}
    assert wide.config.replace(**same) == task.config


def test_heads_still_divide_the_width() -> None:
    task = get_task("tinystories")
    assert isinstance(task.config.host_options, TransformerConfig)
    wide = widened(task, 1.5, 0.1).config.host_options
    assert wide.dim == pytest.approx(1.5 * task.config.host_options.dim, rel=0.05)
    assert wide.dim % wide.heads == 0


def test_stages_and_patches_are_widened() -> None:
    stages = ResnetConfig(channels=(4, 7), in_channels=1)
    patches = VitConfig(dim=12, heads=3, image_size=8, in_channels=1)
    for host, options, wide in (
        ("resnet", stages, stages.replace(channels=(6, 10))),
        ("vit", patches, patches.replace(dim=18)),
    ):
        task = get_task("digits", host=host, host_options=options)
        widened_task = widened(task, 1.5, 0.1)
        assert widened_task.config.host_options == wide
        assert widened_task.host_parameters > task.host_parameters


def test_a_host_without_a_width_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.lab.proof.arm.WIDTHS", ("breadth",))
    with pytest.raises(UsageError, match="cannot be widened"):
        widened(member(4).task(), 2.0, 0.1)


def test_what_was_grown_is_part_of_the_host_from_the_beginning() -> None:
    task = member(4).task()
    seeds = (BuiltInSeed(slot="r0c1", blueprint="conv_heavy", channels=4),)
    grown = from_scratch(task, seeds)
    assert grown.host_parameters > task.host_parameters
    assert grown.host_flops > task.host_flops
    assert list(grown.slot_paths) == list(task.slot_paths)
    assert from_scratch(task, ()).host_parameters == task.host_parameters


def test_the_commonest_architecture() -> None:
    one = (BuiltInSeed(slot="r0c0", blueprint="norm", channels=2),)
    assert commonest([(), one, one]) == one
    assert commonest([(), one]) == ()
