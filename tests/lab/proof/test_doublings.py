"""Plans that double the depth of a network, and that they do it."""

from __future__ import annotations

import dataclasses

import pytest

from esper.kasmina.blueprints.registry import blueprint_names
from esper.lab.proof.arm import ScheduleArm, waiting
from esper.lab.proof.doublings import SHARES, breed_doublings, doubling_plan, make_doublings
from esper.lab.proof.play import Cell, Player
from esper.lab.tasks import get_family
from esper.leyline.actions import LifecycleOp
from esper.leyline.controller import ControllerContext
from esper.tamiyo.controllers.schedule import parse_schedule
from esper.utils.randomness import generator
from esper.utils.settings import change_settings
from tests.lab.proof.small import play_config

CONTEXT = ControllerContext(
    slot_names=("r0c0", "r0c1"), blueprint_names=blueprint_names(), copies=("kin",)
)


def moments(plan_entries: object) -> list[int]:
    return [int(str(entry["epoch"])[:-1]) for entry in plan_entries]  # type: ignore[attr-defined]


def test_a_plan_names_its_depths_and_moments() -> None:
    plan = doubling_plan((10, 30))
    assert plan.name == "1>2@10%>4@30%"
    first, second = parse_schedule(plan.entries, CONTEXT)
    assert (first.op, first.first_epoch(60)) == (LifecycleOp.GERMINATE, 6)
    assert second.first_epoch(60) == 18
    assert first.slots_of(2) == (1, 0)


def test_plans_are_the_same_every_time_and_all_different() -> None:
    plans = make_doublings(3, 60, ("sequence",))
    assert plans == make_doublings(3, 60, ("sequence",))
    assert len({plan.name for plan in plans}) == 60
    assert {len(plan.entries) for plan in plans} == {1, 2}
    for plan in plans:
        assert moments(plan.entries) == sorted(set(moments(plan.entries)))


def test_a_bred_plan_differs_in_one_moment() -> None:
    stream, parent = generator(0, "breeding"), doubling_plan((12, 30))
    seen = set()
    for number in range(60):
        child = moments(breed_doublings(f"child {number}", parent.entries, stream, ()).entries)
        assert child == sorted(set(child))
        assert set(child) <= set(SHARES)
        assert len(set(child) ^ {12, 30}) in (1, 2)
        seen.add(len(child))
    assert seen == {1, 2}


def test_networks_end_as_deep_as_their_plan_and_spend_the_same() -> None:
    family = get_family("depth_small")
    member = dataclasses.replace(family.members("train")[0], width=8, steps=60)
    played = play_config(strategy="sequential", horizon=12)
    config = change_settings(played, {"population.copies": True, "population.ablate_every": 20})
    plans = [doubling_plan((20,)), doubling_plan((10, 30))]
    arms = [waiting(), *(ScheduleArm(each.name, lambda _, e=each: e.entries) for each in plans)]  # type: ignore[misc]
    (results,) = Player(config).play([Cell("test", arm, member, (1,)) for arm in arms])
    copies = [sum(seed["copies"] for seed in one.grown[0]) for one in results]
    assert copies == [0, 1, 3]
    spent = [one.training_flops[0] for one in results]
    assert spent == pytest.approx([spent[0]] * 3, rel=0.05)
    assert spent[0] == pytest.approx(member.task().compute_budget(0), rel=0.05)
