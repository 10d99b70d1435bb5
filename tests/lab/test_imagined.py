import itertools

import torch

from esper.leyline.actions import NUM_OPS
from esper.leyline.stages import LIVE_STAGES, SeedStage
from esper.testing import ImaginedRows, random_episode
from esper.utils.randomness import generator


def test_random_episodes_see_every_stage_and_op() -> None:
    _, transitions = random_episode(32, 3, 40, generator(0, "episodes"))
    stages = {int(stage) for each in transitions for stage in each.after.stage.flatten()}
    ops = {int(op) for each in transitions for op in each.op}
    assert {*map(int, LIVE_STAGES), int(SeedStage.FOSSILIZED), -1} <= stages
    assert ops == set(range(NUM_OPS))
    assert any(not bool(each.after.last_success.all()) for each in transitions), "gates fail"


def test_transitions_follow_each_other_and_rows_end_at_their_own_time() -> None:
    first, transitions = random_episode(16, 2, 20, generator(1, "episodes"))
    assert transitions[0].before is first
    ends = torch.zeros(16, dtype=torch.int64)
    for one, other in itertools.pairwise(transitions):
        assert one.after is other.before
        assert torch.equal(other.active, one.active & ~one.ended)
    for transition in transitions:
        ends += transition.ended
    assert torch.equal(ends, torch.ones_like(ends)), "every row ends once"
    assert len({int(epoch) for epoch in first.max_epochs}) > 1


def test_a_rollback_removes_what_is_not_fossilized() -> None:
    world = ImaginedRows(2, 1, 10)
    world.reset(50.0)
    actions = {head: torch.zeros(2, dtype=torch.int64) for head in _heads()}
    actions |= {"op": torch.ones(2, dtype=torch.int64), "blueprint": torch.ones(2).long()}
    after = world.step(actions, score=51.0, rolled_back=torch.tensor([True, False]))
    assert after.stage.flatten().tolist() == [int(SeedStage.PRUNED), int(SeedStage.GERMINATED)]
    assert after.slot_params.flatten().tolist() == [0, 500]


def _heads() -> tuple[str, ...]:
    return ("slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
