from __future__ import annotations

from typing import Any

import pytest

from esper.leyline.errors import ConfigError
from esper.simic.training.config import StageConfig, TrainConfig
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
