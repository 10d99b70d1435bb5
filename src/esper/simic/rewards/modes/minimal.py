"""`minimal`: as `sparse`, with a cost of pruning seeds too young to be judged."""

from __future__ import annotations

from esper.simic.rewards.composed import ComposedReward
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.registry import register_reward
from esper.simic.rewards.terms.governor import rollback
from esper.simic.rewards.terms.operations import early_prune
from esper.simic.rewards.terms.terminal import committed_terminal


@register_reward("minimal")
def make_minimal(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    terms = {"action": early_prune, "terminal": committed_terminal, "rollback": rollback}
    return ComposedReward(config, terms, settled=("rollback",))
