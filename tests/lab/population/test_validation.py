"""Who takes module in a pass over validation data, and where."""

from __future__ import annotations

import numpy as np
import torch

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.state import SlotState
from esper.lab.population.engine import CudaStreams, SlotSpec
from esper.lab.population.parameter_stack import StackCapacity
from esper.lab.population.seed_stacks import SeedStacks
from esper.lab.population.slot_forward import BLENDED, EMPTY, SlotForward
from esper.lab.population.validation import SelectedRows
from esper.leyline.stages import SeedStage
from tests.lab.population.seed_states import (
    CHANNELS,
    GATE,
    MULTIPLY,
    OTHER,
    SPEC,
    clear,
    make_seed_stacks,
    make_state,
    put,
)

MLP, LORA = BLUEPRINTS.get("mlp"), BLUEPRINTS.get("lora")
ON, OFF = np.ones((4, 1), dtype=bool), np.zeros((4, 1), dtype=bool)


def make_rows(
    seed_stacks: SeedStacks, slots: tuple[SlotSpec, ...] = (SPEC,), *, has_spares: bool = False
) -> SelectedRows:
    capacity = StackCapacity(has_spares=has_spares, rows=64, sample_bytes=1)
    return SelectedRows(seed_stacks, slots, capacity, torch.device("cpu"), CudaStreams())


def forward_at(selected: SelectedRows, slot: int = 0) -> SlotForward:
    forward = selected.forwards[slot]
    assert forward is not None
    return forward


def five_rows() -> tuple[SeedStacks, SlotState]:
    seed_stacks, state = make_seed_stacks(5), make_state(5)
    for row, name in ((4, "mlp"), (1, "lora"), (0, "mlp"), (3, "mlp")):
        state = put(state, row, name, algorithm=GATE if row == 4 else MULTIPLY)
    seed_stacks.sync(state)
    return seed_stacks, state


def test_rows_come_as_often_as_they_are_asked_for() -> None:
    seed_stacks, state = five_rows()
    selected = make_rows(seed_stacks)
    selected.select(np.array([3, 2, 4, 3]), ON, state)
    forward = forward_at(selected)
    assert selected.rows.tolist() == [3, 2, 4, 3]
    assert forward.index.row_of_entry.tolist() == [0, 3, 2]
    assert forward.index.entry_of_row.tolist() == [0, -1, 2, 1]
    assert forward.index.entry_of_gate.tolist() == [2]
    assert forward.index.gate_of_entry.tolist() == [-1, -1, 0]
    (module,) = forward.modules
    assert module.entries is not None
    assert [seed_stacks.stack(0, MLP.id).rows[entry] for entry in module.entries.tolist()] == [
        3,
        3,
        4,
    ]


def test_only_seeds_that_are_on_and_blended_take_part() -> None:
    seed_stacks, state = five_rows()
    selected = make_rows(seed_stacks)
    on = np.array([[False], [True], [False], [True]])
    selected.select(np.array([3, 2, 4, 3]), on, state)
    assert forward_at(selected).index.row_of_entry.tolist() == [3]
    selected.select(np.array([3, 2, 4, 3]), OFF, state)
    assert selected.forwards == (None,)
    selected.select(np.array([2]), ON[:1], state)
    assert selected.forwards == (None,)
    young = put(state, 3, "mlp", SeedStage.TRAINING)
    seed_stacks.sync(young)
    selected.select(np.array([3, 2, 4, 3]), ON, young)
    assert forward_at(selected).index.row_of_entry.tolist() == [2]


def test_all_entries_in_order_need_no_choice() -> None:
    seed_stacks, state = make_seed_stacks(3), make_state(3)
    for row in range(3):
        state = put(state, row, "mlp")
    seed_stacks.sync(state)
    selected = make_rows(seed_stacks)
    selected.select(np.arange(3), ON[:3], state)
    assert [module.entries for module in forward_at(selected).modules] == [None]


def test_with_some_to_spare_memory_stays_until_something_does_not_fit() -> None:
    seed_stacks, state = five_rows()
    selected = make_rows(seed_stacks, has_spares=True)
    rows = np.array([3, 2, 4, 3])
    selected.select(rows, ON, state)
    forward, version = forward_at(selected), selected.layout_version
    memory = selected.rows.data_ptr()
    # One seed of LORA, which takes no part now, may soon; so there is an entry for it.
    assert [module.count for module in forward.modules] == sorted_counts(selected)
    assert int((forward.index.state == BLENDED).sum()) == 3
    selected.select(np.array([1, 0]), ON[:2], state)
    assert selected.layout_version == version
    assert forward_at(selected) is forward
    assert selected.rows.data_ptr() == memory
    assert selected.rows.tolist()[:2] == [1, 0]
    assert int((forward.index.state == BLENDED).sum()) == 2
    entries = forward.index.entry_of_row.tolist()
    assert entries[2:] == [-1] * (len(entries) - 2)
    for position, row in ((0, 1), (1, 0)):
        entry = entries[position]
        assert int(forward.index.row_of_entry[entry]) == position
        assert row_of(seed_stacks, forward, entry) == row
    many = np.array([4] * 40)
    selected.select(many, np.ones((40, 1), dtype=bool), state)
    assert selected.layout_version == version + 1
    assert len(selected.rows) >= 40
    # What was needed once is remembered when memory is laid out anew.
    seed_stacks.sync(clear(state, 1))
    selected.select(rows, ON, clear(state, 1))
    assert selected.layout_version == version + 2
    assert len(selected.rows) >= 39


def test_a_captured_pass_is_void_when_the_stacks_have_changed() -> None:
    seed_stacks, state = five_rows()
    selected = make_rows(seed_stacks, has_spares=True)
    selected.select(np.arange(4), ON, state)
    version = selected.layout_version
    state = put(state, 2, "lora")
    seed_stacks.sync(state)
    selected.select(np.arange(4), ON, state)
    assert selected.layout_version == version + 1


def test_slots_are_apart() -> None:
    seed_stacks, state = make_seed_stacks(3, (SPEC, OTHER)), make_state(3, 2)
    state = put(put(state, 0, "mlp"), 2, "lora", slot=1)
    seed_stacks.sync(state)
    selected = make_rows(seed_stacks, (SPEC, OTHER), has_spares=True)
    selected.select(np.array([0, 1, 2]), np.ones((3, 2), dtype=bool), state)
    first, second = forward_at(selected, 0), forward_at(selected, 1)
    assert first.index.entry_of_row.tolist()[:3] == [0, -1, -1]
    assert second.index.entry_of_row.tolist()[:3] == [-1, -1, 0]
    assert int((second.index.state == EMPTY).sum()) == len(second.index.state) - 1
    seed_stacks.stack(1, LORA.id).parameters.flat.normal_()
    x = torch.randn(len(selected.rows), 2, CHANNELS, dtype=torch.float64)
    out, dim = second.run(x, 0)
    assert dim == 0
    changed = (out != x).flatten(1).any(1).tolist()
    assert changed == [False, False, True] + [False] * (len(changed) - 3)


def sorted_counts(selected: SelectedRows) -> list[int]:
    return [count for (_, kind), count in sorted(selected._entries.items()) if kind >= 0]


def row_of(seed_stacks: SeedStacks, forward: SlotForward, entry: int) -> int:
    """Return the row of the seed in an entry."""
    for kind, module in zip(sorted((MLP.id, LORA.id)), forward.modules, strict=True):
        if entry < module.count:
            assert module.entries is not None
            return seed_stacks.stack(0, kind).rows[int(module.entries[entry])]
        entry -= module.count
    raise AssertionError(entry)
