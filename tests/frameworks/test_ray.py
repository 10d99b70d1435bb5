"""Training on a real cluster of several nodes is training on one machine, number for number."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.cluster_utils import Cluster

from esper.lab.population.ray_population import RayCluster
from esper.nissa.reader import open_run
from esper.scripts.cli.main import main
from esper.simic.training.config import TrainConfig, get_recipe
from esper.simic.training.vectorized import Trainer

pytestmark = pytest.mark.integrations

CONFIG: TrainConfig = get_recipe("smoke").replace(
    rounds=2, rows=3, rows_per_seed=2, episode_length=4, device="cpu", strategy="sequential"
)


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """A head without room for actors, and three nodes with room for one each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    try:
        yield cluster
    finally:
        cluster.shutdown()


def train(
    config: TrainConfig, cluster: RayCluster | None, accident: Any = None
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Train, with an accident in the middle of the second round; return state and returns."""
    trainer = Trainer(config, cluster=cluster)
    returns = []
    for progress in trainer.train():
        if progress.report is not None:
            returns.append(progress.report.outcome.returns)
        if accident and trainer.round == 1 and trainer.step == 2:
            accident()
            accident = None
    assert accident is None
    state = trainer.state_dict()
    trainer.close()
    return state["agent"], returns


def assert_same(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1)), where
    else:
        assert one == other or one != one, where


def test_a_node_killed_in_the_middle_changes_no_number(nodes: Cluster) -> None:
    with RayCluster(nodes.address, actors=2) as cluster:
        lost: list[str] = []

        def kill_a_node() -> None:
            node = cluster.work[1].node
            lost.append(node)
            pid = int(node.rpartition(":")[2])
            for each in list(nodes.worker_nodes):
                if _has_process(each, pid):
                    nodes.remove_node(each, allow_graceful=False)
                    # A machine takes its processes along; here they outlive the node for a while.
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    return
            raise AssertionError(f"no node has the process {pid}")

        remote = train(CONFIG, cluster, kill_a_node)
        assert cluster.work[1].losses == lost
        assert cluster.work[1].node != lost[0]
        # 2 twins, then 3 rows for 5 epochs each, twice; what was played again counts once.
        assert sum(each.epochs for each in cluster.work) == 2 * 5 * (2 + 3)
    assert_same(train(CONFIG, None), remote)


def test_the_command_begins_on_a_cluster_and_goes_on_at_home(
    nodes: Cluster, tmp_path: Path
) -> None:
    size = ["--envs", "3", "--episode-length", "4", "--device", "cpu", "--json"]
    ray = ["--engine", "ray", "--address", nodes.address, "--actors", "2"]
    away, home = str(tmp_path / "away"), str(tmp_path / "home")
    assert main(["train", "smoke", *size, "--rounds", "1", *ray, "--out", away]) == 0
    assert main(["train", "--resume", "--set", "rounds=2", "--out", away, "--json"]) == 0
    assert main(["train", "smoke", *size, "--rounds", "1", "--out", home]) == 0
    assert main(["train", "--resume", "--set", "rounds=2", "--out", home, "--json"]) == 0
    summaries = [
        json.loads((Path(each) / "summary.json").read_text(encoding="utf-8"))
        for each in (away, home)
    ]
    for part in ("first", "last", "env_steps"):
        assert summaries[0][part] == summaries[1][part]
    with open_run(away) as stored:
        events = stored.rows("events", where="kind = 'actor_worked'")
    assert [(each["round"], each["row"]) for each in events] == [(0, 0), (0, 1)]
    assert sum(each["data"]["epochs"] for each in events) == 5 * (1 + 3)


def test_a_proof_on_a_cluster_finds_the_same(nodes: Cluster, tmp_path: Path) -> None:
    asked = ["prove", "periodic:every=1", "wait", "--count", "1", "--seeds", "4", "--horizon", "2"]
    ray = ["--engine", "ray", "--address", nodes.address, "--actors", "2"]
    for name, engine in (("away", ray), ("home", [])):
        out = str(tmp_path / name)
        assert main([*asked, "--device", "cpu", "--json", *engine, "--out", out]) == 0
    away, home = ((tmp_path / name / "results.json").read_text() for name in ("away", "home"))
    assert away == home
    work = json.loads((tmp_path / "away" / "cluster.json").read_text())
    assert [each["epochs"] for each in work] == [8, 8]


def _has_process(node: Any, pid: int) -> bool:
    """Return whether a process was started by this node's raylet."""
    raylets = [each.process.pid for each in node.all_processes["raylet"]]
    parent = pid
    while parent > 1:
        if parent in raylets:
            return True
        parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    return False
