"""Seeds of many rows: they come, go and learn as the lifecycle says."""

from __future__ import annotations

import torch

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.engine import Moments, RowWeights
from esper.kasmina.seedbed import draw_gate, draw_seed
from esper.kasmina.state import SlotState
from esper.lab.population.parameter_stack import StackCapacity
from esper.lab.population.seed_stacks import ABSENT, SeedStacks
from esper.lab.population.slot_forward import BLENDED, EMPTY, ISOLATED
from esper.leyline.stages import SeedStage
from tests.lab.population.seed_states import (
    CHANNELS,
    GATE,
    KEYS,
    MULTIPLY,
    OTHER,
    SPEC,
    clear,
    first_forward,
    make_seed_stacks,
    make_state,
    put,
)
from tests.plots import same

MLP, LORA = BLUEPRINTS.get("mlp"), BLUEPRINTS.get("lora")


def test_seeds_are_drawn_from_the_streams_of_their_rows() -> None:
    seed_stacks = make_seed_stacks(3, (SPEC, OTHER))
    state = put(make_state(3, 2), 1, "mlp", slot=1)
    seed_stacks.sync(state)
    state = put(put(state, 1, "lora", algorithm=GATE), 2, "mlp", slot=1)
    seed_stacks.sync(state)
    assert seed_stacks.germinations == [0, 2, 1]
    values, moments = seed_stacks.read(1)
    expected = {
        0: draw_seed(LORA, CHANNELS, "vector", "bidirectional", (KEYS[1], 0, 1)),
        1: draw_seed(MLP, CHANNELS, "vector", "bidirectional", (KEYS[1], 1, 0)),
    }
    for slot, seed in expected.items():
        for name, parameter in seed.named_parameters():
            assert torch.equal(values[slot][f"seed.{name}"], parameter.detach().double())
            assert not bool(moments[slot].momentum[f"seed.{name}"].any())
    gate = draw_gate(CHANNELS, "vector", (KEYS[1], 0, 2))
    for name, parameter in gate.named_parameters():
        assert torch.equal(values[0][f"gate.{name}"], parameter.detach().double())
    assert seed_stacks.read(0) == ({}, {})


def test_nothing_is_drawn_from_the_callers_numbers() -> None:
    before = torch.get_rng_state()
    make_seed_stacks(2).sync(put(make_state(2), 0, "mlp", algorithm=GATE))
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_that_are_gone_leave_with_their_gates_and_the_others_stay() -> None:
    seed_stacks = make_seed_stacks(3)
    state = make_state(3)
    for row in range(3):
        state = put(state, row, "mlp", algorithm=GATE if row else MULTIPLY)
    seed_stacks.sync(state)
    kept = seed_stacks.read(2)
    seed_stacks.sync(clear(state, 1))
    assert seed_stacks.read(1) == ({}, {})
    assert same(seed_stacks.read(2), kept)
    seed_stacks.sync(make_state(3))
    assert seed_stacks.stacks == []
    assert seed_stacks.germinations == [1, 1, 1]


def test_a_gate_follows_the_algorithm() -> None:
    seed_stacks = make_seed_stacks(2)
    state = put(make_state(2), 0, "mlp")
    seed_stacks.sync(state)
    plain = int(seed_stacks.sizes(state)[0, 0])
    state = put(state, 0, "mlp", algorithm=GATE)
    seed_stacks.sync(state)
    gate = sum(p.numel() for p in draw_gate(CHANNELS, "vector", (0, 0, 0)).parameters())
    assert seed_stacks.sizes(state).tolist() == [[plain + gate], [0]]
    seed_stacks.sync(put(state, 0, "mlp"))
    assert seed_stacks.sizes(state).tolist() == [[plain], [0]]


def test_entries_are_ordered_by_blueprint_and_the_index_says_whose_they_are() -> None:
    seed_stacks = make_seed_stacks(5)
    state = make_state(5)
    for row, name in ((4, "mlp"), (1, "lora"), (0, "mlp"), (3, "mlp")):
        state = put(state, row, name, SeedStage.TRAINING if row == 3 else SeedStage.BLENDING)
        seed_stacks.sync(state)
    grown = first_forward(seed_stacks, state)
    assert grown.index.row_of_entry.tolist() == [1, 4, 0, 3]
    assert grown.index.entry_of_row.tolist() == [2, 0, -1, 3, 1]
    assert grown.index.state.tolist() == [BLENDED, BLENDED, BLENDED, ISOLATED]
    assert [part.count for part in grown.modules] == [1, 3]
    assert all(part.entries is None for part in grown.modules)


