"""Rows in actors that are objects of this process: the same requests, no Ray."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch

from esper.lab.population.population import Population
from esper.lab.population.ray_actor import PopulationActor
from esper.lab.population.ray_cluster import ActorLostError, ActorWork, ClusterError, RayCluster
from esper.lab.population.ray_population import RayPopulation, deal_rows
from esper.lab.tasks.family import get_family
from esper.lab.tasks.task import get_task
from esper.leyline.actions import LifecycleOp, placeholder_actions
from esper.leyline.errors import DataError, EsperWarning, UsageError

ROWS, SEEDS = 3, [11, 12, 13]


class FakeCluster(RayCluster):
    """Actors in this process; what is asked is pickled, and any actor can be lost."""

    def __init__(self, actors: int) -> None:
        self._handles = [PopulationActor("cpu") for _ in range(actors)]
        self._generations = [0] * actors
        self._numbers, self._fingerprints, self._device = 0, {}, "cpu"
        self.work = [ActorWork(actor, f"node:{actor}", "cpu") for actor in range(actors)]
        self.lost: set[int] = set()
        self.always_lost = False
        self.asked: list[tuple[int, str]] = []

    def ask(self, actor: int, method: str, *arguments: Any) -> Any:
        self.asked.append((actor, method))
        return self._generations[actor], method, pickle.dumps(arguments)

    def answer(self, actor: int, asked: Any) -> Any:
        generation, method, packed = asked
        if actor in self.lost or generation != self._generations[actor]:
            if not self.always_lost:
                self.lost.discard(actor)
            self._handles[actor] = PopulationActor("cpu")
            self._generations[actor] = generation + 1
            raise ActorLostError(f"actor {actor} is gone")
        return getattr(self._handles[actor], method)(*pickle.loads(packed))


def germinate(rows: int = ROWS) -> dict[str, torch.Tensor]:
    actions = placeholder_actions(rows)
    op = torch.tensor([int(LifecycleOp.GERMINATE), int(LifecycleOp.WAIT)] * rows)[:rows]
    return {**actions, "op": op, "blueprint": torch.full((rows,), 2)}


def test_rows_in_actors_are_the_same_and_outlive_them() -> None:
    task, cluster = get_task("digits", horizon=4), FakeCluster(2)
    local = Population(task, ROWS, 5, "cpu", "sequential", row_seeds=SEEDS)
    remote = RayPopulation(cluster, task, ROWS, 5, "cpu", row_seeds=SEEDS)
    with pytest.raises(UsageError, match=r"call reset\(\) first"):
        remote.signals()
    assert_same(local.reset(), remote.reset())
    cluster.lost = {1}
    assert_same(local.step(germinate()), remote.step(germinate()))
    assert cluster.asked[-3:] == [(1, "open"), (1, "reset"), (1, "step")], "played again"
    assert torch.equal(local.masks().op, remote.masks().op)
    assert torch.equal(local.panics(), remote.panics())
    kept = remote.snapshot()
    after = local.step(placeholder_actions(ROWS))
    assert_same(after, remote.step(placeholder_actions(ROWS)))
    assert torch.equal(local.test_scores(), remote.test_scores())
    # A snapshot does not know where its rows lived, and an actor may be lost after it was restored.
    assert_same(local.restore(kept), remote.restore(kept))
    cluster.lost = {0}
    assert_same(after, remote.step(placeholder_actions(ROWS)))
    assert [work.epochs for work in cluster.work] == [10, 5]
    remote.close()


def test_kept_networks_outlive_an_actor() -> None:
    task, cluster = get_task("digits", horizon=3), FakeCluster(2)
    remote = RayPopulation(cluster, task, ROWS, 5, "cpu", row_seeds=SEEDS)
    remote.reset()
    kept = remote.test_scores()
    remote.keep_networks(torch.tensor([True, False, True]))
    remote.step(placeholder_actions(ROWS))
    cluster.lost = {0}
    last = remote.test_scores()
    remote.bring_back()
    cluster.lost = {1}
    assert remote.test_scores().tolist() == [kept[0], last[1], kept[2]]
    remote.close()


def test_actors_whose_tasks_have_fewer_slots_fit_in_with_the_others() -> None:
    # One row each, so that the actors have different tasks: of two slots and of three.
    tasks = [
        member.task(horizon=3)
        for member in (get_family("digits_family").members("select")[at] for at in (0, 4))
    ]
    assert [len(task.slot_paths) for task in tasks] == [2, 3]
    local = Population(tasks, 2, 5, "cpu", "sequential")
    remote = RayPopulation(FakeCluster(2), tasks, 2, 5, "cpu")
    assert_same(local.reset(), remote.reset())
    assert_same(local.step(germinate(2)), remote.step(germinate(2)))
    assert_same(local.view(), remote.view())
    remote.close()


def test_rows_that_end_every_actor_are_given_up() -> None:
    cluster = FakeCluster(1)
    remote = RayPopulation(cluster, get_task("digits", horizon=2), 1, 5, "cpu")
    cluster.lost, cluster.always_lost = {0}, True
    with pytest.raises(ClusterError, match="4th time"):
        remote.reset()


def test_an_actor_with_other_data_or_blueprints_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster(1)
    monkeypatch.setattr(cluster, "fingerprint", lambda condition: "other")
    remote = RayPopulation(cluster, get_task("digits", horizon=2), 1, 5, "cpu")
    for _ in range(2):
        with pytest.raises(DataError, match="give every node the same files"):
            remote.reset()
    monkeypatch.setattr(RayPopulation, "known_blueprints", lambda self: ("noop",))
    with pytest.raises(UsageError, match="install what registers them on every node"):
        RayPopulation(FakeCluster(1), get_task("digits", horizon=2), 1, 5, "cpu").reset()


def test_what_rows_warn_of_is_told_once_for_all_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Population.reset

    def warn(self: Population, row_seeds: Any = None) -> Any:
        warnings.warn("rows run one after another", EsperWarning, stacklevel=1)
        return live(self, row_seeds)

    monkeypatch.setattr(Population, "reset", warn)
    remote = RayPopulation(FakeCluster(2), get_task("digits", horizon=2), 2, 5, "cpu")
    with pytest.warns(EsperWarning, match="one after another") as told:
        remote.reset()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remote.reset()


def test_rows_that_an_error_left_halfway_have_to_begin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remote = RayPopulation(FakeCluster(2), get_task("digits", horizon=2), 2, 5, "cpu")
    first = remote.reset()
    with monkeypatch.context() as patch:
        patch.setattr(Population, "step", lambda self, actions: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            remote.step(germinate(2))
    with pytest.raises(UsageError, match=r"call reset\(\) first"):
        remote.step(germinate(2))
    assert_same(first, remote.reset())


def test_an_actor_keeps_no_data_of_tasks_that_are_over() -> None:
    cluster = FakeCluster(1)
    members = get_family("digits_family").members("select")
    remote = RayPopulation(cluster, members[0].task(horizon=1), 1, 5, "cpu")
    remote.reset()
    kept = []
    for member in members[2:4]:
        remote.assign(member.task(horizon=1))
        remote.reset()
        kept.append(len(cluster._handles[0]._shelves[None]._data))
    assert kept == [1, 1]


@pytest.mark.parametrize(
    ("counts", "actors", "expected"),
    [
        ([5], 2, [[0, 1, 2], [3, 4]]),
        ([3, 3], 2, [[0, 1, 3], [2, 4, 5]]),
        ([1, 1, 1], 4, [[0], [1], [2]]),
        ([4], 1, [[0, 1, 2, 3]]),
    ],
)
def test_every_actor_has_its_share_of_every_task(
    counts: list[int], actors: int, expected: list[list[int]]
) -> None:
    assert deal_rows(counts, actors) == expected


def assert_same(one: Any, other: Any) -> None:
    for name in one.__dataclass_fields__:
        left, right = getattr(one, name), getattr(other, name)
        assert torch.equal(left.nan_to_num(-1), right.nan_to_num(-1)), name
