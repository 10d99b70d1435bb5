"""The modes: rewards made of terms. Importing this module registers them by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import CheckpointError, ConfigError, UsageError
from esper.leyline.signals import Signals
from esper.simic.rewards import attribution, costs, gain, operations
from esper.simic.rewards import costs as hindsight
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.contract import (
    Changes,
    Memory,
    RewardStep,
    StepView,
    Transition,
    follow_seeds,
    register_reward,
    start_memory,
)

Term = Callable[[StepView], Tensor]
Update = Callable[[StepView], Changes]
Details = Callable[[StepView], Mapping[str, Tensor]]

REMOVED_TERMS: dict[str, str] = {
    "disable_pbrs": "pbrs",
    "disable_terminal_reward": "terminal",
    "disable_anti_gaming": "shock",
}
"""The terms that ablation switches remove; the terms themselves read what else a switch changes."""

SWITCHES = (*REMOVED_TERMS, "disable_timing_discount")
"""Every ablation switch."""


class ComposedReward:
    """Pays the sum of its terms.

    Args:
        config: the constants.
        terms: what is paid, by the name it is recorded under.
        updates: what is remembered beside the seeds' own story.
        details: what explains the terms beside the seeds' counts.
        settled: the terms that are due even where a rollback replaces everything else.
        ablations: the ablation switches that mean something for this mode.
        potential: what the terms pay the change of, where it is measured and not learned.
        needs_twin: whether twin scores must be there.
    """

    def __init__(
        self,
        config: RewardConfig,
        terms: Mapping[str, Term],
        *,
        updates: Iterable[Update] = (),
        details: Iterable[Details] = (),
        settled: Iterable[str] = (),
        ablations: Iterable[str] = (),
        potential: Term | None = None,
        needs_twin: bool = False,
    ) -> None:
        self.config = config
        self.needs_twin = needs_twin
        self._terms = _without_disabled(config, terms, tuple(ablations))
        self._updates = (follow_seeds, *updates)
        self._details = (attribution.describe_seeds, *details)
        self._settled = frozenset(settled)
        self._potential = potential
        self._memory: Memory | None = None

    @property
    def term_names(self) -> tuple[str, ...]:
        """The names of all terms, in the order in which they are summed."""
        return tuple(self._terms)

    def reset(self, signals: Signals) -> None:
        """Forget everything: an episode starts in every row with these first signals."""
        self._memory = start_memory(
            signals, keeps_boosts=hindsight.follow_scaffolds in self._updates
        )

    def step(self, transition: Transition) -> RewardStep:
        """Return what the step paid in every row, and remember what later steps need."""
        if self._memory is None:
            raise UsageError("the reward has seen no episode start; call reset(signals) first")
        device = transition.active.device
        memory = self._memory if self._memory.device == device else self._memory.to(device)
        view = StepView(transition, memory, self.config)
        terms = {name: self._pay(name, term, view) for name, term in self._terms.items()}
        details: dict[str, Tensor] = {}
        for explain in self._details:
            details |= explain(view)
        details |= attribution.share_of_shaping(terms)
        changes: Changes = {}
        for update in self._updates:
            changes |= view.once(update)
        self._memory = dataclasses.replace(memory, **changes)
        potential = None if self._potential is None else view.once(self._potential)
        return RewardStep(terms=terms, potential=potential, details=details)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain data and tensors."""
        memory = {} if self._memory is None else self._memory.state_dict()
        return {"mode": self.config.mode, "memory": memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state.get("mode") != self.config.mode:
            raise CheckpointError(
                f"this is the memory of the reward {state.get('mode')!r}; "
                f"this reward is {self.config.mode!r}"
            )
        self._memory = Memory.from_state_dict(state["memory"]) if state["memory"] else None

    def _pay(self, name: str, term: Term, view: StepView) -> Tensor:
        """Return what a term pays: nothing in rows that are over, nor for a rolled-back step."""
        counts = view.transition.active
        if name not in self._settled:
            counts = counts & ~view.rolled_back
        return torch.where(counts, view.once(term), 0.0)


def _without_disabled(
    config: RewardConfig, terms: Mapping[str, Term], ablations: tuple[str, ...]
) -> dict[str, Term]:
    """Return the terms that are left after the ablations the configuration asks for."""
    asked = [switch for switch in SWITCHES if getattr(config, switch)]
    for switch in asked:
        if switch not in ablations:
            raise ConfigError(
                f"{switch} means nothing for the reward {config.mode!r}; leave it off "
                f"(it has {', '.join(ablations) or 'no ablations'})"
            )
    removed = {REMOVED_TERMS.get(switch) for switch in asked}
    return {name: term for name, term in terms.items() if name not in removed}


@register_reward("basic")
def make_basic(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    terms = {"gain": gain.score_change, "rent": costs.budget_rent, "rollback": costs.rollback}
    return ComposedReward(config, terms, settled=("rollback",))


SHAPED_TERMS: dict[str, Term] = {
    "attribution": attribution.attribution,
    "blending": operations.blending,
    "holding": operations.holding,
    "pbrs": gain.pbrs,
    "synergy": attribution.synergy,
    "rent": costs.rent,
    "shock": costs.shock,
    "occupancy": costs.occupancy,
    "first_germination": operations.first_germination,
    "clawback": operations.clawback,
    "action": operations.action,
    "terminal": gain.terminal,
    "auto_prune": costs.auto_prune,
    "hindsight": hindsight.hindsight,
    "rollback": costs.rollback,
}
"""Every term, in the order in which they are summed."""

SETTLED = ("pbrs", "clawback", "auto_prune", "hindsight", "rollback")
"""What is due at the end of an episode even where it ends in a rollback."""


_CREDITED = (attribution.describe_attribution, hindsight.describe_hindsight)
_FOLLOWED = (operations.follow_first_germination, hindsight.follow_scaffolds)


@register_reward("shaped")
def make_shaped(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    return ComposedReward(
        config,
        SHAPED_TERMS,
        updates=(attribution.follow_attribution, *_FOLLOWED),
        details=_CREDITED,
        settled=SETTLED,
        ablations=SWITCHES,
    )


@register_reward("escrow")
def make_escrow(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    own = {"attribution": attribution.escrow_attribution, "escrow": attribution.escrow}
    return ComposedReward(
        config,
        {**SHAPED_TERMS, **own},
        updates=(attribution.follow_balances, *_FOLLOWED),
        details=_CREDITED,
        settled=(*SETTLED, "escrow"),
        ablations=tuple(REMOVED_TERMS),
    )


@register_reward("loss")
def make_loss(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    return ComposedReward(
        config,
        {
            "gain": gain.loss_change,
            "pbrs": gain.loss_pbrs,
            "rent": costs.growth_rent,
            "terminal": gain.loss_terminal,
            "rollback": costs.rollback,
        },
        settled=("pbrs", "rollback"),
        ablations=("disable_pbrs", "disable_terminal_reward"),
    )


@register_reward("minimal")
def make_minimal(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    terms = {
        "action": operations.early_prune,
        "terminal": gain.committed_terminal,
        "rollback": costs.rollback,
    }
    return ComposedReward(config, terms, settled=("rollback",))


@register_reward("simplified")
def make_simplified(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    return ComposedReward(
        config,
        {
            "pbrs": gain.pbrs,
            "action": operations.any_action,
            "terminal": gain.simplified_terminal,
            "rollback": costs.rollback,
        },
        settled=("pbrs", "rollback"),
        ablations=("disable_pbrs", "disable_terminal_reward"),
    )


@register_reward("sparse")
def make_sparse(config: RewardConfig) -> ComposedReward:
    """Return the reward."""
    terms = {"terminal": gain.committed_terminal, "rollback": costs.rollback}
    return ComposedReward(config, terms, settled=("rollback",))


@register_reward("twin")
def make_twin(config: RewardConfig) -> ComposedReward:
    """Return the reward; hindsight credit is always recorded, and paid if the config says so."""
    terms: dict[str, Term] = {
        "gain": gain.gain,
        "rent": costs.twin_rent,
        "terminal": gain.open_seeds,
        "rollback": costs.twin_rollback,
    }
    if config.pay_hindsight:
        terms["hindsight"] = hindsight.hindsight
    return ComposedReward(
        config,
        terms,
        updates=(gain.follow_gain, hindsight.follow_scaffolds),
        details=(gain.describe_gain, hindsight.describe_hindsight),
        settled=("gain", "rollback"),
        potential=gain.gain_potential,
        needs_twin=True,
    )
