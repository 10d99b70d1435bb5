from __future__ import annotations

import re

import pytest

from esper.lab.proof.clone import CloneConfig
from esper.lab.proof.prove import ProveConfig
from esper.lab.proof.search import SearchConfig
from esper.lab.tasks.request import GrowSettings
from esper.leyline.config import Config
from esper.scripts.cli.main import VERBS, build_parser
from esper.simic.training.config import TrainConfig
from esper.utils.settings import flat_settings
from tools.pages.settings import render

HEADS = re.compile(r"(lr_multipliers|entropy_(multipliers|floor|floor_penalty))\.\w+$")


@pytest.mark.parametrize(
    ("verb", "config"),
    [
        ("grow", GrowSettings(task="digits")),
        ("train", TrainConfig()),
        ("search", SearchConfig()),
        ("clone", CloneConfig()),
        ("prove", ProveConfig()),
    ],
)
def test_every_key_of_config_yaml_is_on_the_page_once(verb: str, config: Config) -> None:
    """In the command's own section, or in a shared part that says what its keys begin with."""
    own, *shared = parts_of(render(), f"`esper {verb}`")
    begins = {
        prefix: part
        for part in shared
        for prefix, commands in re.findall(r"`([a-z_.]+\.)` \(([^)]*)\)", part)
        if f"`esper {verb}`" in commands
    }
    for key in flat_settings(config.to_mapping()):
        row = HEADS.sub(r"\1", key)
        found = own.count(f"| `{row}` | ")
        for prefix, part in begins.items():
            if row.startswith(prefix):
                found += part.count(f"| `{row.removeprefix(prefix)}` | ")
        assert found == 1, key


def parts_of(page: str, heading: str) -> list[str]:
    """The section of a command, and each of the shared parts."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    (own,) = [each for each in sections if each.startswith(heading)]
    (shared,) = [each for each in sections if each.startswith("Shared parts")]
    return [own, *re.split(r"^### ", shared, flags=re.MULTILINE)[1:]]


def test_a_shared_part_is_linked_with_what_is_different_there() -> None:
    page = render()
    assert "* `population.`: [Population](#population)\n" in page
    assert "* `members.`: [Members](#members); here `split` is `train`\n" in page
    assert "### Members\n" in page


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_that_takes_settings_is_on_the_page(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser([verb]).parse_args([verb, "--help"])
    takes_settings = "--set KEY=VALUE" in capsys.readouterr().out
    assert (f"## `esper {verb}`\n" in render()) == takes_settings


def test_a_line_says_type_range_default_and_meaning() -> None:
    assert (
        "| `growth.training.momentum` | a number, at least 0.0 and at most 0.9999 | `0.9` | "
        "Momentum of SGD; the first beta of AdamW. |"
    ) in render()
