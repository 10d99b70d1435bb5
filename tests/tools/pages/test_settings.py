from __future__ import annotations

import pytest

from esper.lab.proof.prove import ProveConfig
from esper.lab.proof.search import SearchConfig
from esper.lab.tasks.request import GrowSettings
from esper.leyline.config import Config
from esper.scripts.cli.main import VERBS, build_parser
from esper.simic.training.config import TrainConfig
from esper.utils.settings import flat_settings
from tools.pages.settings import render


@pytest.mark.parametrize(
    "config", [GrowSettings(task="digits"), TrainConfig(), SearchConfig(), ProveConfig()]
)
def test_every_key_of_config_yaml_is_on_the_page(config: Config) -> None:
    page = render()
    for key in flat_settings(config.to_mapping()):
        assert f"| `{key}` | " in page, key


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
