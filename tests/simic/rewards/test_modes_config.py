import dataclasses
import re
from pathlib import Path

import pytest

from esper.leyline.config import Config
from esper.leyline.errors import ConfigError
from esper.simic.rewards import (
    REWARDS,
    RewardConfig,
    check_gamma,
)
from esper.simic.rewards.modes import SHAPED_TERMS, LossConfig
from tests.simic.rewards.stories import Story

PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"


def constants(config: Config, prefix: str = "") -> dict[str, object]:
    """Every number, switch and choice by its dotted name."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Config):
            found |= constants(value, f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = value
    return found


def test_the_rewards_gamma_must_be_the_learners() -> None:
    check_gamma(RewardConfig(), 0.995)
    with pytest.raises(ConfigError, match=r"reward\.gamma is 0\.995 and ppo\.gamma is 0\.99;"):
        check_gamma(RewardConfig(), 0.99)


def test_a_target_loss_above_chance_is_refused() -> None:
    with pytest.raises(ConfigError, match="target must be below"):
        LossConfig(baseline=1.0, target=2.0)


def test_configurations_survive_plain_data() -> None:
    config = RewardConfig(mode="shaped", combination="geometric", gamma=0.9)
    assert RewardConfig.from_mapping(config.to_mapping()) == config


def test_the_page_lists_every_constant_with_its_default_and_meaning() -> None:
    row = re.compile(r"^\| `([a-z_.]+)` \| `([^`]*)` \| (.*) \|$", re.MULTILINE)
    listed = row.findall(PAGE.read_text("utf-8"))
    config = RewardConfig()
    assert listed == [
        (name, str(value), sentence(config, name)) for name, value in constants(config).items()
    ]


def sentence(config: Config, name: str) -> str:
    *path, last = name.split(".")
    for part in path:
        config = getattr(config, part)
    return type(config).describe()[last]


def test_the_page_names_every_mode_with_its_terms() -> None:
    text = PAGE.read_text("utf-8")
    for mode in REWARDS:
        terms = Story(RewardConfig(mode=mode)).wait().terms
        line = re.search(rf"^\| `{mode}` \| (.*?) \|", text, re.MULTILINE)
        assert line is not None
        named = {"escrow": ", ".join((*SHAPED_TERMS, "escrow"))}.get(mode, line[1])
        assert named.split(" (")[0].split(", ") == list(terms)
