from __future__ import annotations

import pytest

from esper.scripts.cli.main import VERBS
from tools.pages.commands import command_parser, render


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_command_is_in_its_section(verb: str) -> None:
    section = render().split(f"\n## `esper {verb}`\n")[1].split("\n## ")[0]
    for action in command_parser(verb)._actions:
        for option in set(action.option_strings) - {"-h", "--help"}:
            assert f"`{option}" in section or f", {option}" in section, option


def test_a_line_says_what_follows_an_option_and_what_it_is_by_default() -> None:
    page = render()
    assert "| `--device {auto,cpu,cuda}` | device (default: auto) |" in page
    assert "| `[ARM ...]` | controllers to compare" in page
    assert "such as blocks.\\*; auto" in page
