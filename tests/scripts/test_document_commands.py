from __future__ import annotations

from pathlib import Path

import pytest

from esper.cli.main import VERBS
from esper.scripts.document_commands import PAGE, command_parser, main, render

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert page == render(), "run python -m esper.scripts.document_commands"


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_command_is_in_its_section(verb: str) -> None:
    section = render().split(f"\n## `esper {verb}`\n")[1].split("\n## ")[0]
    for action in command_parser(verb)._actions:
        for option in set(action.option_strings) - {"-h", "--help"}:
            assert f"`{option}" in section or f", {option}" in section, option


def test_a_line_says_what_follows_an_option_and_what_it_is_by_default() -> None:
    page = render()
    assert "| `--device {auto,cpu,cuda}` | where (default: auto) |" in page
    assert "| `[ARM ...]` | what is played" in page
    assert "such as blocks.\\*, or auto" in page


def test_the_page_is_written_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "commands.md"
    assert main(["--check", "--out", str(out)]) == 1
    assert main(["--out", str(out)]) == 0
    assert main(["--check", "--out", str(out)]) == 0
    assert "is current" in capsys.readouterr().out
