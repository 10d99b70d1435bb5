"""Every column of every table is written by some run, or says here why it may stay empty."""

from __future__ import annotations

from pathlib import Path

import pytest

import esper
from esper.growth.recorder import EpochRecorder, record_end, record_start, run_row
from esper.growth.run import GrowthLoop
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.state import GateConfig
from esper.lab.tasks import get_task
from esper.lab.tasks.request import task_config, task_run
from esper.nissa import open_run, open_store
from esper.nissa.columns import TABLES
from esper.simic.rewards import RewardConfig
from esper.simic.training.recorded import start_training
from tests.growth.depth.models import make_gpt, tokens
from tests.simic.training.tiny import tiny_config

RARE = {
    "runs.note": "a run that stops for a reason worth words",
    "runs.stopped": "a run that ends before its last epoch",
    "rounds.gpu_memory_share": "a GPU",
    "updates.gpu_memory_share": "a GPU",
    "epochs.gpu_memory_share": "a GPU",
    "updates.lstm_c_rms_late": "an episode of more than 100 epochs",
    "rounds.attribution_ratio_max": "a seed that is credited with far more than was gained",
    "rounds.hindsight_mean": "a scaffold that is credited",
    "rounds.hindsight_delay": "a scaffold that is credited",
    "rounds.hindsight_quantiles": "a scaffold that is credited",
    "episodes.rollback_reason": "a network beyond saving",
    "epochs.rollback_reason": "a network beyond saving",
}
"""What a column waits for that no run of seconds has."""


def grow(folder: Path) -> None:
    """Grow a network whose seeds come, blend and go quickly."""
    task = get_task("digits_mlp")
    quick = LifecycleConfig(
        gates=GateConfig(min_training_epochs=1, min_gradient_health=0.0),
        embargo_ticks=1,
        auto_training=True,
        auto_blending=True,
        auto_holding=True,
    )
    config = task_config(task, epochs=24, seed=1)
    config = config.replace(garden=config.garden.replace(lifecycle=quick))
    run: GrowthLoop = task_run(task, task.load(), config=config, controller="random")
    row = run_row(run, Path("x"), {"a": 1}, "esper grow")
    with open_store(folder, row, sinks=()) as store:
        record_start(store, run)
        recorder = EpochRecorder(store, run)
        for record in run.epochs():
            recorder.record(record)
        record_end(store, run.finish())


def deepen(folder: Path) -> None:
    """Deepen a network: blocks wake in the second of three short epochs."""
    batches = [(batch[:, :-1], batch[:, 1:]) for batch in map(tokens, range(3))]
    asked = {"start": 1, "at": {4: 2}}
    esper.grow(
        make_gpt(2),
        train=batches,
        val=batches,
        loss="language",
        epochs=3,
        deepen=asked,
        keep="last",
        out=folder,
        sinks=(),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("runs")
    grow(base / "grow")
    deepen(base / "deep")
    shaped = tiny_config(reward=RewardConfig(mode="shaped"), evaluate_every=1, evaluation_seeds=1)
    for name, config in {"twin": tiny_config(), "shaped": shaped}.items():
        with start_training(base / name, config, command="esper train", sinks=()) as run:
            run.carry_out()
    return [base / "grow", base / "deep", base / "twin", base / "shaped"]


def test_every_column_is_written_by_some_run_or_waits_for_something_named(
    folders: list[Path],
) -> None:
    written: set[str] = set()
    for folder in folders:
        with open_run(folder) as run:
            for table in TABLES.values():
                for row in run.rows(table.name):
                    written |= {f"{table.name}.{name}" for name in row if row[name] is not None}
    declared = {f"{table.name}.{name}" for table in TABLES.values() for name in table.names}
    assert declared - written - RARE.keys() == set(), "write them truly, or delete them"
    assert RARE.keys() <= declared
