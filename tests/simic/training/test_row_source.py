from __future__ import annotations

import multiprocessing

import pytest

from esper.leyline.errors import UsageError
from esper.simic.training.config import StageConfig
from esper.simic.training.row_source import EVALUATION_SEEDS, GivenRows, TaskRows
from esper.testing.problems.graded import GradedProblem
from tests.simic.training.tiny import NAME, tiny_config


def test_rows_are_shared_out_among_tasks() -> None:
    row_source = TaskRows(tiny_config(tasks=(NAME, "digits"), rows=5))
    plan = row_source.plan(0, 0)
    assert plan.tasks == (NAME,) * 3 + ("digits",) * 2
    assert plan.slot_names[NAME] == ("r0c0", "r0c1")
    assert row_source.num_slots == 3


def test_members_of_a_family_are_drawn_for_every_round() -> None:
    row_source = TaskRows(tiny_config(tasks=("digits_family",), rows=8, variants_per_round=4))
    first, again, other = row_source.plan(0, 0), row_source.plan(0, 0), row_source.plan(1, 0)
    assert first == again
    assert first.tasks != other.tasks
    assert len(row_source.groups(0, 0)) == 4
    assert row_source.num_slots == 3


def test_there_are_never_more_members_than_rows() -> None:
    row_source = TaskRows(tiny_config(tasks=("digits_family",), rows=3, variants_per_round=9))
    assert row_source.plan(0, 0).rows == 3


def test_a_population_is_kept_while_its_tasks_stay() -> None:
    row_source = TaskRows(tiny_config())
    one = row_source.environment(0, 0)
    assert row_source.environment(1, 0) is one
    assert (one.rows, one.num_slots) == (4, 2)
    row_source.close()
    assert row_source.environment(0, 0) is not one


def test_stages_have_their_own_tasks() -> None:
    stages = (StageConfig(tasks=(NAME,), rounds=1), StageConfig(tasks=("digits",)))
    row_source = TaskRows(tiny_config(curriculum=stages))
    assert set(row_source.plan(0, 0).tasks) == {NAME}
    assert set(row_source.plan(1, 1).tasks) == {"digits"}
    assert row_source.num_slots == 3


def test_an_unknown_task_is_named_at_once() -> None:
    with pytest.raises(UsageError, match="unknown task 'digit'"):
        TaskRows(tiny_config(tasks=("digit",)))


def test_evaluations_have_seeds_that_training_never_draws() -> None:
    row_source = TaskRows(tiny_config())
    plan, population = row_source.evaluation(range(2, 5))
    assert plan.env_seeds == tuple(EVALUATION_SEEDS + number for number in (2, 3, 4))
    assert population.rows == 3
    assert max(row_source.plan(0, 0).env_seeds) < EVALUATION_SEEDS


def test_every_seed_of_an_evaluation_is_a_member_of_its_own() -> None:
    row_source = TaskRows(tiny_config(tasks=("digits_family",)))
    plan, _ = row_source.evaluation(range(6))
    assert len(set(plan.tasks)) > 2


def test_a_given_environment_stays() -> None:
    problem = GradedProblem(6)
    row_source = GivenRows(problem, tiny_config())
    assert row_source.environment(0, 0) is row_source.environment(5, 0) is problem
    plan = row_source.plan(0, 0)
    assert plan.rows == 6
    assert len(set(plan.env_seeds)) == 3
    assert plan != row_source.plan(1, 0)


def test_processes_stay_from_one_population_to_the_next() -> None:
    row_source = TaskRows(tiny_config(strategy="workers"))
    one = row_source.environment(0, 0)
    one.reset(row_source.plan(0, 0).env_seeds)
    before = set(multiprocessing.active_children())
    assert before
    one.close()
    other = row_source.make(row_source.groups(0, 0))
    other.reset()
    assert set(multiprocessing.active_children()) == before
    other.close()
    row_source.close()
    assert not set(multiprocessing.active_children()) & before
