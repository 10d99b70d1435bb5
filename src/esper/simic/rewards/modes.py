"""The modes: rewards made of terms. Importing this module registers them by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import CheckpointError, ConfigError, UsageError
from esper.leyline.signals import Signals
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.contract import RewardStep, Transition, register_reward
from esper.simic.rewards.terms.attribution import (
    attribution,
    describe_attribution,
    describe_seeds,
    escrow,
    escrow_attribution,
    follow_attribution,
    follow_balances,
    share_of_shaping,
    synergy,
)
from esper.simic.rewards.terms.costs import (
    auto_prune,
    budget_rent,
    growth_rent,
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
from esper.simic.rewards.terms.hindsight import (
    describe_hindsight,
    follow_scaffolds,
    hindsight,
)
from esper.simic.rewards.terms.operations import (
    action,
    any_action,
    blending,
    clawback,
    early_prune,
    first_germination,
    follow_first_germination,
    holding,
)
from esper.simic.rewards.view import Changes, Memory, StepView, follow_seeds, start_memory

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
        self._details = (describe_seeds, *details)
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
            signals,
            final_epochs=self.config.twin.final_epochs,
            keeps_boosts=follow_scaffolds in self._updates,
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
        details |= share_of_shaping(terms)
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
