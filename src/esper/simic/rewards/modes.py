"""The modes: choices of terms. Importing this module registers them by name."""

from __future__ import annotations

from esper.simic.rewards.composed import REMOVED_TERMS, SWITCHES, ComposedReward, Term
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.contract import register_reward
from esper.simic.rewards.terms.attribution import (
    attribution,
    describe_attribution,
    escrow,
    escrow_attribution,
    follow_attribution,
    follow_balances,
    synergy,
)
from esper.simic.rewards.terms.costs import (
    action,
    any_action,
    auto_prune,
    blending,
    budget_rent,
    clawback,
    early_prune,
    first_germination,
    follow_first_germination,
    growth_rent,
    holding,
    occupancy,
    rent,
    rollback,
    shock,
    twin_rent,
    twin_rollback,
)
from esper.simic.rewards.terms.gain import (
    committed_terminal,
    describe_gain,
    follow_gain,
    gain,
    gain_potential,
    loss_change,
    loss_pbrs,
    loss_terminal,
    open_seeds,
    pbrs,
    score_change,
    simplified_terminal,
    terminal,
)
from esper.simic.rewards.terms.hindsight import describe_hindsight, follow_scaffolds, hindsight


@register_reward("basic")
def make_basic(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    terms = {"gain": score_change, "rent": budget_rent, "rollback": rollback}
    return ComposedReward(config, terms, settled=("rollback",))


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


@register_reward("minimal")
def make_minimal(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    terms = {"action": early_prune, "terminal": committed_terminal, "rollback": rollback}
    return ComposedReward(config, terms, settled=("rollback",))


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


@register_reward("sparse")
def make_sparse(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    terms = {"terminal": committed_terminal, "rollback": rollback}
    return ComposedReward(config, terms, settled=("rollback",))


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
