from __future__ import annotations

from typing import Any

import pytest

from esper.leyline.errors import ConfigError, UsageError
from esper.simic.training.config import StageConfig, TrainConfig, compare_settings
from esper.utils.settings import change_settings, parse_settings
from tests.simic.training.tiny import tiny_config


def test_an_episode_has_one_epoch_before_its_first_decision() -> None:
    assert tiny_config(episode_length=8).epochs == 9


def test_without_a_curriculum_there_is_one_stage() -> None:
    assert [stage.tasks for stage in tiny_config(tasks=("a", "b")).stages] == [("a", "b")]


def test_a_curriculum_survives_being_written_down() -> None:
    stages = (StageConfig(tasks=("a",), rounds=3), StageConfig(tasks=("b",)))
    config = tiny_config(curriculum=stages)
    assert config.stages == stages
    assert TrainConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tasks": ()}, "at least one task"),
        ({"curriculum": (StageConfig(tasks=("a",)), StageConfig(tasks=("b",)))}, "never ends"),
        ({"reward": tiny_config().reward.replace(gamma=0.9)}, "gamma"),
        ({"rows": 0}, "at least 1"),
        ({"horizon": "forever"}, "one of 'terminate', 'bootstrap'"),
    ],
)
def test_a_run_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_config(**changes)


def test_a_stage_needs_a_task() -> None:
    with pytest.raises(ConfigError, match="at least one task"):
        StageConfig(tasks=())


def test_settings_reach_every_depth() -> None:
    config = change_settings(
        tiny_config(),
        parse_settings(
            ["rounds=9", "ppo.clip=0.1", "ppo.exploration.sparse_entropy=0.5", "tasks=[digits]"]
        ),
    )
    assert (config.rounds, config.ppo.clip) == (9, 0.1)
    assert config.ppo.exploration.sparse_entropy == 0.5
    assert config.tasks == ("digits",)


def test_a_mapping_changes_a_part_of_what_is_nested() -> None:
    before = tiny_config()
    config = change_settings(before, {"ppo": {"clip": 0.1, "exploration": {"op_curiosity": 0.5}}})
    assert (config.ppo.clip, config.ppo.exploration.op_curiosity) == (0.1, 0.5)
    assert config.ppo.epochs == before.ppo.epochs
    with pytest.raises(ConfigError, match=r"no setting 'ppo\.clp'.*did you mean 'clip'"):
        change_settings(before, {"ppo": {"clp": 0.1}})


def test_there_is_one_discount() -> None:
    with pytest.raises(ConfigError, match=r"TrainConfig.ppo must be"):
        change_settings(tiny_config(), parse_settings(["ppo=text"]))
    config = change_settings(tiny_config(), parse_settings(["ppo.gamma=0.9"]))
    assert config.ppo.gamma == config.reward.gamma == 0.9


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("ppo.clp=1", "no setting 'ppo.clp'.*did you mean 'clip'"),
        ("clip=1", "no setting 'clip'; its whole name is ppo.clip$"),
        ("ppo.sparse_entropy=1", "its whole name is ppo.exploration.sparse_entropy$"),
        ("ppo.clip.low=1", "clip has no parts"),
        ("ppo.clip", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("ppo.clip=lots", "PPOConfig.clip must be a number, got 'lots'"),
        ("ppo.clip=[", "cannot be read"),
        ("rounds=0", "at least 1"),
    ],
)
def test_a_setting_that_cannot_be_is_explained(setting: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        change_settings(tiny_config(), parse_settings([setting]))


def test_nothing_changed_is_no_change() -> None:
    changes = compare_settings(tiny_config(), tiny_config(recipe="other"))
    assert not changes
    assert changes.describe() == "nothing"


@pytest.mark.parametrize(
    "setting",
    ["seed=9", "rows=8", "episode_length=3", "policy.lstm_hidden_dim=16", "policy.critic=state"],
)
def test_what_makes_a_run_stays(setting: str) -> None:
    changed = change_settings(tiny_config(), parse_settings([setting]))
    with pytest.raises(ConfigError, match=rf"^{setting.partition('=')[0]} .*start a new run"):
        compare_settings(tiny_config(), changed)


@pytest.mark.parametrize(
    ("setting", "restarts"),
    [
        ("ppo.entropy_coef=0.2", False),
        ("rounds=50", False),
        ("policy.floor.op=0.1", False),
        ("population.workers=2", False),
        ("reward.twin.own_share=0.5", True),
        ("population.lifecycle.rules.min_prune_age=6", True),
        ("tasks=[digits]", True),
        ("recorded_rows=1", True),
    ],
)
def test_a_round_is_played_again_where_it_is_another(setting: str, restarts: bool) -> None:
    key = setting.partition("=")[0]
    changes = compare_settings(
        tiny_config(), change_settings(tiny_config(), parse_settings([setting]))
    )
    assert list(changes.settings) == [key]
    assert changes.restarts_round == restarts
    assert key in changes.describe()
