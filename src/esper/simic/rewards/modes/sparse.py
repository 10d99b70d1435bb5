"""`sparse`: nothing until the end, then the score of what was fossilized."""

from __future__ import annotations

from esper.simic.rewards.composed import ComposedReward
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.registry import register_reward
from esper.simic.rewards.terms.governor import rollback
from esper.simic.rewards.terms.terminal import committed_terminal


@register_reward("sparse")
def make_sparse(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    terms = {"terminal": committed_terminal, "rollback": rollback}
    return ComposedReward(config, terms, settled=("rollback",))
