"""`twin`: the gain over a twin that only waits, less a rent for the parameters added."""

from __future__ import annotations

from esper.simic.rewards.composed import ComposedReward, Term
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.registry import register_reward
from esper.simic.rewards.terms.gain import describe_gain, follow_gain, gain, gain_potential
from esper.simic.rewards.terms.governor import twin_rollback
from esper.simic.rewards.terms.hindsight import describe_hindsight, follow_scaffolds, hindsight
from esper.simic.rewards.terms.rent import twin_rent
from esper.simic.rewards.terms.terminal import open_seeds


@register_reward("twin")
def make_twin(config: RewardConfig) -> ComposedReward:
    """Return the reward; hindsight credit is always recorded, and paid if the config says so."""
    terms: dict[str, Term] = {
        "gain": gain,
        "rent": twin_rent,
        "terminal": open_seeds,
        "rollback": twin_rollback,
    }
    if config.pay_hindsight:
        terms["hindsight"] = hindsight
    return ComposedReward(
        config,
        terms,
        updates=(follow_gain, follow_scaffolds),
        details=(describe_gain, describe_hindsight),
        settled=("gain", "rollback"),
        potential=gain_potential,
        needs_twin=True,
    )
