from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper._version import __version__
from esper.cli import main as entry
from esper.cli import tasks
from esper.cli.parser import Parser
from esper.leyline.errors import (
    CheckpointError,
    DataError,
    EsperWarning,
    NonFiniteError,
    UsageError,
)
from tests.cli.terminal import esper


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: object) -> int:
        raise error

    monkeypatch.setattr(tasks, "run", run)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "--version")
    assert (said.code, said.out, said.err) == (0, f"esper {__version__}\n", "")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "--help")
    assert (said.code, said.err) == (0, "")
    for verb, line in entry.VERBS.items():
        assert f"\n    {verb}" in said.out
        assert line.split(":")[0] in " ".join(said.out.split())


@pytest.mark.parametrize("verb", entry.VERBS)
def test_every_command_is_a_module_that_says_what_it_does(verb: str) -> None:
    parser = Parser()
    importlib.import_module(f"esper.cli.{verb}").set_up(parser)
    assert (parser.description or "").endswith(".")
    assert callable(parser.get_default("run"))


def test_only_the_command_asked_for_is_loaded(tmp_path: Path) -> None:
    program = (
        "import sys; from esper.cli.main import main\n"
        "main(['runs', '--root', sys.argv[1]])\n"
        "print(*sorted(name for name in sys.modules if name.startswith('esper.cli.')))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {name.removeprefix("esper.cli.") for name in done.stdout.split()}
    assert loaded == {"main", "output", "parser", "runs"}


def test_a_misspelt_command_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'train'?" in esper(capsys, "trian", "--out", "x").complaint()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("wrong\nrequest"), 2),
        (DataError("no data"), 2),
        (CheckpointError("disk full"), 1),
        (NonFiniteError("loss is nan"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    error: BaseException,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raising(error, monkeypatch)
    said = esper(capsys, "tasks")
    assert said.code == code
    assert said.out == ""
    words = " ".join(str(error).split()) or "interrupted"
    assert said.err == f"esper: {words}\n"


def test_a_bug_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(RuntimeError("a bug"), monkeypatch)
    with pytest.raises(RuntimeError, match="a bug"):
        esper(capsys, "tasks")


def test_errors_can_be_looked_into(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_DEBUG", "1")
    raising(UsageError("wrong"), monkeypatch)
    with pytest.raises(UsageError, match="wrong"):
        esper(capsys, "tasks")


def test_escapes_in_a_message_are_shown_as_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(UsageError("\x1b[2Jgone \u202e " + "x" * 5000 + " end"), monkeypatch)
    line = esper(capsys, "tasks").complaint()
    assert line.startswith("esper: \\x1b[2Jgone \\x202e xxx")
    assert line.endswith("xxx end")
    assert len(line) < 1000


def test_threads_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        monkeypatch.setenv("ESPER_THREADS", "2")
        assert esper(capsys, "blueprints", "--json").code == 0
        assert torch.get_num_threads() == 2
        for wrong in ("many", "0", "-1", ""):
            monkeypatch.setenv("ESPER_THREADS", wrong)
            line = esper(capsys, "blueprints").complaint()
            assert f"ESPER_THREADS must be a whole number from 1, got {wrong!r}" in line
    finally:
        torch.set_num_threads(1)


def test_a_warning_is_one_line_without_the_place_in_the_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import warnings

    def run(options: object) -> int:
        warnings.warn("it works, but \x1b[31mslowly", EsperWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(tasks, "run", run)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        said = esper(capsys, "tasks")
    assert (said.code, said.out) == (0, "")
    assert said.err == "esper: warning: it works, but \\x1b[31mslowly\n"
