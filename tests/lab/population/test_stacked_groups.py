"""Which seeds are summed up together: those that are alike."""

from __future__ import annotations

from esper.lab.population.stacked import group_seeds
from esper.leyline.stages import AlphaMode, SeedStage
from tests.lab.population.seed_states import GATE, make_seed_stacks, make_state, put


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
