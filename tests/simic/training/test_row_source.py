from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from benchmarks.problems.graded import GradedProblem
from esper.lab.tasks import get_family
from esper.leyline.errors import UsageError
from esper.simic.training.config import StageConfig
from esper.simic.training.row_source import EVALUATION_SEEDS, GivenRows, TaskRows
from tests.simic.training.tiny import NAME, tiny_config


def test_rows_are_shared_out_among_tasks() -> None:
    row_source = TaskRows(tiny_config(tasks=(NAME, "digits"), rows=5))
    plan = row_source.plan(0, 0)
    assert plan.tasks == (NAME,) * 3 + ("digits",) * 2
    assert plan.slot_names[NAME] == ("r0c0", "r0c1")
    assert row_source.num_slots == 3


def family_rows(**changes: Any) -> TaskRows:
    return TaskRows(tiny_config(tasks=("digits_family",), **changes))


def test_members_of_a_family_are_drawn_for_every_round() -> None:
    row_source = family_rows(rows=8, architectures_per_round=4)
    first, again, other = row_source.plan(0, 0), row_source.plan(0, 0), row_source.plan(1, 0)
    assert first == again
    assert first.tasks != other.tasks
    assert len(row_source.groups(0, 0)) == 4
    assert row_source.num_slots == 3


def test_a_round_has_few_architectures_that_stand_together_and_many_conditions() -> None:
    row_source = family_rows(rows=24, rows_per_seed=2, architectures_per_round=3)
    for number in range(5):
        groups = row_source.groups(number, 0)
        assert [group.rows for group in groups] == [2] * 12
        hosts = [group.task.config.host_options for group in groups]
        assert hosts[0:4] + hosts[4:8] + hosts[8:12] == [h for h in hosts[::4] for _ in range(4)]
        assert len(set(hosts)) == 3
        assert len({group.label for group in groups}) == 12


def test_rows_that_share_a_seed_share_the_member() -> None:
    row_source = family_rows(rows=21, rows_per_seed=4, architectures_per_round=2)
    plan = row_source.plan(0, 0)
    assert plan.rows == 21
    members: dict[int, set[str]] = {}
    for label, seed in zip(plan.tasks, plan.env_seeds, strict=True):
        members.setdefault(seed, set()).add(label)
    assert all(len(labels) == 1 for labels in members.values())
    assert len(members) == 6


def test_rounds_have_train_members_and_evaluations_select_members() -> None:
    row_source, family = family_rows(rows=32, rows_per_seed=1), get_family("digits_family")
    train = {member.label for member in family.members("train")}
    select = {member.label for member in family.members("select")}
    for number in range(40):
        assert set(row_source.plan(number, 0).tasks) <= train
    for first in (0, 1 << 20):
        plan, population = row_source.evaluation(range(first, first + 12))
        population.close()
        assert len(set(plan.tasks)) == 12
        assert set(plan.tasks) <= select
        assert plan.env_seeds == tuple(EVALUATION_SEEDS + first + n for n in range(12))


def test_where_a_split_ends_its_members_come_again() -> None:
    plan, population = family_rows(architectures_per_round=1).evaluation(range(10))
    population.close()
    assert len(set(plan.tasks)) == 4
    assert len(set(plan.env_seeds)) == plan.rows == 10
    row_source = family_rows(rows=80, rows_per_seed=2, architectures_per_round=1)
    counts = [group.rows for group in row_source.groups(0, 0)]
    assert sum(counts) == 80
    assert set(counts) == {2, 4}


def test_members_end_at_their_own_horizon_or_with_the_episode() -> None:
    short = family_rows(rows=32, episode_length=49).groups(0, 0)
    assert {group.task.config.horizon for group in short} == {40, 50}
    shorter = family_rows(rows=32, episode_length=9).groups(0, 0)
    assert {group.task.config.horizon for group in shorter} == {10}
    assert TaskRows(tiny_config()).groups(0, 0)[0].task.config.horizon == 10


def test_there_are_never_more_members_than_rows() -> None:
    row_source = family_rows(rows=3, architectures_per_round=9)
    assert row_source.plan(0, 0).rows == 3


def test_a_task_and_a_family_share_the_rows() -> None:
    config = tiny_config(tasks=(NAME, "digits_family"), rows=8, architectures_per_round=3)
    labels = TaskRows(config).plan(0, 0).tasks
    assert labels.count(NAME) == 2
    assert len(set(labels)) == 4


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
