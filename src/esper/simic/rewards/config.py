"""What can be set about the rewards: one configuration, nested by term and by mode.

The settings of a term lie beside it, as do its constants; those of a mode, which several terms
read, are here. The defaults of `shaped` and its relatives are those of 10 January 2026;
`december_config` gives those of 30 December 2025, so what differs between the two can be set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from esper.leyline.config import Config, option
from esper.leyline.controller import DEFAULT_GAMMA
from esper.leyline.errors import ConfigError
from esper.simic.rewards.attribution import AttributionConfig, TimingConfig
from esper.simic.rewards.costs import OccupancyConfig, RentConfig, ShockConfig
from esper.simic.rewards.gain import TerminalConfig
from esper.simic.rewards.operations import FirstGerminationConfig, OperationConfig, WarningConfig


@dataclass(frozen=True, kw_only=True)
class TwinConfig(Config):
    """The gain over the waiting twin."""

    own_share: float = option(
        0.4,
        "Weight of a row's own twin, beside the mean of its task's twins, in what a row that has "
        "grown is compared with; 1 is the own twin alone, as it is until 8 other twins are known.",
        minimum=0.0,
        maximum=1.0,
    )
    rent_points: float = option(
        0.5, "Points that twice the parameters cost over a whole episode.", minimum=0.0
    )
    flop_rent_points: float = option(
        0.0,
        "Points that twice the operations per sample cost over a whole episode.",
        minimum=0.0,
    )
    open_seed_cost: float = option(
        0.1, "Cost of a seed that is neither fossilized nor gone at the end.", minimum=0.0
    )


@dataclass(frozen=True, kw_only=True)
class SparseConfig(Config):
    """Only the end counts (`sparse`, `minimal`)."""

    scale: float = option(1.0, "Factor of the final reward (0.5 for text).", above=0.0)


@dataclass(frozen=True, kw_only=True)
class LossConfig(Config):
    """The loss instead of the score (`loss`): what the documents have for images and for text."""

    typical_change: float = option(
        0.05, "Typical change of the loss in an epoch (0.15 for text).", above=0.0
    )
    rent_weight: float = option(
        0.05, "Factor of the logarithm of the growth (0.01 for text).", minimum=0.0
    )
    baseline: float = option(2.3, "Loss of a network that knows nothing (10.8 for text).")
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
    """What a controller is paid for."""

    mode: str = option(
        "twin", "twin, shaped, escrow, sparse, minimal, basic, simplified, loss or a plug-in."
    )
    gamma: float = option(
        DEFAULT_GAMMA, "Discount of potentials and credits; the learner's.", above=0.0, maximum=1.0
    )
    pay_hindsight: bool = option(
        False, "`twin`: whether the recorded hindsight credit is also paid."
    )
    disable_pbrs: bool = option(False, "Ablation: no stage potentials.")
    disable_terminal_reward: bool = option(False, "Ablation: nothing at the end.")
    disable_anti_gaming: bool = option(False, "Ablation: no ransomware penalty, no shock.")
    disable_timing_discount: bool = option(False, "Ablation: early seeds count in full.")
    twin: TwinConfig = option(TwinConfig, "The gain over the waiting twin.")
    attribution: AttributionConfig = option(AttributionConfig, "Bounded attribution.")
    timing: TimingConfig = option(TimingConfig, "Seeds germinated early.")
    warning: WarningConfig = option(WarningConfig, "Blending and holding without result.")
    rent: RentConfig = option(RentConfig, "Parameters in use.")
    shock: ShockConfig = option(ShockConfig, "Sudden changes of amplitude.")
    occupancy: OccupancyConfig = option(OccupancyConfig, "Occupied slots.")
    first_germination: FirstGerminationConfig = option(
        FirstGerminationConfig, "The first seed of an episode."
    )
    operation: OperationConfig = option(OperationConfig, "The op itself.")
    terminal: TerminalConfig = option(TerminalConfig, "The end of an episode.")
    sparse: SparseConfig = option(SparseConfig, "Modes `sparse` and `minimal`.")
    loss: LossConfig = option(LossConfig, "Mode `loss`.")


def december_config(**changes: Any) -> RewardConfig:
    """Return `shaped` with the constants of 30 December 2025, and any further changes."""
    december = RewardConfig(
        mode="shaped",
        attribution=AttributionConfig(combination="geometric"),
        timing=TimingConfig(epochs=0),
        warning=WarningConfig(holding_ops="wait"),
        rent=RentConfig(limit=8.0, min_host=0.0),
        shock=ShockConfig(limit=None),
        occupancy=OccupancyConfig(per_seed=0.0, per_fossil=0.0),
        first_germination=FirstGerminationConfig(bonus=0.0),
        operation=OperationConfig(germinate=0.02, prune_harmful=0.3, prune_harmful_age=0),
        terminal=TerminalConfig(fossil_saturation=None),
    )
    return december.replace(**changes)


def check_gamma(config: RewardConfig, gamma: float) -> None:
    """Raise unless potentials and credits are discounted as the learner discounts."""
    if config.gamma != gamma:
        raise ConfigError(
            f"the reward's gamma must be the learner's: reward.gamma is {config.gamma}, "
            f"ppo.gamma is {gamma}; set both alike"
        )
