from __future__ import annotations

import math

import pytest
import torch

from esper.simic.training.config import StageConfig
from esper.simic.training.row_source import Curriculum, RoundPlan, draw_env_seeds, draw_uniforms
from esper.utils.randomness import derive_seed


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


STAGES = (
    StageConfig(tasks=("a",), rounds=2),
    StageConfig(tasks=("b",), paid_off=0.5),
    StageConfig(tasks=("c",), rounds=3, paid_off=0.9),
    StageConfig(tasks=("d",), rounds=1),
)


def stages_after(*shares: float) -> list[int]:
    """Return the stage that follows each of these rounds."""
    curriculum = Curriculum(STAGES)
    found = []
    for paid_off in shares:
        curriculum.add_round(paid_off)
        found.append(curriculum.stage)
    return found


def test_a_stage_ends_by_rounds_or_by_what_pays_off_and_the_last_never() -> None:
    assert stages_after(1.0, 1.0) == [0, 1]
    assert stages_after(0.0, 0.0, 0.4, 0.5) == [0, 1, 1, 2]
    assert stages_after(0.0, 0.0, 0.5, 0.9) == [0, 1, 2, 3]
    assert stages_after(0.0, 0.0, 0.5, 0.1, 0.1, 0.1) == [0, 1, 2, 2, 2, 3]
    assert stages_after(0.0, 0.0, 0.5, 0.9, 1.0, 1.0) == [0, 1, 2, 3, 3, 3]


def test_rounds_ahead_are_known_as_long_as_only_their_number_ends_a_stage() -> None:
    curriculum = Curriculum(STAGES)
    assert (curriculum.known_rounds(9), curriculum.known_rounds(1)) == (2, 1)
    curriculum.add_round(0.0)
    assert curriculum.known_rounds(9) == 1
    curriculum.add_round(0.0)
    assert curriculum.known_rounds(9) == 1, "paid_off may end it after any round"
    assert Curriculum(STAGES[-2:]).known_rounds(9) == 1


def test_the_next_round_is_known_in_a_last_stage_that_is_over() -> None:
    curriculum = Curriculum(STAGES[-1:])
    for _ in range(4):
        curriculum.add_round(0.0)
    assert curriculum.known_rounds(9) == 1


def test_all_rounds_are_known_without_a_curriculum() -> None:
    assert Curriculum((StageConfig(tasks=("a",)),)).known_rounds(9) == 9


@pytest.mark.parametrize("stop", range(5))
def test_a_curriculum_goes_on_from_its_state(stop: int) -> None:
    whole, other = Curriculum(STAGES), Curriculum(STAGES)
    for _ in range(stop):
        whole.add_round(0.6)
    other.load_state_dict({**whole.state_dict(), "round": stop})
    for _ in range(3):
        whole.add_round(0.6)
        other.add_round(0.6)
        assert other.state_dict() == whole.state_dict()


def test_a_place_beyond_the_last_stage_is_the_last() -> None:
    curriculum = Curriculum(STAGES[:2])
    curriculum.load_state_dict({"stage": 3, "rounds_in_stage": 0})
    assert curriculum.stage == 1


MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def test_draws_are_the_hash_of_their_counter() -> None:
    seed = derive_seed(5, 2, 7, "policy")
    expected = [
        (mixed((mixed((place * GOLDEN + seed) & MASK) + GOLDEN) & MASK) >> 40) / 2**24
        for place in range(3 * 8)
    ]
    assert draw_uniforms(3, 5, 2, 7, "policy").flatten().tolist() == expected


@pytest.mark.parametrize("rows", [1, 5, 256])
def test_a_row_draws_the_same_whatever_runs_beside_it(rows: int) -> None:
    alone = draw_uniforms(rows, 1, 2, 3)
    assert torch.equal(draw_uniforms(300, 1, 2, 3)[:rows], alone)


def test_draws_are_even_and_below_one() -> None:
    draws = torch.cat([draw_uniforms(256, 0, 0, step) for step in range(100)]).flatten().double()
    assert float(draws.min()) >= 0.0
    assert float(draws.max()) < 1.0
    # Kolmogorov and Smirnov: the largest distance to the even distribution.
    ordered = draws.sort().values
    ideal = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    assert float((ordered - ideal).abs().max()) < 2.0 / math.sqrt(len(ordered))


@pytest.mark.parametrize(
    ("one", "other"), [((0, 0, 0), (0, 0, 1)), ((0, 0, 0), (0, 1, 0)), ((0, 0, 0), (1, 0, 0))]
)
def test_neighbouring_keys_have_nothing_in_common(
    one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    first, second = draw_uniforms(4096, *one).flatten(), draw_uniforms(4096, *other).flatten()
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
    assert abs(float(correlation)) < 0.02


def test_neighbouring_rows_and_heads_have_nothing_in_common() -> None:
    draws = draw_uniforms(20_000, 9)
    by_head = torch.corrcoef(draws.T) - torch.eye(8)
    assert float(by_head.abs().max()) < 0.03
    by_row = torch.corrcoef(torch.stack([draws[:-1].flatten(), draws[1:].flatten()]))[0, 1]
    assert abs(float(by_row)) < 0.01
