"""Seeds of many rows: they come, go and learn as the lifecycle says."""

from __future__ import annotations

import torch

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.seeding import draw_gate, draw_seed
from esper.leyline.alpha import AlphaMode
from esper.leyline.stages import SeedStage
from esper.population.engine import RowWeights
from esper.population.nursery import GATE as GATES
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
    members,
    put,
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


def test_who_learns() -> None:
    nursery = make_nursery(6)
    state = make_state(6)
    lives = [
        (SeedStage.GERMINATED, {}),
        (SeedStage.TRAINING, {}),
        (SeedStage.BLENDING, {}),
        (SeedStage.BLENDING, {"alpha": 0.0}),
        (SeedStage.BLENDING, {"alpha_mode": AlphaMode.DOWN}),
        (SeedStage.FOSSILIZED, {"alpha": 1.0}),
    ]
    for row, (stage, fields) in enumerate(lives):
        state = put(state, row, "mlp", stage, **fields)
    nursery.sync(state)
    ((stack, entry),) = nursery.active(state)
    assert len(stack) == 6
    assert entry.active.flatten().tolist() == [False, True, True, False, False, True]


def test_a_stack_in_which_nobody_learns_is_left_out() -> None:
    nursery = make_nursery(2)
    state = put(make_state(2), 0, "mlp", SeedStage.GERMINATED)
    state = put(state, 1, "lora", alpha_mode=AlphaMode.DOWN)
    nursery.sync(state)
    assert nursery.active(state) == []


def test_norms_of_a_gate_belong_to_those_of_its_seed() -> None:
    nursery = make_nursery(4)
    state = put(make_state(4), 0, "mlp", algorithm=GATE)
    state = put(put(state, 1, "lora", algorithm=GATE), 2, "mlp")
    state = put(state, 3, "mlp", algorithm=GATE)
    nursery.sync(state)
    stacks = nursery.active(state)
    kinds = [entry.bed.kind for _, entry in stacks]
    shared = {
        (kinds[gates], kinds[seeds]): (here.tolist(), there.tolist())
        for gates, seeds, here, there in nursery.shared(stacks)
    }
    rows = {entry.bed.kind: entry.bed.rows for _, entry in stacks}
    assert rows[GATES] == [0, 1, 3]
    assert rows[MLP.id] == [0, 2, 3]
    assert shared == {(GATES, MLP.id): ([0, 2], [0, 2]), (GATES, LORA.id): ([1], [0])}


def test_members_are_ordered_by_blueprint_and_by_their_place() -> None:
    nursery = make_nursery(5)
    state = make_state(5)
    for row, name in ((4, "mlp"), (1, "lora"), (0, "mlp"), (3, "mlp")):
        state = put(state, row, name)
        nursery.sync(state)
    grown = nursery.grafts(0, members(state), 5)
    assert grown is not None
    assert grown.rows is not None
    assert grown.rows.tolist() == [1, 4, 0, 3]
    assert [(part.members.start, part.members.stop) for part in grown.parts] == [(0, 1), (1, 4)]
    assert all(part.places is None for part in grown.parts)
    # A part of a stack, and a row twice, as ablations ask for it.
    again = nursery.grafts(0, members(state, [3, 2, 3]), 3)
    assert again is not None
    assert again.rows is not None
    assert again.rows.tolist() == [0, 2]
    assert again.parts[0].places is not None
    assert again.parts[0].places.tolist() == [2, 2]
    assert nursery.grafts(0, members(state, [2]), 1) is None


def test_a_whole_population_in_order_needs_no_gathering() -> None:
    nursery = make_nursery(2)
    state = put(put(make_state(2), 0, "mlp"), 1, "mlp")
    nursery.sync(state)
    grown = nursery.grafts(0, members(state), 2)
    assert grown is not None
    assert grown.rows is None
    assert grown.isolated is None
    assert grown.multiplies is None
    assert grown.gates is None


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
