from __future__ import annotations

import pytest

from esper.kasmina.hosts import BuiltInSeed, ResnetConfig, TransformerConfig, VitConfig
from esper.lab.proof.arm import DepthArm
from esper.lab.proof.static import commonest, deepened, from_scratch, widened
from esper.lab.tasks.member import GivenMember
from esper.lab.tasks.task import Task, get_task
from esper.leyline.errors import UsageError
from tests.lab.population.tiny_tasks import TinyText
from tests.lab.proof.small import member


def text(**settings: object) -> Task:
    return TinyText(TinyText.defaults.replace(**settings))


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
    monkeypatch.setattr("esper.lab.proof.static.WIDTHS", ("breadth",))
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


def test_every_block_in_front_of_a_slot_is_as_many_from_the_beginning() -> None:
    task = text()
    deep = deepened(task, 4)
    whole, own = deep.build_host(1), task.build_host(1)
    layers = [type(module).__name__ for module in whole.modules()].count("AttentionLayer")
    assert [type(module).__name__ for module in own.modules()].count("AttentionLayer") == 2
    assert layers == 8
    first, *_, last = (p for name, p in whole.named_parameters() if name.endswith("qkv.weight"))
    assert not first.equal(last)
    assert deepened(task, 1) is task


def test_the_rate_is_the_members_own_or_a_tuned_one() -> None:
    own = GivenMember("text", text(learning_rate=0.3))
    assert DepthArm("depth 2", lambda member: 2).task(own).config.learning_rate == 0.3
    assert (
        DepthArm("depth 2", lambda member: 2, {"text": 0.6}).task(own).config.learning_rate == 0.6
    )


def test_a_host_whose_blocks_cannot_be_copied_is_refused() -> None:
    with pytest.raises(UsageError, match=r"at r0c0 .*leave out the arms of depth"):
        deepened(member(4).task(), 2)


@pytest.mark.parametrize("budget", ["30x", "7.77x", 4e9])
def test_a_budget_is_that_of_the_members_own_start(budget: str | float) -> None:
    task = text(budget=budget)
    seeds = (BuiltInSeed(slot="r0c1", blueprint="kin", channels=8, copies=3),)
    for other in (widened(task, 3.0, 0.1), from_scratch(task, seeds), deepened(task, 2)):
        assert other.host_flops > 1.3 * task.host_flops
        # A budget that is a multiple of another network is rounded once more.
        assert other.compute_budget(9) == pytest.approx(task.compute_budget(9), abs=2)


def test_a_network_is_no_deeper_than_its_budget_pays_for() -> None:
    # A step and an evaluation take 39 forward passes, of which an epoch of one block has 126.
    task = text(budget="2x")
    assert deepened(task, 16).host_flops == deepened(task, 2).host_flops > task.host_flops
