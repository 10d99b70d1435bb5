from __future__ import annotations

import pytest
import torch

from esper._version import __version__
from esper.cli import main as entry
from esper.cli import tasks
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
    for verb in ("grow", "tasks", "blueprints", "doctor"):
        assert f"\n    {verb}" in said.out


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


def test_the_parser_is_built_anew_each_time() -> None:
    assert entry.build_parser() is not entry.build_parser()
