from __future__ import annotations

import pytest

from esper.simic.training.config import StageConfig
from esper.simic.training.curriculum import Curriculum

STAGES = (
    StageConfig(tasks=("a",), rounds=2),
    StageConfig(tasks=("b",), success=0.5),
    StageConfig(tasks=("c",), rounds=3, success=0.9),
    StageConfig(tasks=("d",), rounds=1),
)


def stages_after(*successes: float) -> list[int]:
    """Return the stage that follows each of these rounds."""
    curriculum = Curriculum(STAGES)
    found = []
    for success in successes:
        curriculum.add_round(success)
        found.append(curriculum.stage)
    return found


def test_a_stage_ends_by_rounds_or_by_success_and_the_last_never() -> None:
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
    assert curriculum.known_rounds(9) == 1, "success may end it after any round"
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
