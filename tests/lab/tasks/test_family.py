"""Families in general: products, draws, registration. Those that ship: test_arena.py."""

from __future__ import annotations

from typing import Any

import pytest

from esper.lab.tasks.family import FAMILIES, Axes, Family, get_family, register_family
from esper.lab.tasks.member import Member
from esper.leyline.errors import ConfigError, UsageError


def axes(**changes: Any) -> Axes:
    values: dict[str, Any] = {
        "data": ("digits",),
        "width": (2, 4),
        "depth": (2, 3),
        "train_size": (0, 200),
        "label_noise": (0.0, 0.3),
    }
    return Axes(**(values | changes))


def family(**changes: Any) -> Family:
    values = {"train": axes(), "select": axes(width=(3,), depth=(2,))}
    return Family(name="some_family", summary="For tests.", **(values | changes))


def test_a_family_is_the_product_of_its_axes() -> None:
    members = family().members("train")
    assert len(members) == len(set(members)) == 16
    assert {member.width for member in members} == {2, 4}
    assert len(family().architectures("train")) == 4


def test_what_cannot_be_is_left_out() -> None:
    made = axes(depth=(2, 4), train_size=(0, 600), classes=((), (0, 1))).members()
    assert {member.depth for member in made} == {2}
    assert {member.train_size for member in made if member.classes} == {0}


def test_members_stand_architecture_by_architecture() -> None:
    keys = [member.architecture for member in family().members("train")]
    assert [key for index, key in enumerate(keys) if key not in keys[:index]] == keys[::4]


def test_a_draw_depends_on_its_seed_alone() -> None:
    first = family().draw(3, architectures=2, conditions=3)
    assert first == family().draw(3, architectures=2, conditions=3)
    draws = {family().draw(seed, architectures=1, conditions=1) for seed in range(60)}
    assert len(draws) > 10


def test_a_draw_has_distinct_architectures_with_distinct_conditions() -> None:
    for seed in range(20):
        drawn = family().draw(seed, architectures=3, conditions=3)
        assert [len(members) for members in drawn] == [3, 3, 3]
        for members in drawn:
            assert len(set(members)) == 3
            assert len({member.architecture for member in members}) == 1
        assert len({members[0].architecture for members in drawn}) == 3


def test_fewer_conditions_are_the_first_of_more() -> None:
    few = family().draw(5, architectures=1, conditions=2)
    assert few[0] == family().draw(5, architectures=1, conditions=4)[0][:2]


def test_a_draw_ends_where_the_split_does() -> None:
    drawn = family().draw(0, "select", architectures=9, conditions=99)
    assert [len(members) for members in drawn] == [4]
    with pytest.raises(ConfigError, match="no members to claim"):
        family().draw(0, "claim", architectures=1, conditions=1)


def test_every_member_is_drawn_about_as_often() -> None:
    counts = dict.fromkeys(family().members("train"), 0)
    for seed in range(1_600):
        ((member,),) = family().draw(seed, architectures=1, conditions=1)
        counts[member] += 1
    assert min(counts.values()) > 60
    assert max(counts.values()) < 150


def test_the_most_slots_are_those_of_any_split() -> None:
    assert family().max_slots == 3
    deep = {"neutral": (Member(data="cifar16", depth=4),)}
    assert family(claims=deep).max_slots == 4


def test_splits_that_share_a_member_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'digits plain 2x2, .*' in train and select"):
        family(select=axes(width=(2,)))
    twice = {"neutral": (Member(data="digits", width=5), Member(data="digits", width=5))}
    with pytest.raises(ConfigError, match="in claim and claim"):
        family(claims=twice)


def test_members_that_cannot_be_told_apart_by_their_labels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"two members called 'digits plain 2x2, .*noise 0\.3, "):
        family(train=axes(label_noise=(0.3, 0.3 + 1e-9)))


def test_packages_announce_families_by_a_group_that_can_be_guessed() -> None:
    assert FAMILIES.group == "esper.families"


@pytest.mark.parametrize("values", [(), (2, 2)])
def test_an_axis_has_values_each_once(values: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"Axes\.width"):
        axes(width=values)


def test_a_family_is_registered_by_name() -> None:
    assert register_family(family()) is get_family("some_family")
    FAMILIES.unregister("some_family")
    with pytest.raises(UsageError, match="unknown task family 'digit_family'"):
        get_family("digit_family")
