"""Who takes part in a pass over validation data, and where."""

from __future__ import annotations

import numpy as np
import torch

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.state import SlotState
from esper.leyline.stages import SeedStage
from esper.population.capacity import Room
from esper.population.engine import SlotSpec
from esper.population.seed_stacks import Nursery
from esper.population.slot_forward import SlotGrafts
from esper.population.slot_index import BLENDED, EMPTY
from esper.population.streams import Lanes
from esper.population.validation_rows import Gathering
from tests.population.seedlings import (
    CHANNELS,
    GATE,
    MULTIPLY,
    OTHER,
    SPEC,
    clear,
    make_nursery,
    make_state,
    put,
)

MLP, LORA = BLUEPRINTS.get("mlp"), BLUEPRINTS.get("lora")
ON, OFF = np.ones((4, 1), dtype=bool), np.zeros((4, 1), dtype=bool)


def make_gathering(
    nursery: Nursery, slots: tuple[SlotSpec, ...] = (SPEC,), *, spares: bool = False
) -> Gathering:
    room = Room(spares=spares, rows=64, sample_bytes=1)
    return Gathering(nursery, slots, room, torch.device("cpu"), Lanes())


def grown_at(gathering: Gathering, slot: int = 0) -> SlotGrafts:
    grown = gathering.grafts[slot]
    assert grown is not None
    return grown


def five_rows() -> tuple[Nursery, SlotState]:
    nursery, state = make_nursery(5), make_state(5)
    for row, name in ((4, "mlp"), (1, "lora"), (0, "mlp"), (3, "mlp")):
        state = put(state, row, name, algorithm=GATE if row == 4 else MULTIPLY)
    nursery.sync(state)
    return nursery, state


def test_rows_come_as_often_as_they_are_asked_for() -> None:
    nursery, state = five_rows()
    gathering = make_gathering(nursery)
    gathering.gather(np.array([3, 2, 4, 3]), ON, state)
    grown = grown_at(gathering)
    assert gathering.rows.tolist() == [3, 2, 4, 3]
    assert grown.seats.rows.tolist() == [0, 3, 2]
    assert grown.seats.holder.tolist() == [0, -1, 2, 1]
    assert grown.seats.gated.tolist() == [2]
    assert grown.seats.gate.tolist() == [-1, -1, 0]
    (part,) = grown.parts
    assert part.places is not None
    assert [nursery.bed(0, MLP.id).rows[place] for place in part.places.tolist()] == [3, 3, 4]


def test_only_seeds_that_are_on_and_blended_take_part() -> None:
    nursery, state = five_rows()
    gathering = make_gathering(nursery)
    on = np.array([[False], [True], [False], [True]])
    gathering.gather(np.array([3, 2, 4, 3]), on, state)
    assert grown_at(gathering).seats.rows.tolist() == [3]
    gathering.gather(np.array([3, 2, 4, 3]), OFF, state)
    assert gathering.grafts == (None,)
    gathering.gather(np.array([2]), ON[:1], state)
    assert gathering.grafts == (None,)
    young = put(state, 3, "mlp", SeedStage.TRAINING)
    nursery.sync(young)
    gathering.gather(np.array([3, 2, 4, 3]), ON, young)
    assert grown_at(gathering).seats.rows.tolist() == [2]


def test_all_places_in_order_need_no_choice() -> None:
    nursery, state = make_nursery(3), make_state(3)
    for row in range(3):
        state = put(state, row, "mlp")
    nursery.sync(state)
    gathering = make_gathering(nursery)
    gathering.gather(np.arange(3), ON[:3], state)
    assert [part.places for part in grown_at(gathering).parts] == [None]


def test_with_some_to_spare_memory_stays_until_somebody_does_not_fit() -> None:
    nursery, state = five_rows()
    gathering = make_gathering(nursery, spares=True)
    rows = np.array([3, 2, 4, 3])
    gathering.gather(rows, ON, state)
    grown, moves = grown_at(gathering), gathering.moves
    memory = gathering.rows.data_ptr()
    # One seed of LORA, which takes no part now, may soon; so there is a place for it.
    assert [part.count for part in grown.parts] == sorted_counts(gathering)
    assert int((grown.seats.state == BLENDED).sum()) == 3
    gathering.gather(np.array([1, 0]), ON[:2], state)
    assert gathering.moves == moves
    assert grown_at(gathering) is grown
    assert gathering.rows.data_ptr() == memory
    assert gathering.rows.tolist()[:2] == [1, 0]
    assert int((grown.seats.state == BLENDED).sum()) == 2
    holders = grown.seats.holder.tolist()
    assert holders[2:] == [-1] * (len(holders) - 2)
    for position, row in ((0, 1), (1, 0)):
        seat = holders[position]
        assert int(grown.seats.rows[seat]) == position
        assert bed_row(nursery, grown, seat) == row
    many = np.array([4] * 40)
    gathering.gather(many, np.ones((40, 1), dtype=bool), state)
    assert gathering.moves == moves + 1
    assert len(gathering.rows) >= 40
    # What was needed once is remembered when memory is laid out anew.
    nursery.sync(clear(state, 1))
    gathering.gather(rows, ON, clear(state, 1))
    assert gathering.moves == moves + 2
    assert len(gathering.rows) >= 39


def test_a_captured_pass_is_void_when_the_seeds_have_moved() -> None:
    nursery, state = five_rows()
    gathering = make_gathering(nursery, spares=True)
    gathering.gather(np.arange(4), ON, state)
    moves = gathering.moves
    state = put(state, 2, "lora")
    nursery.sync(state)
    gathering.gather(np.arange(4), ON, state)
    assert gathering.moves == moves + 1


def test_slots_are_apart() -> None:
    nursery, state = make_nursery(3, (SPEC, OTHER)), make_state(3, 2)
    state = put(put(state, 0, "mlp"), 2, "lora", slot=1)
    nursery.sync(state)
    gathering = make_gathering(nursery, (SPEC, OTHER), spares=True)
    gathering.gather(np.array([0, 1, 2]), np.ones((3, 2), dtype=bool), state)
    first, second = grown_at(gathering, 0), grown_at(gathering, 1)
    assert first.seats.holder.tolist()[:3] == [0, -1, -1]
    assert second.seats.holder.tolist()[:3] == [-1, -1, 0]
    assert int((second.seats.state == EMPTY).sum()) == len(second.seats.state) - 1
    nursery.bed(1, LORA.id).stack.flat.normal_()
    x = torch.randn(len(gathering.rows), 2, CHANNELS, dtype=torch.float64)
    out, dim = second.join(x, 0)
    assert dim == 0
    changed = (out != x).flatten(1).any(1).tolist()
    assert changed == [False, False, True] + [False] * (len(changed) - 3)


def sorted_counts(gathering: Gathering) -> list[int]:
    return [count for (_, kind), count in sorted(gathering._places.items()) if kind >= 0]


def bed_row(nursery: Nursery, grown: SlotGrafts, seat: int) -> int:
    """Return the row of the seed in a seat."""
    for kind, part in zip(sorted((MLP.id, LORA.id)), grown.parts, strict=True):
        if seat < part.count:
            assert part.places is not None
            return nursery.bed(0, kind).rows[int(part.places[seat])]
        seat -= part.count
    raise AssertionError(seat)
