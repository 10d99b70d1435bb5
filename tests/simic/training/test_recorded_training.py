from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from esper.leyline.controller import GrowthLimits
from esper.leyline.errors import CheckpointError, ConfigError, UsageError
from esper.nissa.folder import TRAINING, Checkpoints, RunFolder, read_manifest
from esper.nissa.reader import open_run
from esper.simic.training.config import StageConfig, TrainConfig
from esper.simic.training.progress import Progress
from esper.simic.training.recorded import (
    TrainingRun,
    common_limits,
    read_run_config,
    resume_training,
    shortest_run,
    start_training,
)
from esper.simic.training.train import resolve_recipe
from esper.tamiyo.controllers.policy_file import CHECKPOINT_POLICY, load_policy
from esper.tamiyo.networks.config import PolicyConfig
from tests.plots import same
from tests.simic.training.tiny import stored_rows, tiny_config

VOLATILE = ("twin_seconds", "telemetry", "command")


def final_state(run: Path) -> dict[str, Any]:
    """Return the last checkpoint of a run without times."""
    state = Checkpoints(run, TRAINING).load()
    assert state is not None
    assert state["rollout"] is None
    return {name: value for name, value in state.items() if name not in VOLATILE}


def carry_out(run: TrainingRun, steps: int | None = None) -> bool:
    """Train to the end, or stop after some steps."""
    left = [steps]

    def is_stopped() -> bool:
        if left[0] is None:
            return False
        left[0] -= 1
        return left[0] <= 0

    with run:
        is_done = run.carry_out(is_stopped=is_stopped)
        if is_done:
            run.finish()
        return is_done


