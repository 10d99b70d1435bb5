"""`esper grow` as a process that is stopped, killed, piped and called with hostile bytes."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from esper.leyline.records import EpochRecord
from esper.nissa.folder import GROWING, Checkpoints
from esper.scripts.cli.main import main
from tests.plots import plain_history, same
from tests.scripts.cli.terminal import environment, esper, esper_process, start

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")

LONG = ("grow", "--task", "digits", "--epochs", 12, "--controller", "random", "--seed", 1)


def epochs_trained(run: Path) -> list[int]:
    """Return the epochs in the log, in order; one that was trained twice is there twice."""
    try:
        words = [line.split() for line in (run / "log.txt").read_text("utf-8").splitlines()]
    except FileNotFoundError:
        return []
    return [int(line[2]) for line in words if line[1:2] == ["epoch"] and len(line) > 3]


def wait_for(process: subprocess.Popen[str], run: Path, epochs: int) -> None:
    """Wait until this many epochs have been trained, or the run is over."""
    limit = time.monotonic() + 90
    while len(epochs_trained(run)) < epochs and process.poll() != 0:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "the run makes no progress"
        time.sleep(0.02)


def state_of(run: Path) -> dict[str, Any]:
    state = Checkpoints(run, GROWING).load()
    assert state is not None
    return state


def assert_same_run(one: Path, other: Path) -> None:
    """Both runs ended with the same weights, the same twin and the same history."""
    states = [state_of(run) for run in (one, other)]
    histories = [
        plain_history([EpochRecord.from_mapping(row) for row in state["gardener"]["history"]])
        for state in states
    ]
    assert len(histories[0]) == 12
    assert histories[0] == histories[1]
    for state in states:
        state["gardener"].pop("history")
        # Python draws the random states that nobody seeds anew in every process.
        for key in ("seconds", "telemetry", "command", "random"):
            state.pop(key)
    assert same(states[0], states[1])
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, other)]
    for summary in summaries:
        for key in ("seconds", "run", "report"):
            summary.pop(key)
    assert summaries[0] == summaries[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without any interruption, in this process."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
        assert main([*map(str, LONG), "--json", "--out", str(run)]) == 0
    document = json.loads(out.getvalue())
    assert document["twin_test_score"] is not None
    assert document["seeds"], "the run must grow something to be worth comparing"
    return run


def test_an_interrupt_ends_the_epoch_saves_and_can_be_resumed(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    process = start(*LONG, "--json", "--out", run)
    wait_for(process, run, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    done = len(epochs_trained(run))
    assert 2 <= done < 12
    assert f"interrupted after epoch {done}; continue with: esper grow --resume --out {run}" in err
    # The epoch in progress was finished and saved.
    assert len(state_of(run)["gardener"]["history"]) == done
    assert esper(capsys, "grow", "--resume", "--out", run).code == 0
    assert epochs_trained(run) == list(range(1, 13))
    assert_same_run(run, whole)


def kill_and_resume(run: Path, times: int, seed: int, latest: float) -> None:
    """Kill the run at random moments, each after some progress, resuming it in between."""
    moments = random.Random(seed)
    process = start(*LONG, "--out", run)
    for number in range(times):
        # An epoch is saved before the next begins: in the second, the first is safe.
        wait_for(process, run, len(epochs_trained(run)) + 1 if number else 2)
        time.sleep(moments.uniform(0, latest))
        process.kill()
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0)
        if number < times - 1:
            process = start("grow", "--resume", "--out", run)


def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    kill_and_resume(run, 1, seed=time.time_ns(), latest=0.4)
    assert esper(capsys, "grow", "--resume", "--out", run).code == 0
    # It did go on: the first epoch was saved, and never trained again.
    assert epochs_trained(run).count(1) == 1
    assert_same_run(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_kills(
    seed: int, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    # Soon after an epoch was logged, so that many of them hit while it is saved.
    kill_and_resume(run, 8, seed, latest=0.05)
    assert esper(capsys, "grow", "--resume", "--out", run).code == 0
    assert_same_run(run, whole)


# ------------------------------------------------------------------------------------ being piped
# The list of runs needs no PyTorch, which takes seconds to load; all commands print alike.


def test_a_reader_that_goes_away_is_no_failure(whole: Path) -> None:
    process = start("runs", "--root", whole.parent)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0


def test_a_run_goes_on_when_nobody_reads_its_progress(tmp_path: Path) -> None:
    fast = ("grow", "--task", "digits_mlp", "--epochs", 3, "--controller", "random", "--no-twin")
    process = start(*fast, "--json", "--out", tmp_path / "run")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stderr.close()
    with process.stdout:
        document = json.loads(process.stdout.read())
    assert process.wait(timeout=60) == 0
    assert document["epochs"] == 3


def test_a_pipe_to_head_prints_one_line(whole: Path) -> None:
    listing = f"'{sys.executable}' -m esper.scripts.cli.main runs --root '{whole.parent}'"
    command = f"set -o pipefail; {listing} | head -1"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1


def test_output_that_knows_only_ascii_is_enough(whole: Path) -> None:
    env = environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C", COLUMNS="240")
    said = esper_process("runs", "--root", whole.parent, env=env)
    assert said.code == 0, said.err
    assert "digits" in said.out
    assert said.out.isascii()


# --------------------------------------------------------------------------------- hostile requests


def test_bytes_that_are_no_text_are_shown_as_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\x1b]0;owned\x07")
    said = esper_process("report", tmp_path / name)
    line = said.complaint()
    assert "owned" in line
    assert "\x1b" not in line


def test_the_installed_command_is_this_one() -> None:
    script = Path(sys.executable).with_name("esper")
    if not script.exists():
        pytest.skip("the command is not installed beside this Python")
    done = subprocess.run(
        [script, "grwo", "--task", "digits", "--out", "unused"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "did you mean 'grow'?" in done.stderr
    assert done.stderr.count("\n") == 1
