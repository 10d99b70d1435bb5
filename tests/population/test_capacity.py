"""How many places stacks get, and when they give some up."""

from __future__ import annotations

import pytest

from esper.population.capacity import Room
from esper.population.engine import SlotSpec

LARGE = SlotSpec("r0c0", "body", "cnn", (1, 8, 32, 32), 8)
SMALL = SlotSpec("r0c1", "neck", "cnn", (1, 8, 2, 2), 8)


def test_without_spares_there_are_as_many_places_as_seeds() -> None:
    room = Room()
    assert [room.places(LARGE, count) for count in (1, 5, 100)] == [1, 5, 100]
    assert list(room.too_large({"a": (5, 4), "b": (3, 3)}, has_moved=False)) == ["a"]


@pytest.mark.parametrize(
    ("count", "places"), [(1, 1), (2, 2), (3, 3), (5, 6), (7, 8), (9, 12), (33, 48), (60, 64)]
)
def test_places_of_large_activations_are_few(count: int, places: int) -> None:
    assert Room(spares=True, rows=64, sample_bytes=256).places(LARGE, count) == places


def test_places_of_small_activations_are_many() -> None:
    room = Room(spares=True, rows=128, sample_bytes=128)
    assert room.places(SMALL, 1) == 16
    assert room.places(SMALL, 13) == 16
    assert room.places(SMALL, 20) == 32
    assert room.places(SMALL, 128) == 128


def test_places_are_given_up_when_many_have_been_empty_for_long() -> None:
    room = Room(spares=True, rows=64, sample_bytes=256)
    few = {"a": (8, 6), "b": (8, 8)}
    many = {"a": (8, 2), "b": (8, 8), "c": (2, 0)}
    assert not any(list(room.too_large(few, has_moved=True)) for _ in range(20))
    given_up = [list(room.too_large(many, has_moved=False)) for _ in range(9)]
    assert given_up == [[]] * 8 + [["a", "c"]]
    # Where a capture is void anyway, it takes less.
    assert [bool(list(room.too_large(many, has_moved=True))) for _ in range(3)] == [0, 0, 1]


def test_places_stay_for_other_rows_where_they_cost_little() -> None:
    room = Room(spares=True, rows=128, sample_bytes=128)
    assert room.is_cheap(SMALL)
    assert room.kept(SMALL, 32, 20) == 32
    # Half too many are given up, all when nobody came.
    assert room.kept(SMALL, 96, 20) == 32
    assert room.kept(SMALL, 32, 0) == 0
    assert Room(spares=True, rows=64, sample_bytes=256).kept(LARGE, 32, 32) == 0
    assert Room(rows=128, sample_bytes=128).kept(SMALL, 32, 32) == 0
