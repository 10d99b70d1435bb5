"""Seeds of many rows: they come, go and learn as the lifecycle says."""

from __future__ import annotations

import torch

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.engine import RowWeights
from esper.kasmina.seedbed import draw_gate, draw_seed
from esper.kasmina.state import SlotState
from esper.leyline.stages import SeedStage
from esper.population.seed_stacks import NOBODY, Nursery
from esper.population.slot_index import BLENDED, EMPTY, ISOLATED
from tests.plots import same
from tests.population.seedlings import (
    CHANNELS,
    GATE,
    KEYS,
    MULTIPLY,
    OTHER,
    SPEC,
    clear,
    make_nursery,
    make_state,
    put,
    seat,
)

MLP, LORA = BLUEPRINTS.get("mlp"), BLUEPRINTS.get("lora")


def test_seeds_are_drawn_from_the_streams_of_their_rows() -> None:
    nursery = make_nursery(3, (SPEC, OTHER))
    state = put(make_state(3, 2), 1, "mlp", slot=1)
    nursery.sync(state)
    state = put(put(state, 1, "lora", algorithm=GATE), 2, "mlp", slot=1)
    nursery.sync(state)
    assert nursery.germinations == [0, 2, 1]
    values, momenta = nursery.read(1)
    expected = {
        0: draw_seed(LORA, CHANNELS, "vector", (KEYS[1], 0, 1)),
        1: draw_seed(MLP, CHANNELS, "vector", (KEYS[1], 1, 0)),
    }
    for slot, seed in expected.items():
        for name, parameter in seed.named_parameters():
            assert torch.equal(values[slot][f"seed.{name}"], parameter.detach().double())
            assert not bool(momenta[slot][f"seed.{name}"].any())
    gate = draw_gate(CHANNELS, "vector", (KEYS[1], 0, 2))
    for name, parameter in gate.named_parameters():
        assert torch.equal(values[0][f"gate.{name}"], parameter.detach().double())
    assert nursery.read(0) == ({}, {})


def test_nothing_is_drawn_from_the_callers_numbers() -> None:
    before = torch.get_rng_state()
    make_nursery(2).sync(put(make_state(2), 0, "mlp", algorithm=GATE))
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_that_are_gone_leave_with_their_gates_and_the_others_stay() -> None:
    nursery = make_nursery(3)
    state = make_state(3)
    for row in range(3):
        state = put(state, row, "mlp", algorithm=GATE if row else MULTIPLY)
    nursery.sync(state)
    kept = nursery.read(2)
    nursery.sync(clear(state, 1))
    assert nursery.read(1) == ({}, {})
    assert same(nursery.read(2), kept)
    nursery.sync(make_state(3))
    assert nursery._beds == {}
    assert nursery.germinations == [1, 1, 1]


def test_a_gate_follows_the_algorithm() -> None:
    nursery = make_nursery(2)
    state = put(make_state(2), 0, "mlp")
    nursery.sync(state)
    plain = int(nursery.sizes(state)[0, 0])
    state = put(state, 0, "mlp", algorithm=GATE)
    nursery.sync(state)
    gate = sum(p.numel() for p in draw_gate(CHANNELS, "vector", (0, 0, 0)).parameters())
    assert nursery.sizes(state).tolist() == [[plain + gate], [0]]
    nursery.sync(put(state, 0, "mlp"))
    assert nursery.sizes(state).tolist() == [[plain], [0]]


def test_places_are_ordered_by_blueprint_and_seats_say_whose_they_are() -> None:
    nursery = make_nursery(5)
    state = make_state(5)
    for row, name in ((4, "mlp"), (1, "lora"), (0, "mlp"), (3, "mlp")):
        state = put(state, row, name, SeedStage.TRAINING if row == 3 else SeedStage.BLENDING)
        nursery.sync(state)
    grown = seat(nursery, state)
    assert grown.seats.rows.tolist() == [1, 4, 0, 3]
    assert grown.seats.holder.tolist() == [2, 0, -1, 3, 1]
    assert grown.seats.state.tolist() == [BLENDED, BLENDED, BLENDED, ISOLATED]
    assert [part.count for part in grown.parts] == [1, 3]
    assert all(part.places is None for part in grown.parts)


