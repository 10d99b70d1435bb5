"""The examples run as they are, and stay small enough to read."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def run_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> list[str]:
    monkeypatch.setattr("sys.argv", [name, *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_every_example_is_tested_here_and_short() -> None:
    lines = {
        path.name: len(path.read_text(encoding="utf-8").splitlines())
        for path in EXAMPLES.glob("*.py")
    }
    # Those in other libraries' loops are run by the tests of esper.integrations.
    others = {"distributed.py", "in_lightning.py", "in_trainer.py"}
    assert set(lines) == {"grow_your_model.py", "own_loop.py", *others}
    assert {name for name, length in lines.items() if length >= 80} == set()
    assert {name for name in others if lines[name] >= 60} == set()


@pytest.mark.filterwarnings("ignore:.*too few to grow in", "ignore:Nothing grew")
def test_growing_a_model_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    options = ("--epochs", "2", "--out", str(page))
    lines = run_example("grow_your_model.py", monkeypatch, capsys, *options)
    assert [line.split(":")[0] for line in lines[:2]] == ["epoch 1", "epoch 2"]
    assert lines[2] == "714 parameters became 714,"
    assert lines[-1] == f"report: {page}"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.filterwarnings("ignore:.*too few to grow in")
def test_keeping_ones_own_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_example("own_loop.py", monkeypatch, capsys, "--epochs", "3")
    assert len(lines) == 3
    assert lines[-1].startswith("epoch 3: ")
    assert lines[-1].endswith("502 parameters")


ABORT_AT_EXIT = "terminate called without an active exception"
"""What gloo (PyTorch 2.13) may say after the last line of a program. On a busy machine 3 of 12 runs
of plain DDP, without Esper, aborted so."""


def test_growing_in_two_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for _ in range(4):
        done = subprocess.run(
            [*command, "--nproc-per-node=2", str(EXAMPLES / "distributed.py"), "--epochs=2"],
            capture_output=True,
            text=True,
            check=False,
        )
        if ABORT_AT_EXIT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 2: ")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.slow
def test_by_default_both_grow_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = str(tmp_path / "report.html")
    lines = run_example("grow_your_model.py", monkeypatch, capsys, "--out", page)
    assert any("germinated at layer" in line for line in lines)
    lines = run_example("own_loop.py", monkeypatch, capsys)
    assert any("BLENDING" in line for line in lines)
