"""`simplified`: shaping, a small cost of acting, and a bonus at the end."""

from __future__ import annotations

from esper.simic.rewards.composed import ComposedReward
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.registry import register_reward
from esper.simic.rewards.terms.governor import rollback
from esper.simic.rewards.terms.operations import any_action
from esper.simic.rewards.terms.potentials import pbrs
from esper.simic.rewards.terms.terminal import simplified_terminal


@register_reward("simplified")
def make_simplified(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    return ComposedReward(
        config,
        {
            "pbrs": pbrs,
            "action": any_action,
            "terminal": simplified_terminal,
            "rollback": rollback,
        },
        settled=("pbrs", "rollback"),
        ablations=("disable_pbrs", "disable_terminal_reward"),
    )
