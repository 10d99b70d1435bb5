"""Many networks in one tensor: what is written, kept and read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.kasmina.engine import Moments
from esper.lab.population.engine import SlotSpec
from esper.lab.population.parameter_stack import (
    ParameterStack,
    StackCapacity,
    flatten_gradients,
    reached_columns,
)

SHAPES = {"weight": torch.Size((3, 2)), "bias": torch.Size((3,)), "scale": torch.Size(())}
CPU = torch.device("cpu")


def make_values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def make_stack(rows: int) -> ParameterStack:
    stack = ParameterStack(SHAPES, torch.float64, CPU)
    stack.resize([], rows)
    for row in range(rows):
        stack.write(row, make_values(row), Moments(make_values(100 + row) if row % 2 else {}))
    return stack


def test_leaves_are_views_of_the_flat_tensor() -> None:
    stack = make_stack(3)
    assert stack.width == 10
    assert stack.leaves["weight"].shape == (3, 3, 2)
    stack.flat[1].fill_(7.0)
    assert bool((stack.leaves["weight"][1] == 7).all())
    assert bool((stack.leaves["scale"][1] == 7).all())
    stack.flat.sub_(0.5)
    assert bool((stack.leaves["bias"][1] == 6.5).all())
    for name, leaf in stack.leaves.items():
        assert leaf.data_ptr() >= stack.flat.data_ptr(), name
        assert leaf.is_leaf


def test_networks_come_and_go() -> None:
    stack = make_stack(4)
    stack.resize([0, 2, 3], 3)
    assert len(stack) == 3
    for place, seed in enumerate((0, 2, 3)):
        values, moments = stack.read(place)
        rest = make_values(100 + seed) if seed % 2 else None
        for name, expected in make_values(seed).items():
            assert torch.equal(values[name], expected)
            still = torch.zeros_like(expected) if rest is None else rest[name]
            assert torch.equal(moments.momentum[name], still)
        assert not moments.squares
        assert not moments.steps
    stack.write(0, make_values(9), Moments(make_values(10)))
    values, moments = stack.read(0)
    assert torch.equal(values["bias"], make_values(9)["bias"])
    assert torch.equal(moments.momentum["bias"], make_values(10)["bias"])
    stack.write(0, make_values(9), Moments())
    assert not bool(stack.momentum[0].any())
    stack.resize([2, 0], 4, make_values(7))
    assert torch.equal(stack.read(0)[0]["bias"], make_values(3)["bias"])
    for place in (2, 3):
        values, moments = stack.read(place)
        assert torch.equal(values["weight"], make_values(7)["weight"])
        assert not bool(moments.momentum["weight"].any())
    stack.resize([], 0)
    assert len(stack) == 0
    assert stack.leaves["weight"].shape == (0, 3, 2)


def test_leaves_may_have_a_precision_of_their_own() -> None:
    stack = ParameterStack(SHAPES, torch.float32, CPU, compute=torch.bfloat16)
    stack.resize([], 1)
    stack.fill([make_values(0)])
    assert all(leaf.dtype == torch.bfloat16 for leaf in stack.leaves.values())
    assert torch.equal(stack.leaves["weight"][0], make_values(0)["weight"].bfloat16())
    stack.flat += 1e-3
    stack.refresh()
    moved = (make_values(0)["weight"].float() + 1e-3).bfloat16()
    assert torch.equal(stack.leaves["weight"][0], moved)
    assert stack.read(0)[0]["weight"].dtype == torch.float32


def test_what_is_read_is_a_copy() -> None:
    stack = make_stack(2)
    values, moments = stack.read(1)
    before, speed = stack.flat.clone(), stack.momentum.clone()
    for tensor in (*values.values(), *moments.momentum.values()):
        tensor.zero_()
    assert torch.equal(stack.flat, before)
    assert torch.equal(stack.momentum, speed)


def test_what_adamw_remembers_moves_with_its_network() -> None:
    stack = ParameterStack(SHAPES, torch.float64, CPU, has_squares=True)
    stack.resize([], 3)
    for row in range(3):
        steps = dict.fromkeys(SHAPES, 10 + row)
        moments = Moments(make_values(100 + row), make_values(200 + row), steps)
        stack.write(row, make_values(row), moments)
    stack.resize([2, 0], 4, make_values(7))
    for place, row in enumerate((2, 0)):
        values, moments = stack.read(place)
        assert torch.equal(values["bias"], make_values(row)["bias"])
        assert torch.equal(moments.momentum["weight"], make_values(100 + row)["weight"])
        assert torch.equal(moments.squares["scale"], make_values(200 + row)["scale"])
        assert moments.steps == dict.fromkeys(SHAPES, 10 + row)
    spare = stack.read(3)[1]
    assert not any(bool(value.any()) for value in spare.squares.values())
    assert spare.steps == dict.fromkeys(SHAPES, 0)
    stack.write(0, make_values(5), Moments())
    assert stack.steps.tolist() == [0, 10, 0, 0]
    stack.fill([make_values(row) for row in range(4)])
    assert not bool(stack.steps.any())
    assert stack.squares is not None
    assert not bool(stack.squares.any())


def test_a_stack_without_parameters() -> None:
    stack = ParameterStack({}, torch.float32, CPU)
    stack.resize([], 2)
    stack.fill([{}, {}])
    assert (len(stack), stack.width, stack.leaves) == (2, 0, {})
    assert stack.read(0) == ({}, Moments())


def test_gradients_stand_side_by_side_and_absent_ones_are_zero() -> None:
    stack = make_stack(2)
    leaves = list(stack.leaves.values())
    gradients = [torch.ones_like(leaves[0]), None, torch.full_like(leaves[2], 2.0)]
    flat = flatten_gradients(leaves, gradients)
    assert flat[0].tolist() == [1.0] * 6 + [0.0] * 3 + [2.0]
    reached = reached_columns(leaves, gradients)
    assert reached is not None
    assert reached.tolist() == [True] * 6 + [False] * 3 + [True]
    assert reached_columns(leaves, [torch.ones_like(leaf) for leaf in leaves]) is None


def test_frozen_parameters_need_no_gradient() -> None:
    stack = ParameterStack(SHAPES, torch.float64, CPU, frozen=["bias"])
    stack.resize([], 1)
    stack.fill([make_values(0)])
    assert {name for name, leaf in stack.leaves.items() if leaf.requires_grad} == {
        "weight",
        "scale",
    }


def test_norms_are_per_tensor_and_what_is_not_finite_stays_in_its_tensor() -> None:
    stack = make_stack(2)
    flat = stack.flat.clone()
    norms = stack.tensor_norms(flat)
    for row in range(2):
        expected = [value.norm() for value in make_values(row).values()]
        torch.testing.assert_close(norms[row], torch.stack(expected), rtol=1e-14, atol=0)
    flat[0, 7] = torch.inf
    spoiled = stack.tensor_norms(flat)
    assert torch.isnan(spoiled[0]).tolist() == [False, True, False]
    assert torch.equal(spoiled[1], norms[1])
    assert spoiled[0, 0] == norms[0, 0]


LARGE = SlotSpec("r0c0", "body", "cnn", (1, 32, 32, 32), 32)
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
