"""Snapshots of rows, put together, taken apart and compared."""

from __future__ import annotations

import torch

from esper.population.snapshots import first_difference, join_rows, take_rows
from tests.plots import same


def snapshot(*rows: int) -> dict[str, object]:
    return {
        "state": {"a": torch.tensor(rows), "b": {"c": torch.tensor(rows)[:, None].expand(-1, 2)}},
        "names": [f"row {row}" for row in rows],
    }


def test_rows_are_put_together_and_taken_out_again() -> None:
    whole = join_rows([snapshot(0, 1), snapshot(2), snapshot(3, 4)])
    assert same(whole, snapshot(0, 1, 2, 3, 4))
    assert same(take_rows(whole, 1, 4), snapshot(1, 2, 3))
    assert same(take_rows(whole, 0, 5), whole)


def test_the_first_difference_is_named() -> None:
    made = {"tasks": ["a", "b"], "settings": {"x": 1, "gates": {"least": 2.0}}, "more": [{"n": 1}]}
    assert first_difference(made, made) is None
    assert first_difference(made, {**made, "tasks": ["a"]}) == ("tasks ['a', 'b']", "tasks ['a']")
    assert first_difference(made, {**made, "tasks": ["a", "c"]}) == (
        "tasks ['a', 'b']",
        "tasks ['a', 'c']",
    )
    other = {**made, "settings": {"x": 1, "gates": {"least": 3.0}}}
    assert first_difference(made, other) == ("settings.gates.least 2.0", "settings.gates.least 3.0")
    assert first_difference(made, {**made, "more": [{"n": 2}]}) == ("more[0].n 1", "more[0].n 2")
    assert first_difference({"x": 1}, {"x": 1, "y": 2}) == ("y None", "y 2")


def test_lists_and_tuples_are_alike() -> None:
    assert first_difference({"shape": (1, 2)}, {"shape": [1, 2]}) is None
