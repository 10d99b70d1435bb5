"""Which configurations an ablation evaluates."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina.ablation import FACTORIAL_LIMIT, participating, plan_ablations
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import one_slot


@pytest.mark.parametrize("stage", list(SeedStage))
def test_only_blended_seeds_take_part_and_fossils_when_asked_for(stage: SeedStage) -> None:
    blended = stage in (SeedStage.BLENDING, SeedStage.HOLDING)
    at_full = one_slot(stage, alpha=1.0)
    has_module = bool(at_full.has_module)
    fossil = stage is SeedStage.FOSSILIZED
    assert bool(participating(at_full, fossils=True)) == has_module
    assert bool(participating(at_full)) == (has_module and not fossil)
    if blended:
        assert not bool(participating(one_slot(stage, alpha=0.0), fossils=True))


@pytest.mark.parametrize(("seeds", "configurations"), [(0, 1), (1, 2), (2, 4), (3, 8), (4, 16)])
def test_up_to_four_seeds_have_every_subset(seeds: int, configurations: int) -> None:
    plan = plan_ablations([True] * seeds + [False])
    assert plan.shape == (configurations, seeds + 1)


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_configurations_are_distinct_start_with_all_on_and_leave_others_alone(
    members: list[bool],
) -> None:
    plan = plan_ablations(members)
    rows = [tuple(row) for row in plan.tolist()]
    assert len(set(rows)) == len(rows)
    assert bool(plan[0].all())
    for index, member in enumerate(members):
        assert member or bool(plan[:, index].all())
    assert tuple(not member for member in members) in rows


def test_beyond_four_seeds_pairs_solos_and_leave_one_out_suffice() -> None:
    count = FACTORIAL_LIMIT + 2
    sizes = plan_ablations([True] * count).sum(1).tolist()
    expected = {count: 1, count - 1: count, 2: math.comb(count, 2), 1: count, 0: 1}
    assert {size: sizes.count(size) for size in set(sizes)} == expected


def test_a_plan_is_a_copy() -> None:
    plan = plan_ablations([True, False])
    plan.zero_()
    assert torch.equal(plan_ablations([True, False]), torch.tensor([[1, 1], [0, 1]]).bool())
