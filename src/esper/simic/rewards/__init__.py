"""Rewards: composable terms and the modes made of them.

Importing this package registers every built-in mode by name.
"""

from __future__ import annotations

from esper.simic.rewards import modes
from esper.simic.rewards.contract import (
    REWARDS,
    Reward,
    RewardStep,
    Transition,
    make_reward,
    register_reward,
)
from esper.simic.rewards.modes import ComposedReward, RewardConfig, check_gamma

__all__ = [
    "REWARDS",
    "ComposedReward",
    "Reward",
    "RewardConfig",
    "RewardStep",
    "Transition",
    "check_gamma",
    "make_reward",
    "modes",
    "register_reward",
]
