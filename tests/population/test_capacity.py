"""How many entries stacks get, and when they give some up."""

from __future__ import annotations

import pytest

from esper.population.capacity import StackCapacity
from esper.population.engine import SlotSpec

LARGE = SlotSpec("r0c0", "body", "cnn", (1, 8, 32, 32), 8)
SMALL = SlotSpec("r0c1", "neck", "cnn", (1, 8, 2, 2), 8)


def test_without_spares_there_are_as_many_entries_as_seeds() -> None:
    capacity = StackCapacity()
    assert [capacity.entries(LARGE, count) for count in (1, 5, 100)] == [1, 5, 100]
    assert list(capacity.oversized({"a": (5, 4), "b": (3, 3)}, has_changed=False)) == ["a"]


@pytest.mark.parametrize(
    ("count", "entries"), [(1, 1), (2, 2), (3, 3), (5, 6), (7, 8), (9, 12), (33, 48), (60, 64)]
)
def test_entries_of_large_activations_are_few(count: int, entries: int) -> None:
    assert (
        StackCapacity(has_spares=True, rows=64, sample_bytes=256).entries(LARGE, count) == entries
    )


def test_entries_of_small_activations_are_many() -> None:
    capacity = StackCapacity(has_spares=True, rows=128, sample_bytes=128)
    assert capacity.entries(SMALL, 1) == 16
    assert capacity.entries(SMALL, 13) == 16
    assert capacity.entries(SMALL, 20) == 32
    assert capacity.entries(SMALL, 128) == 128


def test_entries_are_given_up_when_many_have_been_empty_for_long() -> None:
    capacity = StackCapacity(has_spares=True, rows=64, sample_bytes=256)
    few = {"a": (8, 6), "b": (8, 8)}
    many = {"a": (8, 2), "b": (8, 8), "c": (2, 0)}
    assert not any(list(capacity.oversized(few, has_changed=True)) for _ in range(20))
    given_up = [list(capacity.oversized(many, has_changed=False)) for _ in range(9)]
    assert given_up == [[]] * 8 + [["a", "c"]]
    # Where a capture is void anyway, it takes less.
    assert [bool(list(capacity.oversized(many, has_changed=True))) for _ in range(3)] == [0, 0, 1]


def test_entries_stay_for_other_rows_where_they_cost_little() -> None:
    capacity = StackCapacity(has_spares=True, rows=128, sample_bytes=128)
    assert capacity.is_cheap(SMALL)
    assert capacity.entries_kept(SMALL, 32, 20) == 32
    # Half too many are given up, all when nobody came.
    assert capacity.entries_kept(SMALL, 96, 20) == 32
    assert capacity.entries_kept(SMALL, 32, 0) == 0
    assert (
        StackCapacity(has_spares=True, rows=64, sample_bytes=256).entries_kept(LARGE, 32, 32) == 0
    )
    assert StackCapacity(rows=128, sample_bytes=128).entries_kept(SMALL, 32, 32) == 0
