from __future__ import annotations

import argparse

import pytest

from esper.cli.main import VERBS, build_parser
from esper.cli.parser import Parser
from tests.cli.terminal import esper


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
