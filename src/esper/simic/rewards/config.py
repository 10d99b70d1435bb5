"""Every constant of the rewards: one configuration, nested by term.

The defaults of `shaped` and its relatives are those of 10 January 2026; `december_config` gives
those of 30 December 2025. What is paid for what is in `terms/`, which mode has which terms in
`modes/`, and both as a table in docs/rewards.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from esper.leyline.config import Config, option
from esper.leyline.defaults import DEFAULT_GAMMA
from esper.leyline.errors import ConfigError

Combination = Literal["harmonic", "geometric", "minimum"]


@dataclass(frozen=True, kw_only=True)
class TwinConfig(Config):
    """The gain over the waiting twin."""

    scale: float = option(1.0, "Points of gain that pay a reward of 1.", above=0.0)
    own_share: float = option(
        0.4,
        "Weight of a row's own twin, beside the mean of its task's twins, in what a row that acted "
        "is compared with; 1 is the own twin alone.",
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
    final_epochs: int = option(5, "Last epochs whose mean is the final gain.", minimum=1)
    rollback_penalty: float = option(
        1.0, "Cost of a rollback beside the gain that is lost.", minimum=0.0
    )
    open_seed_cost: float = option(
        0.1, "Cost of a seed that is neither fossilized nor gone at the end.", minimum=0.0
    )


@dataclass(frozen=True, kw_only=True)
class AttributionConfig(Config):
    """How much of a seed's contribution is paid for."""

    combination: Combination = option(
        "harmonic", "How a contribution beyond the progress made is bounded by it."
    )
    unknown_share: float = option(
        0.5, "Share of the contribution where the progress is unknown.", minimum=0.0, maximum=1.0
    )
    regress_steepness: float = option(
        3.0, "How fast the discount falls per point the network got worse.", minimum=0.0
    )
    proxy_weight: float = option(
        0.3, "Reward per point of progress of a seed that was never measured.", minimum=0.0
    )
    settles_prunes: bool = option(
        True,
        "Whether a pruned seed settles its account: harm refunds at most what it has cost, and a "
        "seed that was never measured returns its credit.",
    )


@dataclass(frozen=True, kw_only=True)
class RansomwareConfig(Config):
    """Penalty for a seed credited with more than the network gained."""

    min_contribution: float = option(1.0, "Contributions up to this are never suspected.")
    min_discount: float = option(
        0.5, "Regress discount below which the discount alone punishes.", minimum=0.0
    )
    min_improvement: float = option(0.1, "Improvement above which the ratio decides.", above=0.0)
    max_ratio: float = option(5.0, "Contribution over improvement that is still fine.", above=0.0)
    ratio_weight: float = option(0.1, "Penalty per `max_ratio` of excess.", minimum=0.0)
    contribution_scale: float = option(
        10.0, "Contribution without improvement that costs the whole limit.", above=0.0
    )
    limit: float = option(0.3, "Largest penalty.", minimum=0.0)
    hostage_contribution: float = option(
        0.1, "Contribution above which a seed may hold points hostage."
    )
    hostage_improvement: float = option(-0.2, "Improvement below which it does.")


@dataclass(frozen=True, kw_only=True)
class TimingConfig(Config):
    """Discount for seeds that were germinated while the host still learned by itself."""

    epochs: int = option(10, "Germinated from this epoch on: no discount; 0 is off.", minimum=0)
    least: float = option(0.4, "Discount at epoch 0.", minimum=0.0, maximum=1.0)


