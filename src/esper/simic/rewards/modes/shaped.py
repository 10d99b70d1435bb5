"""`shaped`: dense attribution with its guards, shaping, costs, and a bonus at the end."""

from __future__ import annotations

from esper.simic.rewards.composed import SWITCHES, ComposedReward, Term
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.registry import register_reward
from esper.simic.rewards.terms.attribution import attribution, follow_attribution
from esper.simic.rewards.terms.details import describe_attribution
from esper.simic.rewards.terms.germination import (
    clawback,
    first_germination,
    follow_first_germination,
)
from esper.simic.rewards.terms.governor import auto_prune, rollback
from esper.simic.rewards.terms.hindsight import describe_hindsight, follow_scaffolds, hindsight
from esper.simic.rewards.terms.operations import action
from esper.simic.rewards.terms.potentials import pbrs
from esper.simic.rewards.terms.rent import occupancy, rent
from esper.simic.rewards.terms.shock import shock
from esper.simic.rewards.terms.stage_warnings import blending, holding
from esper.simic.rewards.terms.synergy import synergy
from esper.simic.rewards.terms.terminal import terminal

SHAPED_TERMS: dict[str, Term] = {
    "attribution": attribution,
    "blending": blending,
    "holding": holding,
    "pbrs": pbrs,
    "synergy": synergy,
    "rent": rent,
    "shock": shock,
    "occupancy": occupancy,
    "first_germination": first_germination,
    "clawback": clawback,
    "action": action,
    "terminal": terminal,
    "auto_prune": auto_prune,
    "hindsight": hindsight,
    "rollback": rollback,
}
"""Every term, in the order in which they are summed."""

SETTLED = ("pbrs", "clawback", "auto_prune", "hindsight", "rollback")
"""What is due at the end of an episode even where it ends in a rollback."""


@register_reward("shaped")
def make_shaped(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    return ComposedReward(
        config,
        SHAPED_TERMS,
        updates=(follow_attribution, follow_first_germination, follow_scaffolds),
        details=(describe_attribution, describe_hindsight),
        settled=SETTLED,
        ablations=SWITCHES,
    )
