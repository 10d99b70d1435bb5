"""Rewards by name: `register_reward` adds one, `make_reward` builds one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from esper.leyline.errors import UsageError
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.contract import REWARDS, Reward, RewardFactory

F = TypeVar("F", bound=RewardFactory)

_METHODS = ("reset", "step", "state_dict", "load_state_dict")


def register_reward(name: str) -> Callable[[F], F]:
    """Make the decorated class or function available as the mode `name`.

    It is called with a `RewardConfig` and gives a `Reward`.
    """

    def decorate(factory: F) -> F:
        if not callable(factory):
            raise UsageError(
                f"reward {name!r} must be a class or a function that takes a RewardConfig, "
                f"got {factory!r}"
            )
        if isinstance(factory, type):
            missing = [m for m in _METHODS if not callable(getattr(factory, m, None))]
            if missing:
                raise UsageError(
                    f"reward {name!r} must have the methods {', '.join(_METHODS)}; "
                    f"missing {', '.join(missing)}"
                )
        REWARDS.register(name, factory)
        return factory

    return decorate


def make_reward(config: RewardConfig) -> Reward:
    """Return the reward the configuration asks for; call its `reset` before the first step."""
    return REWARDS.get(config.mode)(config)