@dataclass(frozen=True, kw_only=True)
class WarningConfig(Config):
    """Small costs of leaving things as they are."""

    blending_base: float = option(0.1, "Cost of blending while worse than before.", minimum=0.0)
    blending_slope: float = option(0.05, "More of it per epoch in BLENDING.", minimum=0.0)
    blending_limit: float = option(0.3, "Most of what the epochs add.", minimum=0.0)
    holding_base: float = option(0.1, "Cost of holding a good seed undecided.", minimum=0.0)
    holding_slope: float = option(0.05, "More of it per epoch beyond the free ones.", minimum=0.0)
    holding_limit: float = option(0.3, "Largest cost of holding.", minimum=0.0)
    holding_free: int = option(2, "Epochs in HOLDING before it costs.", minimum=0)
    holding_ops: Literal["undecided", "wait"] = option(
        "undecided", "Warn at every op that leaves the seed undecided, or at WAIT only."
    )


@dataclass(frozen=True, kw_only=True)
class PotentialConfig(Config):
    """Stage potentials; shaping pays scale * (gamma * potential after - potential before)."""

    scale: float = option(0.3, "Reward per unit of potential.", minimum=0.0)
    germinated: float = option(1.0, "Potential of GERMINATED.")
    training: float = option(2.0, "Potential of TRAINING.")
    blending: float = option(3.5, "Potential of BLENDING.")
    holding: float = option(5.5, "Potential of HOLDING.")
    fossilized: float = option(6.0, "Potential of FOSSILIZED.")
    progress_rate: float = option(0.3, "Potential per epoch in the stage.", minimum=0.0)
    progress_limit: float = option(2.0, "Most that epochs in the stage add.", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class SynergyConfig(Config):
    """Bonus for seeds that help each other."""

    weight: float = option(0.1, "Largest bonus.", minimum=0.0)
    steepness: float = option(0.5, "Scale of the sum of interactions inside tanh.", minimum=0.0)
    min_discount: float = option(0.5, "Regress discount below which there is none.", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class RentConfig(Config):
    """Cost of the parameters in use, and of the operations if they are to count."""

    weight: float = option(0.5, "Factor of the logarithm of the growth.", minimum=0.0)
    flop_weight: float = option(
        0.0, "Factor of the logarithm of the growth in operations per sample.", minimum=0.0
    )
    limit: float = option(1.5, "Largest rent of one step.", minimum=0.0)
    min_host: float = option(200.0, "Host parameters that are assumed at least.", minimum=0.0)
    slot_share: float = option(
        0.0039, "Overhead of a blended slot, as a share of the host.", minimum=0.0
    )


@dataclass(frozen=True, kw_only=True)
class ShockConfig(Config):
    """Cost of sudden changes of amplitude."""

    weight: float = option(0.1958, "Factor of the squared change times the size.", minimum=0.0)
    limit: float | None = option(1.0, "Largest cost of one step; nothing is no limit.", minimum=0.0)
    min_host: float = option(200.0, "Host parameters that are assumed at least.", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class OccupancyConfig(Config):
    """Cost of slots that hold a seed."""

    per_seed: float = option(0.01, "Cost of each live or fossilized seed.", minimum=0.0)
    free_seeds: int = option(1, "Seeds that cost nothing.", minimum=0)
    per_fossil: float = option(0.002, "Further cost of each fossil.", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class FirstGerminationConfig(Config):
    """Bonus for the first germination of an episode."""

    bonus: float = option(0.2, "Paid once per episode.", minimum=0.0)
    is_returned: bool = option(
        True, "Whether it is taken back when that seed is removed or never blended."
    )


@dataclass(frozen=True, kw_only=True)
class OperationConfig(Config):
    """What an operation costs or earns by itself."""

    germinate: float = option(0.15, "Cost of GERMINATE.", minimum=0.0)
    set_alpha_target: float = option(0.005, "Cost of SET_ALPHA_TARGET.", minimum=0.0)
    advance: float = option(0.0, "Cost of ADVANCE.", minimum=0.0)
    fossilize: float = option(0.01, "Cost of FOSSILIZE.", minimum=0.0)
    fossilize_harm: float = option(0.5, "Cost of a fossil that made it worse.", minimum=0.0)
    fossilize_harm_slope: float = option(0.2, "More of it per point lost.", minimum=0.0)
    fossilize_harm_limit: float = option(1.0, "Most of what the points add.", minimum=0.0)
    fossilize_hostage: float = option(0.3, "More for a fossil that is ransomware.", minimum=0.0)
    fossilize_bonus: float = option(0.5, "Bonus of a fossil that contributes.", minimum=0.0)
    fossilize_slope: float = option(0.1, "More of it per point of contribution.", minimum=0.0)
    fossilize_contribution: float = option(1.0, "Points it must contribute for the bonus.")
    fossilize_epochs: int = option(5, "Epochs in HOLDING for the whole bonus.", minimum=1)
    fossilize_idle: float = option(0.2, "Cost of a fossil that contributes less.", minimum=0.0)
    prune: float = option(0.005, "Cost of PRUNE.", minimum=0.0)
    prune_unknown: float = option(0.1, "Cost of pruning a young unmeasured seed.", minimum=0.0)
    prune_unknown_age: int = option(5, "Age from which that costs nothing.", minimum=0)
    prune_harmful: float = option(0.15, "Bonus of pruning a harmful seed.", minimum=0.0)
    prune_harmful_contribution: float = option(-0.5, "Contribution below which it is harmful.")
    prune_harmful_age: int = option(3, "Age from which there is the bonus.", minimum=0)
    prune_harmful_young: float = option(0.1, "Cost of pruning it earlier.", minimum=0.0)
    prune_useless: float = option(0.1, "Bonus of pruning a slightly harmful seed.", minimum=0.0)
    prune_good: float = option(0.3, "Cost of pruning a seed that contributes.", minimum=0.0)
    prune_good_slope: float = option(0.05, "More of it per point of contribution.", minimum=0.0)
    prune_good_limit: float = option(0.9, "Most of the two together.", minimum=0.0)
    punish_refusals: bool = option(
        False, "Whether an illegal operation costs something instead of counting as WAIT."
    )
    refused_germinate: float = option(0.3, "Cost of GERMINATE on a seed.", minimum=0.0)
    refused_fossilize: float = option(1.0, "Cost of FOSSILIZE on what does not hold.", minimum=0.0)
    refused_prune: float = option(0.2, "Cost of PRUNE on an empty slot.", minimum=0.0)
    refused_prune_fossil: float = option(1.0, "Cost of PRUNE on a fossil.", minimum=0.0)
    refused_prune_young: float = option(
        0.3, "Cost of PRUNE per epoch a seed is too young for it.", minimum=0.0
    )
    min_prune_age: int = option(1, "Age at which it is old enough, as in the rules.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class TerminalConfig(Config):
    """Bonus at the end of an episode."""

    score_weight: float = option(0.05, "Reward per point of the final score.")
    fossil_bonus: float = option(3.0, "Bonus for contributing fossils.", minimum=0.0)
    fossil_saturation: float | None = option(
        3.0, "The bonus is bonus * tanh(count / this); nothing makes it bonus * count.", above=0.0
    )
    min_improvement: float = option(1.0, "Improvement at fossilization of a contributing fossil.")


@dataclass(frozen=True, kw_only=True)
class HindsightConfig(Config):
    """Credit for seeds that helped another one to fossilize."""

    weight: float = option(0.1, "Largest credit of one recorded boost.", minimum=0.0)
    steepness: float = option(0.1, "Scale of boost times improvement inside tanh.", minimum=0.0)
    limit: float = option(0.2, "Largest credit of one fossilization.", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class GovernorRewardConfig(Config):
    """What a rollback costs, in every mode but `twin`."""

    rollback_penalty: float = option(10.0, "Cost of a rollback, which ends the row.", minimum=0.0)
    auto_prune: float = option(0.2, "Cost per seed the governor removed.", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class EscrowConfig(Config):
    """Credit held in escrow until a seed is fossilized."""

    combination: Combination = option("geometric", "How contribution and progress are combined.")
    stable_epochs: int = option(
        3, "Epochs whose least score is the stable one.", minimum=1, maximum=5
    )
    max_change: float = option(2.0, "Largest change of a balance in one step.", above=0.0)


@dataclass(frozen=True, kw_only=True)
class SparseConfig(Config):
    """Only the end counts (`sparse`, `minimal`)."""

    scale: float = option(1.0, "Factor of the final reward.", above=0.0)
    param_weight: float = option(0.1, "Cost of fossils that use the whole budget.", minimum=0.0)
    limit: float = option(1.0, "Bound of the final reward before the factor.", above=0.0)
    early_prune: float = option(
        0.1, "`minimal`: cost of pruning a seed that is too young.", minimum=0.0
    )
    early_age: int = option(5, "`minimal`: age from which it costs nothing.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class BasicConfig(Config):
    """Change of the score against the parameters in use (`basic`)."""

    score_weight: float = option(5.0, "Reward for 100 points of progress.")
    param_weight: float = option(0.1, "Cost per step of the whole budget in use.", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class SimplifiedConfig(Config):
    """Potentials, a small cost of acting, and the end (`simplified`)."""

    action_cost: float = option(0.01, "Cost of any op but WAIT.", minimum=0.0)
    score_weight: float = option(3.0, "Reward for a final score of 100 points.")
    fossil_bonus: float = option(2.0, "Bonus per contributing fossil.", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class LossConfig(Config):
    """The loss instead of the score (`loss`)."""

    weight: float = option(5.0, "Reward per typical change of the loss.", minimum=0.0)
    typical_change: float = option(
        0.05, "Typical change of the loss in an epoch (0.15 for text).", above=0.0
    )
    limit: float = option(5.0, "Most typical changes that count.", above=0.0)
    regress_share: float = option(0.5, "Share of a rise of the loss that counts.", minimum=0.0)
    rent_weight: float = option(
        0.05, "Factor of the logarithm of the growth (0.01 for text).", minimum=0.0
    )
    flop_rent_weight: float = option(
        0.0, "Factor of the logarithm of the growth in operations per sample.", minimum=0.0
    )
    rent_limit: float = option(5.0, "Largest rent of one step.", minimum=0.0)
    rent_free: int = option(3, "Age up to which a seed pays no rent.", minimum=0)
    potential_scale: float = option(0.1, "Reward per unit of potential.", minimum=0.0)
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
    ransomware: RansomwareConfig = option(RansomwareConfig, "Credit beyond what was gained.")
    timing: TimingConfig = option(TimingConfig, "Seeds germinated early.")
    warning: WarningConfig = option(WarningConfig, "Blending and holding without result.")
    potential: PotentialConfig = option(PotentialConfig, "Stage potentials.")
    synergy: SynergyConfig = option(SynergyConfig, "Seeds that help each other.")
    rent: RentConfig = option(RentConfig, "Parameters in use.")
    shock: ShockConfig = option(ShockConfig, "Sudden changes of amplitude.")
    occupancy: OccupancyConfig = option(OccupancyConfig, "Occupied slots.")
    first_germination: FirstGerminationConfig = option(
        FirstGerminationConfig, "The first seed of an episode."
    )
    operation: OperationConfig = option(OperationConfig, "The op itself.")
    terminal: TerminalConfig = option(TerminalConfig, "The end of an episode.")
    hindsight: HindsightConfig = option(HindsightConfig, "Scaffolds of a fossil.")
    governor: GovernorRewardConfig = option(GovernorRewardConfig, "Rollbacks.")
    escrow: EscrowConfig = option(EscrowConfig, "Mode `escrow`.")
    sparse: SparseConfig = option(SparseConfig, "Modes `sparse` and `minimal`.")
    basic: BasicConfig = option(BasicConfig, "Mode `basic`.")
    simplified: SimplifiedConfig = option(SimplifiedConfig, "Mode `simplified`.")
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
