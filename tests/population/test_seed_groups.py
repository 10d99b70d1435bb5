"""Who learns, whose norms belong together, and whose gradients are summed up together."""

from __future__ import annotations

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.leyline.alpha import AlphaMode
from esper.leyline.stages import SeedStage
from esper.population.seed_groups import gate_pairs, group_seeds, learning_entries
from esper.population.seed_stacks import GATE as GATES
from tests.population.seed_states import GATE, make_seed_stacks, make_state, put

MLP, LORA = BLUEPRINTS.get("mlp"), BLUEPRINTS.get("lora")


def test_who_learns() -> None:
    seed_stacks = make_seed_stacks(6)
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
    seed_stacks.sync(state)
    (stack,) = seed_stacks.stacks
    assert learning_entries(stack, state).tolist() == [False, True, True, False, False, True]


def test_norms_of_a_gate_belong_to_those_of_its_seed() -> None:
    seed_stacks = make_seed_stacks(4)
    state = put(make_state(4), 0, "mlp", algorithm=GATE)
    state = put(put(state, 1, "lora", algorithm=GATE), 2, "mlp")
    state = put(state, 3, "mlp", algorithm=GATE)
    seed_stacks.sync(state)
    rows = {stack.kind: stack.rows for stack in seed_stacks.stacks}
    assert rows[GATES] == [0, 1, 3]
    assert rows[MLP.id] == [0, 2, 3]
    shared = {
        (gates.kind, seeds.kind): (here.tolist(), there.tolist())
        for gates, seeds, here, there in gate_pairs(seed_stacks)
    }
    assert shared == {(GATES, MLP.id): ([0, 2], [0, 2]), (GATES, LORA.id): ([1], [0])}


def test_seeds_are_grouped_with_those_that_are_alike() -> None:
    seed_stacks = make_seed_stacks(5)
    state = put(make_state(5), 0, "mlp", algorithm=GATE)
    state = put(put(state, 1, "mlp"), 2, "mlp", SeedStage.TRAINING)
    state = put(put(state, 3, "mlp", alpha_mode=AlphaMode.DOWN), 4, "lora", SeedStage.FOSSILIZED)
    seed_stacks.sync(state)
    found = list(group_seeds(seed_stacks, state, [SeedStage.TRAINING, SeedStage.BLENDING]))
    assert [(g.rows.tolist(), g.gate_entries is not None, g.is_learning) for g in found] == [
        ([3], False, False),
        ([1, 2], False, True),
        ([0], True, True),
    ]
    sizes = seed_stacks.sizes(state)
    assert [g.size for g in found] == [int(sizes[row, 0]) for row in (3, 1, 0)]
