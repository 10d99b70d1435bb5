"""Several tasks seen as one population: padding, and slots that a row does not have."""

from __future__ import annotations

import dataclasses
import math

import torch

from esper.leyline.actions import LifecycleOp
from esper.leyline.rules import build_masks
from esper.leyline.signals import Signals
from esper.population.merging import (
    first_difference,
    join_rows,
    merge_signals,
    merge_views,
    take_rows,
)
from tests.plots import same
from tests.population.tiny_tasks import do, germinate, make_population, populations, row_tree

ABSENT = {
    "stage": -1,
    "blueprint": -1,
    "alpha_mode": -1,
    "algorithm": -1,
    "epochs_in_stage": -1,
    "age": -1,
    "counterfactual_age": -1,
    "contribution": math.nan,
    "contribution_se": math.nan,
    "contribution_velocity": math.nan,
}


def test_a_slot_that_a_row_does_not_have_looks_like_an_empty_one_that_is_off() -> None:
    with populations(make_population(rows=6)) as (population,):
        signals = population.reset()
        do(population, *[germinate("norm", 0)] * 6)
        signals = do(population)
        assert (
            signals.enabled.tolist()
            == [[True] * 3] * 2 + [[True, True, False]] * 2 + [[True, False, False]] * 2
        )
        empty = ~signals.enabled
        for field in dataclasses.fields(Signals):
            tensor = getattr(signals, field.name)
            assert tensor.shape[0] == 6
            if tensor.dim() == 2 and tensor.shape[1] == 3 and field.name != "interaction":
                wanted = torch.full_like(tensor[empty], ABSENT.get(field.name, 0))
                assert same(tensor[empty], wanted), field.name
        assert signals.interaction.shape == (6, 3, 3)
        parts = [group.signals() for group in population.groups]
        assert same(signals.val_loss, torch.cat([part.val_loss for part in parts]))
        assert signals.occupied[:, 0].all()


def test_one_part_that_needs_no_padding_is_itself() -> None:
    with populations(make_population(rows=3)) as (population,):
        population.reset()
        part = population.groups[0].signals()
        assert merge_signals([part], 3) is part


def test_masks_never_allow_a_slot_a_row_does_not_have() -> None:
    with populations(make_population(rows=6)) as (population,):
        population.reset()
        for _ in range(2):
            masks = population.masks()
            enabled = population.signals().enabled
            assert not bool((masks.slot_by_op & ~enabled[:, None]).any())
            assert not bool(masks.blueprint_by_slot[~enabled].any())
            assert bool(masks.op[:, LifecycleOp.WAIT].all())
            do(population, *[germinate("norm", 0)] * 6)


def test_an_action_for_such_a_slot_is_illegal_and_changes_nothing() -> None:
    acting, waiting = make_population(rows=6), make_population(rows=6)
    with populations(acting, waiting):
        acting.reset()
        waiting.reset()
        wait = {"op": LifecycleOp.WAIT}
        there = [
            *[wait] * 2,
            germinate("norm", 2),
            {"op": LifecycleOp.PRUNE, "slot": 2},
            germinate("norm", 1),
            {"op": LifecycleOp.ADVANCE, "slot": 7},
        ]
        signals = do(acting, *there)
        do(waiting)
        assert signals.last_success.tolist() == [True, True, False, False, False, False]
        for row in range(6):
            one, other = row_tree(acting, row), row_tree(waiting, row)
            for tree in (one, other):
                del tree["state"]["last_op"], tree["state"]["last_success"]
            assert same(one, other)


def test_a_blueprint_of_another_topology_is_illegal() -> None:
    with populations(make_population(rows=3)) as (population,):
        population.reset()
        signals = do(population, germinate("lora"), germinate("conv_light"), germinate("attention"))
        assert signals.last_success.tolist() == [False, False, False]
        assert not bool(signals.occupied.any())


def test_views_of_rows_give_the_masks_of_rows() -> None:
    with populations(make_population(rows=3)) as (population,):
        population.reset()
        do(population, germinate("norm", 1))
        views = [group.view() for group in population.groups]
        rules = population.config.lifecycle.effective_rules
        merged = build_masks(merge_views(views, 3), rules)
        for row, view in enumerate(views):
            alone = build_masks(view, rules)
            slots = view.stage.shape[1]
            assert torch.equal(merged.op[row], alone.op[0])
            assert torch.equal(merged.slot_by_op[row, :, :slots], alone.slot_by_op[0])


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
