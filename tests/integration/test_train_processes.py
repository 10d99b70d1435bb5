"""`esper train` as a process with workers of its own that is stopped from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.cli.terminal import esper

TRAIN = (sys.executable, "-m", "esper.scripts.cli.main", "train")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_signal_to_the_whole_group_ends_the_step_saves_and_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `timeout` and batch systems do it: every process gets one, and the first another."""
    run = tmp_path / "run"
    command = [*TRAIN, "smoke", "--rounds", "3", "--set", "strategy=workers", "--out", str(run)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    # Alarms may come first.
    while not (line := process.stderr.readline()).startswith("round 1/3"):
        assert line, "it ended before its first round"
    os.kill(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert f"continue with: esper train --resume --out {run}" in err
    assert "Traceback" not in err
    assert "worker" not in err
    # How it goes on is no matter of processes.
    resumed = esper(capsys, "train", "--resume", "--set", "strategy=sequential", "--out", run)
    assert resumed.code == 0, resumed.err
    assert "Trained on digits: 3 rounds" in resumed.err + resumed.out
