from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper._version import __version__
from esper.leyline.errors import (
    CheckpointError,
    DataError,
    EsperWarning,
    NonFiniteError,
    UsageError,
)
from esper.scripts.cli import main as entry
from esper.scripts.cli import tasks
from esper.scripts.cli.main import VERBS, Parser, build_parser
from tests.scripts.cli.terminal import esper


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
    assert "default" not in said.out


@pytest.mark.parametrize("verb", entry.VERBS)
def test_every_command_says_what_it_does_and_has_examples(verb: str) -> None:
    parser = _parser_of(verb)
    described = parser.description or ""
    # The first sentence is the line in the list of commands.
    assert described.lower().startswith(f"{VERBS[verb].lower()}. ")
    assert described.endswith(".")
    assert f"\n  esper {verb}" in (parser.epilog or "")
    assert callable(parser.get_default("run"))


def test_only_the_command_asked_for_is_loaded(tmp_path: Path) -> None:
    program = (
        "import sys; from esper.scripts.cli.main import main\n"
        "main(['runs', '--root', sys.argv[1]])\n"
        "print(*sorted(name for name in sys.modules if name.startswith('esper.scripts.cli.')))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {name.removeprefix("esper.scripts.cli.") for name in done.stdout.split()}
    assert loaded == {"main", "output", "runs"}


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


def test_a_full_disk_under_the_output_is_one_line(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "esper", "runs", "--root", tmp_path, "--json"],
            stdout=out,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 1
    assert done.stderr.decode().startswith("esper: cannot write all of the output: No space")
    assert done.stderr.count(b"\n") == 1


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


def make_parser() -> Parser:
    parser = Parser(prog="esper")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    grow = verbs.add_parser("grow")
    grow.add_argument("--epochs", type=int, default=3, help="how long")
    grow.add_argument("--path", help="where from")
    grow.add_argument("--mode", choices=("a", "b"), help="which (default: a)")
    grow.add_argument("--loud", action="store_true", help="shout")
    grow.add_argument("--must", required=True, help="needed")
    return parser


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        make_parser().parse_args(arguments)
    assert exit_.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err.strip()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["grow", "--must", "x", "--epoch", "3"], ["unknown option '--epoch'", "'--epochs'?"]),
        (["grow", "--must", "x", "--epoch=3"], ["unknown option '--epoch'", "'--epochs'?"]),
        (["grow", "--must", "x", "digits"], ["unexpected argument 'digits'"]),
        (["grow", "--must", "x", ""], ["unexpected argument ''"]),
        (["grow", "--must", "x", "--ep", "3"], ["unknown option '--ep'"]),
        (["grow", "--must", "x", "--epochs", "three"], ["--epochs", "invalid int value: 'three'"]),
        (["grow", "--must", "x", "--epochs"], ["--epochs", "expected one argument"]),
        (["grow", "--must", "x", "--mode", "c"], ["--mode", "'c'", "choose from a, b"]),
        (["grow"], ["required", "--must"]),
        (["gro"], ["'gro'", "grow"]),
        ([], ["COMMAND"]),
    ],
)
def test_a_mistake_is_one_line_that_says_what_would_be_right(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, *arguments)
    for part in parts:
        assert part in line
    assert "--help`" in line
    # The line names the command whose help tells more.
    assert line.startswith("esper grow: " if arguments[:1] == ["grow"] else "esper: ")


def test_an_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'grow'?" in refusal(capsys, "grwo")


@pytest.mark.parametrize(
    "name", ["\x1b[31mgrow", "a\nb", "\u202egrow", "\udcff", "x" * 5000], ids=repr
)
def test_hostile_names_are_shown_as_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([name], ["grow", "--must", "x", name], ["grow", "--must", "x", f"--{name}"]):
        line = refusal(capsys, *arguments)
        assert line.isprintable()
        assert len(line) < 1000


