"""`basic`: change of the score, less the parameters in use."""

from __future__ import annotations

from esper.simic.rewards.composed import ComposedReward
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.registry import register_reward
from esper.simic.rewards.terms.gain import score_change
from esper.simic.rewards.terms.governor import rollback
from esper.simic.rewards.terms.rent import budget_rent


@register_reward("basic")
def make_basic(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    terms = {"gain": score_change, "rent": budget_rent, "rollback": rollback}
    return ComposedReward(config, terms, settled=("rollback",))
