from __future__ import annotations

import json
from pathlib import Path

import pytest

import esper
from esper.growth.recorder import (
    EpochRecorder,
    record_end,
    record_history,
    record_start,
    run_row,
)
from esper.growth.run import GrowthLoop
from esper.lab.tasks import get_task
from esper.lab.tasks.request import task_config, task_run
from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.records import ModuleRecord
from esper.nissa import open_store, read_history
from esper.tamiyo.controllers.learned import LearnedController
from esper.tamiyo.controllers.policy_file import new_policy
from esper.tamiyo.networks.config import PolicyConfig

# Most runs here are too short to grow, or grow by chance; that is not what they are about.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*too few to grow in"),
    pytest.mark.filterwarnings("ignore:Nothing grew"),
]


def make_run(epochs: int = 3, controller: str | Controller = "random") -> GrowthLoop:
    task = get_task("digits_mlp")
    config = task_config(task, epochs=epochs, seed=1)
    return task_run(task, task.load(), config=config, controller=controller)


def test_a_run_is_written_from_its_start_to_its_end(tmp_path: Path) -> None:
    run = make_run()
    row = run_row(run, Path("x"), {"a": 1}, "esper grow")
    with open_store(tmp_path, row, sinks=()) as store:
        record_start(store, run)
        recorder = EpochRecorder(store, run)
        for record in run.epochs():
            recorder.record(record)
        grown = run.finish()
        record_end(store, grown)
    with esper.open_run(tmp_path) as stored:
        info = stored.info
        assert read_history(stored) == run.history
        (event,) = stored.rows("events", where="kind = 'training_started'")
        memory = [row["memory_bytes"] for row in stored.rows("epochs")]
    assert (info.status, info.config, info.command) == ("finished", {"a": 1}, "esper grow")
    assert info.test_score == grown.summary.test_score
    assert info.parameters == grown.summary.parameters_after
    assert info.host_parameters == run.parameters_before
    modules = tuple(map(ModuleRecord.from_mapping, event["data"]["modules"]))
    assert modules == grown.modules
    assert all(size is None or size > 1e6 for size in memory)
    json.dumps(info.versions)


def test_a_learned_controller_says_why(tmp_path: Path) -> None:
    slots = make_run().garden.slot_names
    policy = new_policy(PolicyConfig(lstm_hidden_dim=32, num_slots=8), seed=5)
    run = make_run(controller=LearnedController(policy, ControllerContext(slot_names=slots)))
    row = run_row(run, Path("x"), {}, "esper grow")
    with open_store(tmp_path, row, sinks=()) as store:
        recorder = EpochRecorder(store, run)
        for record in run.epochs():
            recorder.record(record)
    with esper.open_run(tmp_path) as stored:
        told = stored.rows("events", where="kind = 'decision_explained'")
        decisions = {one["step"]: one["op"] for one in stored.rows("decisions")}
    assert {one["step"]: one["data"]["op"] for one in told} == decisions
    assert len(told) == 2
    assert all(one["volatile"] and one["data"]["contributors"] for one in told)


def test_a_history_can_be_written_at_once(tmp_path: Path) -> None:
    run = make_run()
    list(run.epochs())
    row = run_row(run, Path("x"), {}, "")
    with open_store(tmp_path, row, sinks=()) as store:
        record_history(store, run)
    with esper.open_run(tmp_path) as stored:
        assert read_history(stored) == run.history
