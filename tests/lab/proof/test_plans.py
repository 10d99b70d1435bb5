from __future__ import annotations

from pathlib import Path

import pytest

from esper.lab.proof.plans import (
    BLUEPRINTS,
    STANDARD_PLANS,
    breed_plan,
    draw_heuristic,
    draw_plan,
    make_plans,
    read_plans,
    start_of,
)
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import UsageError
from esper.leyline.slots import TOPOLOGIES
from esper.tamiyo.controllers.heuristic import HeuristicConfig
from esper.tamiyo.controllers.schedule import parse_schedule
from esper.testing.controllers import BLUEPRINTS_BY_TOPOLOGY
from esper.utils.randomness import generator

CONTEXT = ControllerContext(slot_names=("r0c0", "r0c1", "r0c2"))


def test_plans_depend_on_seed_and_number_alone() -> None:
    assert draw_plan(1, 2, ["cnn"]) == draw_plan(1, 2, ["cnn"])
    assert draw_plan(1, 2, ["cnn"]) != draw_plan(2, 2, ["cnn"])
    assert len({str(draw_plan(0, number, ["cnn"]).entries) for number in range(50)}) > 45


@pytest.mark.parametrize("kinds", [("cnn",), ("vector",), ("sequence",), ("cnn", "vector")])
def test_every_plan_is_a_sound_schedule(kinds: tuple[str, ...]) -> None:
    for plan in make_plans(0, 60, kinds):
        entries = parse_schedule(plan.entries, CONTEXT)
        assert 1 <= len(entries) <= 3
        assert len({entry.slot for entry in entries}) == len(entries)
        assert all(entry.is_tended for entry in entries)


def test_a_plan_starts_with_its_earliest_entry() -> None:
    grow = {"op": "grow", "slot": "0%", "blueprint": "norm"}
    assert start_of([{"epoch": "30%", **grow}, {"epoch": "5%", **grow}]) == 0.05
    assert all(0 <= start_of(plan.entries) <= 0.5 for plan in make_plans(0, 60, ["cnn"]))


@pytest.mark.parametrize("kinds", [("cnn",), ("cnn", "vector")])
def test_children_are_sound_schedules_that_keep_most_of_their_parent(
    kinds: tuple[str, ...],
) -> None:
    stream = generator(0, "children")
    parents = make_plans(0, 30, kinds)
    different = 0
    for parent in parents:
        child = breed_plan("child", parent.entries, stream, kinds)
        entries = parse_schedule(child.entries, CONTEXT)
        assert 1 <= len(entries) <= 3
        assert len({entry.slot for entry in entries}) == len(entries)
        assert abs(len(child.entries) - len(parent.entries)) <= 2
        assert {e["slot"] for e in child.entries} & {e["slot"] for e in parent.entries}
        different += child.entries != parent.entries
    assert different > 20
    kept = breed_plan("a", parents[-1].entries, generator(0, "same"), kinds)
    assert kept == breed_plan("a", parents[-1].entries, generator(0, "same"), kinds)


def test_every_kind_of_slot_gets_a_blueprint_that_fits() -> None:
    for topology in TOPOLOGIES:
        assert set(BLUEPRINTS[topology]) <= set(BLUEPRINTS_BY_TOPOLOGY[topology])
    plan = draw_plan(0, 0, ["cnn", "vector"])
    for entry in plan.entries:
        assert entry["blueprint"][0] in BLUEPRINTS["cnn"]
        assert entry["blueprint"][1] in BLUEPRINTS["vector"]


def test_the_standard_plans_come_first_where_they_fit() -> None:
    assert make_plans(0, 20, ["cnn", "cnn"])[:16] == STANDARD_PLANS
    assert len(make_plans(0, 4, ["cnn"])) == 4
    assert make_plans(0, 4, ["vector"])[0].name == "plan 0"


def test_settings_of_the_heuristic_are_sound_and_begin_with_its_defaults() -> None:
    rotation = HeuristicConfig().rotation
    drawn = [draw_heuristic(0, number, rotation) for number in range(30)]
    assert drawn[0] == {}
    configs = {HeuristicConfig.from_mapping(each) for each in drawn}
    assert len(configs) > 25
    assert all(set(config.rotation) >= set(rotation) for config in configs)


def test_a_file_without_schedules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read as the schedules"):
        read_plans(tmp_path / "nothing.json")
    for text in ("[1]", '{"m": 3}'):
        (tmp_path / "list.json").write_text(text)
        with pytest.raises(UsageError, match="no schedules by name"):
            read_plans(tmp_path / "list.json")
