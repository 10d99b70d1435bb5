import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import esper
from esper.leyline.errors import UnknownNameError, UsageError
from esper.simic.rewards import (
    REWARDS,
    ComposedReward,
    RewardConfig,
    make_reward,
    register_reward,
)

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "add-a-reward.md"


@pytest.fixture
def name() -> Iterator[str]:
    yield "my_reward"
    if "my_reward" in REWARDS:
        REWARDS.unregister("my_reward")


def test_a_class_of_ones_own_is_found_by_name(name: str) -> None:
    @esper.register_reward(name)
    class Mine(ComposedReward):
        def __init__(self, config: RewardConfig) -> None:
            super().__init__(config, {"gain": lambda view: view.after.val_score})

    assert isinstance(make_reward(RewardConfig(mode=name)), Mine)


def test_a_class_that_is_no_reward_is_refused(name: str) -> None:
    class Half:
        def __init__(self, config: RewardConfig) -> None:
            pass

        def reset(self, signals: object) -> None:
            pass

    with pytest.raises(UsageError, match="missing step, state_dict, load_state_dict"):
        register_reward(name)(Half)  # type: ignore[type-var]
    with pytest.raises(UsageError, match="must be a class or a function"):
        register_reward(name)(3)  # type: ignore[type-var]


def test_an_unknown_mode_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'shaped'"):
        make_reward(RewardConfig(mode="shapd"))


def test_the_how_to_page_works_as_it_is_written() -> None:
    blocks = re.findall(r"```python\n(.*?)```", HOW_TO.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 2
    try:
        exec("\n".join(blocks), {"__name__": "my_package.record_breaker"})
        assert "record_breaker" in REWARDS
    finally:
        REWARDS.unregister("record_breaker")
