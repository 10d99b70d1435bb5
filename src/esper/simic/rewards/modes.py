"""Reward modes, each a sum of terms. Importing this module registers them by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.leyline.config import Config, option
from esper.leyline.controller import DEFAULT_GAMMA
from esper.leyline.errors import CheckpointError, ConfigError, UsageError
from esper.leyline.signals import Signals
from esper.simic.rewards import attribution, terms
from esper.simic.rewards.attribution import Combination
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

# ---- Settings


@dataclass(frozen=True, kw_only=True)
class TwinConfig(Config):
    """Mode `twin`: the gain over a twin that does not grow."""

    own_share: float = option(
        0.4,
        "Weight of a row's own twin in its baseline; the rest is the mean of its task's twins. "
        "With 1, and until 8 other twins are known, only the own twin counts.",
        minimum=0.0,
        maximum=1.0,
    )
    rent_points: float = option(
        0.5, "Cost in points of doubling the parameters for a whole episode.", minimum=0.0
    )
    flop_rent_points: float = option(
        0.0,
        "Cost in points of doubling the operations per sample for a whole episode.",
        minimum=0.0,
    )
    open_seed_cost: float = option(
        0.1, "Cost of a seed that is neither fossilized nor removed at the end.", minimum=0.0
    )


@dataclass(frozen=True, kw_only=True)
class SparseConfig(Config):
    """Modes `sparse` and `minimal`: only the end of an episode counts."""

    scale: float = option(1.0, "Factor of the final reward (0.5 for text).", above=0.0)


@dataclass(frozen=True, kw_only=True)
class LossConfig(Config):
    """Mode `loss`: the loss instead of the score, as in the documents for images and text."""

    typical_change: float = option(
        0.05, "Typical change of the loss in an epoch (0.15 for text).", above=0.0
    )
    rent_weight: float = option(
        0.05, "Factor of the logarithm of the growth (0.01 for text).", minimum=0.0
    )
    baseline: float = option(2.3, "Loss of an untrained network (10.8 for text).")
    target: float = option(0.3, "Loss that counts as solved (3.5 for text).")

    def __post_init__(self) -> None:
        """Check that the target is below chance."""
        super().__post_init__()
        if self.target >= self.baseline:
            raise ConfigError(
                f"LossConfig.target must be below LossConfig.baseline ({self.baseline}), "
                f"got {self.target}"
            )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Config):
    """Settings of the reward."""

    mode: str = option(
        "twin", "twin, shaped, escrow, sparse, minimal, basic, simplified, loss or a plug-in."
    )
    gamma: float = option(
        DEFAULT_GAMMA, "Discount of potentials and credits; the learner's.", above=0.0, maximum=1.0
    )
    combination: Combination = option(
        "harmonic",
        "`shaped`: mean of contribution and progress that bounds a contribution above the "
        "progress: harmonic, geometric or minimum.",
    )
    pay_hindsight: bool = option(
        False, "`twin`: whether the recorded hindsight credit is also paid."
    )
    disable_pbrs: bool = option(False, "Ablation: no stage potentials.")
    disable_terminal_reward: bool = option(False, "Ablation: no reward at the end.")
    disable_anti_gaming: bool = option(False, "Ablation: no ransomware penalty, no shock.")
    disable_timing_discount: bool = option(False, "Ablation: early seeds count in full.")
    twin: TwinConfig = option(TwinConfig, "Mode `twin`.")
    sparse: SparseConfig = option(SparseConfig, "Modes `sparse` and `minimal`.")
    loss: LossConfig = option(LossConfig, "Mode `loss`.")


def check_gamma(config: RewardConfig, gamma: float) -> None:
    """Raise unless the reward has the learner's discount."""
    if config.gamma != gamma:
        raise ConfigError(
            f"reward.gamma is {config.gamma} and ppo.gamma is {gamma}; they must be equal, so set "
            f"reward.gamma={gamma}"
        )


Term = Callable[[StepView], Tensor]
Update = Callable[[StepView], Changes]
Details = Callable[[StepView], Mapping[str, Tensor]]

REMOVED_TERMS: dict[str, str] = {
    "disable_pbrs": "pbrs",
    "disable_terminal_reward": "terminal",
    "disable_anti_gaming": "shock",
}
"""The terms that ablation switches remove; other effects of a switch are in the terms."""

SWITCHES = (*REMOVED_TERMS, "disable_timing_discount")
"""Every ablation switch."""


