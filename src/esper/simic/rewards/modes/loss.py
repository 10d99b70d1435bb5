"""`loss`: falls of the loss, shaping, rent, and how far the loss has come at the end."""

from __future__ import annotations

from esper.simic.rewards.composed import ComposedReward
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.registry import register_reward
from esper.simic.rewards.terms.gain import loss_change
from esper.simic.rewards.terms.governor import rollback
from esper.simic.rewards.terms.potentials import loss_pbrs
from esper.simic.rewards.terms.rent import growth_rent
from esper.simic.rewards.terms.terminal import loss_terminal


@register_reward("loss")
def make_loss(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    return ComposedReward(
        config,
        {
            "gain": loss_change,
            "pbrs": loss_pbrs,
            "rent": growth_rent,
            "terminal": loss_terminal,
            "rollback": rollback,
        },
        settled=("pbrs", "rollback"),
        ablations=("disable_pbrs", "disable_terminal_reward"),
    )
