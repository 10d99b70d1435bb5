"""`escrow`: as `shaped`, but a seed's credit is only kept by fossilizing it."""

from __future__ import annotations

from esper.simic.rewards.composed import REMOVED_TERMS, ComposedReward
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.modes.shaped import SETTLED, SHAPED_TERMS
from esper.simic.rewards.registry import register_reward
from esper.simic.rewards.terms.details import describe_attribution
from esper.simic.rewards.terms.escrow import escrow, escrow_attribution, follow_balances
from esper.simic.rewards.terms.germination import follow_first_germination
from esper.simic.rewards.terms.hindsight import describe_hindsight, follow_scaffolds


@register_reward("escrow")
def make_escrow(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    return ComposedReward(
        config,
        {**SHAPED_TERMS, "attribution": escrow_attribution, "escrow": escrow},
        updates=(follow_balances, follow_first_germination, follow_scaffolds),
        details=(describe_attribution, describe_hindsight),
        settled=(*SETTLED, "escrow"),
        ablations=tuple(REMOVED_TERMS),
    )