class ComposedReward:
    """A reward that is the sum of its terms.

    Args:
        config: the settings.
        terms: functions that compute the terms, by the name under which they are recorded.
        updates: functions that update the memory, besides `follow_seeds`.
        details: functions that return recorded details, besides counts of seeds.
        settled: terms that are paid even in a step that is rolled back.
        ablations: ablation switches that this mode supports.
        potential: the measured potential whose change the terms pay, if any.
        needs_twin: whether scores of twins are required.
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

    def reset(self, signals: Signals) -> None:
        """Clear the memory; an episode starts in every row with these signals."""
        self._memory = start_memory(
            signals, keeps_boosts=attribution.follow_scaffolds in self._updates
        )

    def step(self, transition: Transition) -> RewardStep:
        """Return the reward of the step, and update the memory."""
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
                f"the saved state belongs to the reward {state.get('mode')!r}, "
                f"not to {self.config.mode!r}"
            )
        self._memory = Memory.from_state_dict(state["memory"]) if state["memory"] else None

    def _pay(self, name: str, term: Term, view: StepView) -> Tensor:
        """Return a term, 0 in rows that are over, and in rolled-back steps unless settled."""
        counts = view.transition.active
        if name not in self._settled:
            counts = counts & ~view.rolled_back
        return torch.where(counts, view.once(term), 0.0)


def _without_disabled(
    config: RewardConfig, terms: Mapping[str, Term], ablations: tuple[str, ...]
) -> dict[str, Term]:
    """Return the terms without those that the configuration disables."""
    asked = [switch for switch in SWITCHES if getattr(config, switch)]
    for switch in asked:
        if switch not in ablations:
            raise ConfigError(
                f"the reward {config.mode!r} has no ablation {switch}; leave it out "
                f"(it has {', '.join(ablations) or 'none'})"
            )
    removed = {REMOVED_TERMS.get(switch) for switch in asked}
    return {name: term for name, term in terms.items() if name not in removed}


@register_reward("basic")
def make_basic(config: RewardConfig) -> ComposedReward:
    """Return the reward of mode `basic`."""
    paid = {"gain": terms.score_change, "rent": terms.budget_rent, "rollback": terms.rollback}
    return ComposedReward(config, paid, settled=("rollback",))


SHAPED_TERMS: dict[str, Term] = {
    "attribution": attribution.attribution,
    "blending": terms.blending,
    "holding": terms.holding,
    "pbrs": terms.pbrs,
    "synergy": attribution.synergy,
    "rent": terms.rent,
    "shock": terms.shock,
    "occupancy": terms.occupancy,
    "first_germination": terms.first_germination,
    "clawback": terms.clawback,
    "action": terms.action,
    "terminal": terms.terminal,
    "auto_prune": terms.auto_prune,
    "hindsight": attribution.hindsight,
    "rollback": terms.rollback,
}
"""Every term, in the order of summation."""

SETTLED = ("pbrs", "clawback", "auto_prune", "hindsight", "rollback")
"""Terms that are paid at the end of an episode even after a rollback."""


_CREDITED = (attribution.describe_attribution, attribution.describe_hindsight)
_FOLLOWED = (terms.follow_first_germination, attribution.follow_scaffolds)


@register_reward("shaped")
def make_shaped(config: RewardConfig) -> ComposedReward:
    """Return the reward of mode `shaped`."""
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
    """Return the reward of mode `escrow`."""
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
    """Return the reward of mode `loss`."""
    return ComposedReward(
        config,
        {
            "gain": terms.loss_change,
            "pbrs": terms.loss_pbrs,
            "rent": terms.growth_rent,
            "terminal": terms.loss_terminal,
            "rollback": terms.rollback,
        },
        settled=("pbrs", "rollback"),
        ablations=("disable_pbrs", "disable_terminal_reward"),
    )


@register_reward("minimal")
def make_minimal(config: RewardConfig) -> ComposedReward:
    """Return the reward of mode `minimal`."""
    paid = {
        "action": terms.early_prune,
        "terminal": terms.committed_terminal,
        "rollback": terms.rollback,
    }
    return ComposedReward(config, paid, settled=("rollback",))


@register_reward("simplified")
def make_simplified(config: RewardConfig) -> ComposedReward:
    """Return the reward of mode `simplified`."""
    return ComposedReward(
        config,
        {
            "pbrs": terms.pbrs,
            "action": terms.any_action,
            "terminal": terms.simplified_terminal,
            "rollback": terms.rollback,
        },
        settled=("pbrs", "rollback"),
        ablations=("disable_pbrs", "disable_terminal_reward"),
    )


@register_reward("sparse")
def make_sparse(config: RewardConfig) -> ComposedReward:
    """Return the reward of mode `sparse`."""
    paid = {"terminal": terms.committed_terminal, "rollback": terms.rollback}
    return ComposedReward(config, paid, settled=("rollback",))


@register_reward("twin")
def make_twin(config: RewardConfig) -> ComposedReward:
    """Return the reward; hindsight credit is recorded, and paid if `pay_hindsight` is set."""
    paid: dict[str, Term] = {
        "gain": terms.gain,
        "rent": terms.twin_rent,
        "terminal": terms.open_seeds,
        "rollback": terms.twin_rollback,
    }
    if config.pay_hindsight:
        paid["hindsight"] = attribution.hindsight
    return ComposedReward(
        config,
        paid,
        updates=(terms.follow_gain, attribution.follow_scaffolds),
        details=(terms.describe_gain, attribution.describe_hindsight),
        settled=("gain", "rollback"),
        potential=terms.gain_potential,
        needs_twin=True,
    )
