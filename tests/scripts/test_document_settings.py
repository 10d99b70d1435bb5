from __future__ import annotations

from pathlib import Path

import pytest

from esper.cli.main import VERBS, build_parser
from esper.leyline.config import Config
from esper.leyline.settings import flat_settings
from esper.proof.prove import ProveConfig
from esper.proof.search import SearchConfig
from esper.runs.request import GrowRequest
from esper.scripts.document_settings import PAGE, main, render
from esper.simic.training.config import TrainConfig

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert page == render(), "run python -m esper.scripts.document_settings"


@pytest.mark.parametrize(
    "config", [GrowRequest(task="digits"), TrainConfig(), SearchConfig(), ProveConfig()]
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


def test_the_page_is_written_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "settings.md"
    assert main(["--check", "--out", str(out)]) == 1
    assert main(["--out", str(out)]) == 0
    assert main(["--check", "--out", str(out)]) == 0
    assert "is current" in capsys.readouterr().out