def in_process(folder: Path) -> subprocess.Popen[bytes]:
    """Start or continue the tiny run as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.simic.training.run_tiny", str(folder)],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds without any interruption."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert carry_out(start_training(folder, tiny_config(checkpoint_seconds=0.01), sinks=()))
    return folder


def assert_same_run(one: Path, other: Path) -> None:
    """Both ended with the same policy, optimizer and counters, and tell the same story."""
    assert same(final_state(one), final_state(other))
    stories = [stored_rows(run) for run in (one, other)]
    for story in stories:
        # The run's own row has its name in it.
        story.pop("runs")
    assert stories[0].keys() == stories[1].keys()
    for table, rows in stories[0].items():
        assert rows == stories[1][table], table


def test_the_best_policy_is_that_of_its_round_whenever_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingRun, "is_due", lambda self, step: False)
    run = start_training(tmp_path / "run", tiny_config(rounds=2), sinks=())
    best_of, then = run.best, []

    def first_best(step: Progress) -> Any:
        write = None if then else best_of(step)
        if write is not None:
            then.append(run.trainer.policy.state_dict())
        return write

    monkeypatch.setattr(run, "best", first_best)
    assert carry_out(run)
    best, last = load_policy(run.checkpoints.best), load_policy(run.checkpoints.latest)
    assert same(best.state_dict(), then[0])
    assert not same(last.state_dict(), then[0])


def test_a_run_leaves_everything_behind(whole: Path) -> None:
    assert TrainConfig.from_mapping(yaml.safe_load((whole / "config.yaml").read_text()))
    story = stored_rows(whole)
    assert len(story["rounds"]) == 2
    assert len(story["episodes"]) == 2 * 4
    assert len(story["decisions"]) == 2 * 2 * 9
    assert len(story["epochs"]) == 2 * 2 * 10
    assert {"updates", "update_heads", "seeds", "seed_stages", "events"} <= {
        table for table, rows in story.items() if rows
    }
    with open_run(whole) as stored:
        assert (stored.info.kind, stored.info.status) == ("train", "finished")
        assert (stored.info.rounds, stored.info.rows, stored.info.epochs) == (2, 4, 10)
    words = (whole / "log.txt").read_text()
    assert words.count(" round ") == 2
    assert words.rstrip().endswith("finished")


@pytest.mark.parametrize(
    ("task", "limits"),
    [("digits", GrowthLimits()), ("digits_family", GrowthLimits(parameters=2.0, flops=2.0))],
)
def test_a_policy_is_saved_with_the_limits_it_learns_under(
    tmp_path: Path, task: str, limits: GrowthLimits
) -> None:
    policy = PolicyConfig(layout="travelling", lstm_hidden_dim=8)
    config = tiny_config(tasks=(task,), policy=policy)
    with start_training(tmp_path / "run", config, sinks=()) as run:
        run.snapshot()[2][CHECKPOINT_POLICY](tmp_path / "policy")
    saved = load_policy(tmp_path / "policy")
    assert (saved.limits, saved.horizon) == (limits, config.epochs)


def test_the_shortest_run_is_that_of_a_member_or_of_all() -> None:
    assert shortest_run(["digits"], 60) == 60
    assert shortest_run(["digits", "image16_family"], 60) == 40
    assert shortest_run(["image16_family"], 12) == 12


# In the middle of a round, after its update, and among the next one's twins.
@pytest.mark.parametrize(
    "steps",
    [pytest.param(14, marks=pytest.mark.slow), 20, pytest.param(25, marks=pytest.mark.slow)],
)
def test_a_run_that_was_stopped_ends_as_if_it_never_was(
    tmp_path: Path, whole: Path, steps: int
) -> None:
    config = tiny_config(checkpoint_seconds=0.01)
    assert not carry_out(start_training(tmp_path / "run", config, sinks=()), steps)
    with open_run(tmp_path / "run") as stored:
        assert stored.info.status == "interrupted"
    assert carry_out(resume_training(tmp_path / "run", sinks=()))
    assert_same_run(tmp_path / "run", whole)


def kill_and_continue(folder: Path, kills: int, seed: int) -> int:
    """Kill a run at random moments and continue it each time; return how often it was killed.

    After the last kill it goes on in this process.
    """
    drawn = random.Random(seed)
    for killed in range(kills):
        process = in_process(folder)
        wait_for_saves(process, folder, drawn.randint(0, 8))
        time.sleep(drawn.uniform(0.0, 0.2))
        if process.poll() is None:
            process.kill()
        _, errors = process.communicate(timeout=240)
        if process.returncode == 0:
            return killed
        assert process.returncode == -9, errors.decode()
    assert carry_out(resume_training(folder, sinks=()))
    return kills


def wait_for_saves(process: subprocess.Popen[bytes], folder: Path, saves: int) -> None:
    """Wait until a run has opened its folder and saved this many checkpoints more."""
    log, before = folder / "log.txt", _stamp(folder / "log.txt")
    while process.poll() is None and _stamp(log) == before:
        time.sleep(0.005)
    manifest = folder / "checkpoints" / "latest" / "state" / "manifest.json"
    for _ in range(saves):
        before = _stamp(manifest)
        while process.poll() is None and _stamp(manifest) == before:
            time.sleep(0.001)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
def test_a_run_that_was_killed_ends_identical(tmp_path: Path, whole: Path) -> None:
    assert kill_and_continue(tmp_path / "run", 1, seed=1) == 1
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
@pytest.mark.timeout(1800)
def test_twenty_kills_leave_no_trace(tmp_path: Path, whole: Path) -> None:
    killed, number = 0, 0
    while killed < 20:
        folder = tmp_path / f"run{number}"
        killed += kill_and_continue(folder, min(5, 20 - killed), seed=number)
        assert_same_run(folder, whole)
        number += 1


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path: Path, whole: Path) -> None:
    config = tiny_config(checkpoint_seconds=600.0)
    run = start_training(tmp_path / "run", config, sinks=())
    for count, _ in enumerate(run.trainer.train()):
        if count == 3:
            break
    run.close()
    assert Checkpoints(tmp_path / "run", TRAINING).load() is None
    assert carry_out(
        resume_training(tmp_path / "run", settings={"checkpoint_seconds": 0.01}, sinks=())
    )
    assert_same_run_but_settings(tmp_path / "run", whole)


def assert_same_run_but_settings(one: Path, other: Path) -> None:
    states = [final_state(run) for run in (one, other)]
    for state in states:
        state.pop("config")
    assert same(states[0], states[1])


def test_changes_are_applied_and_recorded_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    carry_out(start_training(folder, tiny_config(), sinks=()), 15)
    run = resume_training(
        folder, settings={"ppo.clip": 0.1}, reset_heads=["blueprint", "tempo"], sinks=()
    )
    assert run.config.ppo.clip == 0.1
    assert run.trainer.step == 0
    # Killed right here: the change is in the checkpoint.
    run.close()
    again = resume_training(folder, sinks=())
    assert again.config.ppo.clip == 0.1
    assert read_run_config(RunFolder(folder)).ppo.clip == 0.1
    carry_out(again)
    with open_run(folder) as stored:
        events: list[Any] = [
            event for event in stored.records("events") if event.kind == "settings_changed"
        ]
    assert len(events) == 1
    assert events[0].data["settings"] == {"ppo.clip": [0.2, 0.1]}
    assert events[0].data["reset_heads"] == ["blueprint", "tempo"]
    assert "ppo.clip 0.2 -> 0.1" in events[0].message


def test_fresh_heads_are_fresh_and_the_others_are_not(tmp_path: Path) -> None:
    carry_out(start_training(tmp_path / "run", tiny_config(rounds=1), sinks=()))
    before = resume_training(tmp_path / "run", settings={"rounds": 2}, sinks=())
    old = {k: v.clone() for k, v in before.trainer.policy.network.state_dict().items()}
    before.close()
    run = resume_training(tmp_path / "run", reset_heads=["blueprint"], sinks=())
    new = run.trainer.policy.network.state_dict()
    changed = {name.partition(".")[0] for name in old if not same(old[name], new[name])}
    run.close()
    assert changed == {"blueprint_head"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"settings": {"rows": 8}}, "rows is 4 in this run and cannot become 8"),
        ({"settings": {"ppo.clp": 8}}, "did you mean 'clip'"),
        ({"reset_heads": ["blueprints"]}, "blueprints"),
    ],
)
def test_a_change_that_cannot_be_changes_nothing(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    folder = tmp_path / "run"
    carry_out(start_training(folder, tiny_config(), sinks=()), 16)
    before = (folder / "config.yaml").read_text(), stored_rows(folder)
    with pytest.raises((ConfigError, UsageError), match=words):
        resume_training(folder, sinks=(), **options)
    assert ((folder / "config.yaml").read_text(), stored_rows(folder)) == before


def test_a_run_that_is_over_can_be_opened_and_says_the_same(whole: Path) -> None:
    with open_run(whole) as stored:
        before = stored.info.val_score, stored.info.twin_val_score
    assert None not in before
    rows = stored_rows(whole)
    assert carry_out(resume_training(whole, sinks=()))
    with open_run(whole) as stored:
        assert (stored.info.val_score, stored.info.twin_val_score) == before
    assert stored_rows(whole) == rows


def test_a_growing_run_is_not_trained(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").claim_new({"task": "digits"}, overwrite=False) as lock:
        lock.release()
    with pytest.raises(UsageError, match="not a training run"):
        resume_training(tmp_path / "run")


def test_a_run_in_use_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    start_training(tmp_path / "run", tiny_config(), sinks=()).close()
    with pytest.raises(UsageError, match="not empty"):
        start_training(tmp_path / "run", tiny_config(), sinks=())
    start_training(tmp_path / "run", tiny_config(seed=9), overwrite=True, sinks=()).close()
    assert read_run_config(RunFolder(tmp_path / "run")).seed == 9


@pytest.mark.parametrize("checkpoint_seconds", [0.01, 600.0])
def test_the_previous_checkpoint_is_older_than_the_latest(
    tmp_path: Path, checkpoint_seconds: float
) -> None:
    config = tiny_config(checkpoint_seconds=checkpoint_seconds)
    folder = tmp_path / "run"

    def assert_older() -> None:
        saved = [read_manifest(folder / "checkpoints" / name) for name in ("previous", "latest")]
        places = [(told.round, told.meta["step"]) for told in saved]
        assert places[0] < places[1]

    carry_out(start_training(folder, config, sinks=()), 33)
    assert_older()
    carry_out(resume_training(folder, sinks=()))
    assert_older()
    assert read_manifest(folder).round == 2
    # Asked again when it is over, it saves nothing new.
    carry_out(resume_training(folder, sinks=()))
    assert_older()


def test_a_run_folder_of_the_old_format_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    carry_out(start_training(folder, tiny_config(), sinks=()), 16)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, "twin_cache": 3}))
    manifest = folder / "checkpoints" / "latest" / "state" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "layout": 1}))
    with pytest.raises(CheckpointError, match="saved by an older Esper") as caught:
        resume_training(folder, sinks=())
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_previous_checkpoint_can_be_gone_on_from(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    carry_out(start_training(folder, tiny_config(checkpoint_seconds=0.01), sinks=()), 33)
    (folder / "checkpoints" / "latest" / "state" / "tree.json").write_text("{}")
    assert carry_out(resume_training(folder, checkpoint="previous", sinks=()))
    assert_same_run(folder, whole)


def test_other_data_is_noticed_when_a_run_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with start_training(run, tiny_config(), sinks=()) as training:
        training.save()
    monkeypatch.setattr("esper.lab.tasks.splits.Splits.fingerprint", lambda self: "another")
    with pytest.raises(UsageError, match=r"the data of .* changed since it was saved"):
        resume_training(run, sinks=())
    with resume_training(run, settings={"data": None}, sinks=()):
        pass


def test_tasks_that_are_named_replace_a_recipes_curriculum(tmp_path: Path) -> None:
    stages = (StageConfig(tasks=("digits_mlp",), rounds=1), StageConfig(tasks=("digits",)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_config(curriculum=stages).to_mapping()))
    assert resolve_recipe(str(recipe), {"seed": 5}).curriculum == stages
    named = resolve_recipe(str(recipe), {"tasks": ("digits",)})
    assert (named.tasks, named.curriculum) == (("digits",), ())
    both = resolve_recipe(str(recipe), {"tasks": ("digits",), "curriculum": stages[:1]})
    assert both.curriculum == stages[:1]


def test_limits_are_those_that_all_tasks_have() -> None:
    twice = GrowthLimits(parameters=2.0, flops=2.0)
    assert common_limits(["digits_family", "image16_family"]) == twice
    assert common_limits(["digits"]) == GrowthLimits()
    assert common_limits(["digits_family", "digits"]) == GrowthLimits()