def test_every_default_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["grow", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "how long (default: 3)" in text
    assert "where from (default: none)" in text
    assert "which (default: a) --loud" in text
    assert "shout (default: no)" in text
    assert "needed (required)" in text


def _parser_of(verb: str) -> argparse.ArgumentParser:
    (action,) = (
        action
        for action in build_parser([verb])._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    found: argparse.ArgumentParser = action.choices[verb]
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_command_tells_every_option_with_its_default(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    said = esper(capsys, verb, "--help")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    # The usage is not broken within an option, and examples are shown as they are typed.
    body = lines[lines.index("") : lines.index("examples:") if "examples:" in lines else None]
    assert max(map(len, body)) <= 60
    text = " ".join(said.out.split())
    actions = [action for action in _parser_of(verb)._actions if action.dest != "help"]
    for action in actions:
        shown = action.option_strings[0] if action.option_strings else str(action.metavar)
        assert f" {shown}" in text
        assert action.help
    told = text.count("(default: ") + text.count("(required)")
    assert told == len(actions), text


PLUGIN = """
from esper.kasmina.hosts import CnnConfig
from esper.lab.tasks import register_task
from esper.lab.tasks.presets import Digits


@register_task("{name}")
class Mine(Digits):
    \"\"\"Digits of somebody's own.\"\"\"

    defaults = Digits.defaults.replace(host_options=CnnConfig(channels=(2, 2), in_channels=1))
"""


def test_a_local_file_can_be_imported_and_reaches_worker_processes(tmp_path: Path) -> None:
    """In a process of its own: what is registered stays so. One for all ways, as it takes seconds.

    Each way imports a file of its own, and is tried on a listing that the earlier ones are in too.
    """
    files = {place: tmp_path / f"plugin_{place}.py" for place in ("before", "after", "equals")}
    for place, file in files.items():
        file.write_text(PLUGIN.format(name=place))
    calls = [
        ["--import", str(files["before"]), "tasks", "--json"],
        ["tasks", "--json", "--import", str(files["after"])],
        [f"--import={files['equals']}", "tasks", "--json"],
    ]
    words = ["train", "smoke", "--task", "before", "--import", str(files["before"])]
    words += ["--rounds", "1", "--set", "strategy=workers", "--set", "rows=2"]
    words += ["--set", "episode_length=2", "--set", "population.workers=1"]
    calls.append([*words, "--out", str(tmp_path / "run"), "--device", "cpu"])
    program = (
        "import sys; from esper.scripts.cli.main import main\n"
        f"for words in {calls!r}: assert main(words) == 0; print('next')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for number, listing in enumerate(done.stdout.split("next")[:3], 1):
        assert [f'"{place}"' in listing for place in files] == [n < number for n in range(3)]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (None, "no such file"),
        ("raise RuntimeError('not today')", "RuntimeError: not today"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    source: str | None,
    told: str,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / f"plugin_{told[:2].strip().lower()}.py"
    if source is not None:
        file.write_text(source)
    said = esper(capsys, "--import", str(file), "tasks")
    assert said.code == 2
    assert told in said.err
    assert said.err.count("\n") == 1


def test_a_plugin_does_not_shadow_a_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "json.py").write_text("")
    said = esper(capsys, "--import", str(tmp_path / "json.py"), "tasks")
    assert said.code == 2
    assert "rename the file" in said.err
    assert str(tmp_path) not in sys.path


def close_streams() -> None:
    os.close(1)
    os.close(2)


@pytest.mark.skipif(os.name == "nt", reason="file descriptors are POSIX")
def test_a_command_ends_well_when_its_streams_are_closed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "esper.scripts.cli.main", "runs", "--root", str(tmp_path)]
    done = subprocess.run(command, preexec_fn=close_streams, check=False)
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="file descriptors are POSIX")
def test_a_run_ends_well_without_docstrings_and_with_closed_streams(tmp_path: Path) -> None:
    fast = ("--epochs", "1", "--controller", "wait", "--no-twin", "--out", str(tmp_path / "run"))
    command = [
        *(sys.executable, "-OO", "-m", "esper.scripts.cli.main"),
        "grow",
        "--task",
        "digits_mlp",
    ]
    done = subprocess.run([*command, *fast], preexec_fn=close_streams, check=False)
    assert done.returncode == 0
    assert (tmp_path / "run" / "summary.json").exists()
