from __future__ import annotations

import pytest

from esper.simic.training.plan import RoundPlan, draw_env_seeds


def seeds(
    run: int = 0, round_number: int = 0, rows: int = 8, per: int = 4, pool: int = 0
) -> list[int]:
    return list(draw_env_seeds(run, round_number, [rows], rows_per_seed=per, pool=pool))


def test_rows_share_seeds_in_groups() -> None:
    drawn = seeds(rows=10)
    assert drawn[0] == drawn[3] != drawn[4] == drawn[7] != drawn[8] == drawn[9]
    assert len(set(drawn)) == 3


def test_rounds_and_runs_have_seeds_of_their_own() -> None:
    assert seeds() == seeds()
    assert not set(seeds()) & set(seeds(round_number=1))
    assert not set(seeds()) & set(seeds(run=1))


def test_more_rows_leave_the_first_ones_alone() -> None:
    assert seeds(rows=16)[:8] == seeds(rows=8)


def test_tasks_share_no_seeds() -> None:
    drawn = draw_env_seeds(0, 0, [4, 4], rows_per_seed=4, pool=0)
    assert drawn[0] != drawn[4]


def test_a_pool_is_drawn_from_and_never_left() -> None:
    drawn = {seed for number in range(50) for seed in seeds(round_number=number, per=1, pool=5)}
    assert len(drawn) == 5


@pytest.mark.parametrize("pool", [0, 7])
def test_seeds_stay_short(pool: int) -> None:
    assert all(0 <= seed < 2**31 for seed in seeds(rows=64, per=1, pool=pool))


def test_a_plan_survives_being_written_down() -> None:
    plan = RoundPlan(
        round=3, tasks=("a", "b"), env_seeds=(1, 2), slot_names={"a": ("x",), "b": ("y", "z")}
    )
    assert RoundPlan.from_mapping(plan.to_mapping()) == plan
    assert plan.rows == 2