def test_places_stay_while_seeds_come_and_go() -> None:
    nursery = make_nursery(6, spares=True)
    state = make_state(6)
    for row in range(5):
        state = put(state, row, "mlp", algorithm=GATE if row < 2 else MULTIPLY)
    nursery.sync(state)
    (gates, bed), moves = nursery.beds, nursery.moves
    assert (len(gates.rows), len(bed.rows)) == (2, 6)
    memory = bed.stack.flat.data_ptr()
    seats = seat(nursery, state).seats
    kept = nursery.read(4)
    state = put(clear(clear(state, 1), 3), 5, "mlp", SeedStage.TRAINING)
    nursery.sync(state)
    assert nursery.moves == moves
    assert bed.stack.flat.data_ptr() == memory
    assert bed.rows == [0, 5, 2, NOBODY, 4, NOBODY]
    assert seat(nursery, state).seats is seats
    assert seats.holder.tolist() == [0, -1, 2, -1, 4, 1]
    assert seats.state.tolist() == [BLENDED, ISOLATED, BLENDED, EMPTY, BLENDED, EMPTY]
    assert seats.gated.tolist() == [0, -1]
    assert seats.gate.tolist() == [0, -1, -1, -1, -1, -1]
    assert same(nursery.read(4), kept)


def test_empty_places_are_given_up_after_a_while() -> None:
    nursery = make_nursery(6, spares=True)
    state = make_state(6)
    for row in range(6):
        state = put(state, row, "mlp")
    nursery.sync(state)
    kept = nursery.read(4)
    for row in (0, 1, 2, 3):
        state = clear(state, row)
    sizes = set()
    for _ in range(12):
        nursery.sync(state)
        sizes.add(len(nursery.beds[0].rows))
    assert sizes == {6, 2}
    assert nursery.beds[0].rows == [4, 5]
    assert same(nursery.read(4), kept)


def test_rows_are_read_at_rest_with_the_seeds_that_are_wanted() -> None:
    nursery = make_nursery(3)
    nursery.sync(put(make_state(3), 1, "mlp", algorithm=GATE))
    values, _ = nursery.read(1)
    assert same(nursery.read_at_rest(1, [True] * len(values)), values)
    assert nursery.read_at_rest(1, [False]) == {}
    # They are copies.
    kept = nursery.read_at_rest(1, [True])
    for bed in nursery.beds:
        bed.stack.flat.zero_()
    assert same(kept, values)


def test_a_nursery_begins_again_with_other_streams() -> None:
    nursery, other = make_nursery(3), make_nursery(3)
    state = put(put(make_state(3), 0, "mlp", algorithm=GATE), 1, "lora")
    nursery.sync(state)
    nursery.renew([900, 901, 902])
    assert nursery.beds == []
    assert nursery.germinations == [0, 0, 0]
    assert nursery.read(0) == ({}, {})
    nursery.sync(state)
    assert not same(nursery.read(1), make_and_read(other, state, 1))


def make_and_read(nursery: Nursery, state: SlotState, row: int) -> object:
    nursery.sync(state)
    return nursery.read(row)


def test_rows_move_between_nurseries() -> None:
    one, other = make_nursery(3), make_nursery(3)
    state = put(put(make_state(3), 0, "mlp", algorithm=GATE), 1, "lora")
    one.sync(state)
    other.sync(put(make_state(3), 2, "mlp"))
    values, momenta = one.read(0)
    moving = {slot: {k: v + 1 for k, v in m.items()} for slot, m in momenta.items()}
    other.write(2, RowWeights({}, {}, values, moving, germinations=7), state.select([0]))
    assert same(other.read(2), (values, moving))
    assert other.germinations == [0, 0, 7]
    # The state agrees already: nothing is drawn anew.
    moved = put(make_state(3), 2, "mlp", algorithm=GATE)
    other.sync(moved)
    assert same(other.read(2), (values, moving))