def test_entries_stay_while_seeds_come_and_go() -> None:
    seed_stacks = make_seed_stacks(6, has_spares=True)
    state = make_state(6)
    for row in range(5):
        state = put(state, row, "mlp", algorithm=GATE if row < 2 else MULTIPLY)
    seed_stacks.sync(state)
    (gates, stack), layout_version = seed_stacks.stacks, seed_stacks.layout_version
    assert (len(gates.rows), len(stack.rows)) == (2, 6)
    memory = stack.parameters.flat.data_ptr()
    index = first_forward(seed_stacks, state).index
    kept = seed_stacks.read(4)
    state = put(clear(clear(state, 1), 3), 5, "mlp", SeedStage.TRAINING)
    seed_stacks.sync(state)
    assert seed_stacks.layout_version == layout_version
    assert stack.parameters.flat.data_ptr() == memory
    assert stack.rows == [0, 5, 2, ABSENT, 4, ABSENT]
    assert first_forward(seed_stacks, state).index is index
    assert index.entry_of_row.tolist() == [0, -1, 2, -1, 4, 1]
    assert index.state.tolist() == [BLENDED, ISOLATED, BLENDED, EMPTY, BLENDED, EMPTY]
    assert index.entry_of_gate.tolist() == [0, -1]
    assert index.gate_of_entry.tolist() == [0, -1, -1, -1, -1, -1]
    assert same(seed_stacks.read(4), kept)


def test_empty_entries_are_given_up_after_a_while() -> None:
    seed_stacks = make_seed_stacks(6, has_spares=True)
    state = make_state(6)
    for row in range(6):
        state = put(state, row, "mlp")
    seed_stacks.sync(state)
    kept = seed_stacks.read(4)
    for row in (0, 1, 2, 3):
        state = clear(state, row)
    sizes = set()
    for _ in range(12):
        seed_stacks.sync(state)
        sizes.add(len(seed_stacks.stacks[0].rows))
    assert sizes == {6, 2}
    assert seed_stacks.stacks[0].rows == [4, 5]
    assert same(seed_stacks.read(4), kept)


def test_rows_are_read_at_rest_with_the_seeds_that_are_wanted() -> None:
    seed_stacks = make_seed_stacks(3)
    seed_stacks.sync(put(make_state(3), 1, "mlp", algorithm=GATE))
    values, _ = seed_stacks.read(1)
    assert same(seed_stacks.read_at_rest(1, [True] * len(values)), values)
    assert seed_stacks.read_at_rest(1, [False]) == {}
    # They are copies.
    kept = seed_stacks.read_at_rest(1, [True])
    for stack in seed_stacks.stacks:
        stack.parameters.flat.zero_()
    assert same(kept, values)


def test_a_set_of_stacks_begins_again_with_other_streams() -> None:
    seed_stacks, other = make_seed_stacks(3), make_seed_stacks(3)
    state = put(put(make_state(3), 0, "mlp", algorithm=GATE), 1, "lora")
    seed_stacks.sync(state)
    seed_stacks.renew([900, 901, 902])
    assert seed_stacks.stacks == []
    assert seed_stacks.germinations == [0, 0, 0]
    assert seed_stacks.read(0) == ({}, {})
    seed_stacks.sync(state)
    assert not same(seed_stacks.read(1), make_and_read(other, state, 1))


def test_rows_that_begin_again_keep_the_entries_that_were_needed_of_late() -> None:
    rows = 32
    capacity = StackCapacity(has_spares=True, rows=rows, sample_bytes=4)
    cpu = torch.device("cpu")
    seed_stacks = SeedStacks((SPEC,), range(rows), torch.float64, cpu, capacity=capacity)
    kept = []
    for seeds in (24, 4, 4):
        state = make_state(rows)
        for row in range(seeds):
            state = put(state, row, "mlp")
        seed_stacks.sync(state)
        seed_stacks.renew(range(rows))
        kept.append(len(seed_stacks.stacks[0].rows))
    # The episode before last counts too: one quiet episode gives nothing up.
    assert kept == [24, 24, 6]


def make_and_read(seed_stacks: SeedStacks, state: SlotState, row: int) -> object:
    seed_stacks.sync(state)
    return seed_stacks.read(row)


def test_rows_move_between_sets_of_stacks() -> None:
    one, other = make_seed_stacks(3), make_seed_stacks(3)
    state = put(put(make_state(3), 0, "mlp", algorithm=GATE), 1, "lora")
    one.sync(state)
    other.sync(put(make_state(3), 2, "mlp"))
    values, moments = one.read(0)
    moving = {
        slot: Moments({name: value + 1 for name, value in each.momentum.items()})
        for slot, each in moments.items()
    }
    other.write(2, RowWeights({}, Moments(), values, moving, germinations=7), state.select([0]))
    assert same(other.read(2), (values, moving))
    assert other.germinations == [0, 0, 7]
    # The state agrees already: nothing is drawn anew.
    moved = put(make_state(3), 2, "mlp", algorithm=GATE)
    other.sync(moved)
    assert same(other.read(2), (values, moving))
