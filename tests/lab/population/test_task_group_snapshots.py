"""Snapshots of rows, put together, taken apart and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from esper.lab.population.task_group import first_difference, join_rows, take_rows
from esper.leyline.errors import CheckpointError, UsageError
from tests.lab.population.tiny_tasks import TinyValues, advance, do, germinate, make_population
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


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda part: part.pop(name)


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ((), lambda saved: saved.update(seed="x")),
        ((), lambda saved: saved.update(row_seeds=[1])),
        ((), lambda saved: saved.update(rows=[])),
        ((), lambda saved: saved.update(rows={"a": 1})),
        (("rows", 0), without("state")),
        (("rows", 0), lambda part: part.update(safe=[])),
        (("rows", 0), lambda part: part.update(train_loss=torch.zeros(0))),
        (("rows", 0, "state"), lambda part: part["stage"].fill_(10**6)),
        (("rows", 0, "tracker"), lambda part: part["epoch"].fill_(-1)),
        (("rows", 0, "weights", 0), lambda part: part.update(germinations=[1])),
        (("rows", 0, "weights", 0, "host"), lambda part: part.update(dict.fromkeys(part, 0.5))),
        (("rows", 0, "weights", 0, "host"), lambda part: part.popitem()),
        (("rows", 0, "weights", 0, "seeds"), lambda part: part.update(x={})),
        (
            ("rows", 0, "weights", 0, "host"),
            lambda part: part.update(dict.fromkeys(part, torch.zeros(1))),
        ),
        (
            ("rows", 0, "weights", 0, "host_moments", "momentum"),
            lambda part: part.update(dict.fromkeys(part, torch.zeros(1, 1, 1))),
        ),
    ],
)
@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_a_snapshot_that_was_tampered_with_is_refused_and_leaves_nothing_behind(
    strategy: Any, place: tuple[Any, ...], change: Callable[[Any], object]
) -> None:
    population = make_population([TinyValues], 2, strategy)
    population.reset()
    do(population, germinate("mlp"))
    do(population, advance())
    whole = population.snapshot()
    tampered = take_apart(whole)
    part = tampered
    for step in place:
        part = part[step]
    change(part)
    with pytest.raises((CheckpointError, UsageError)) as caught:
        population.restore(tampered)
    assert "\n" not in str(caught.value)
    population.restore(whole)
    assert same(population.snapshot(), whole)
    population.close()


def take_apart(tree: Any) -> Any:
    """Return a copy that shares nothing."""
    if isinstance(tree, dict):
        return {key: take_apart(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [take_apart(value) for value in tree]
    return tree.clone() if isinstance(tree, torch.Tensor) else tree
