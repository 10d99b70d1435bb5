"""The features of all observation layouts, and checks of signals and features.

The first part lists Observation V3 of the design documents, the second the `travelling` layout;
`ratios.py` says what the layout of ratios has of it, and more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from esper.leyline.actions import NUM_OPS, LifecycleOp
from esper.leyline.config import is_checking_stages
from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.rules import is_in
from esper.leyline.signals import HISTORY, Signals
from esper.leyline.slots import TOPOLOGIES, SlotConfig
from esper.leyline.stages import STAGE_INDEX, AlphaAlgorithm, AlphaMode, SeedStage, parse_stage

FeatureKind = Literal["continuous", "size", "flag", "one_hot", "code"]
"""A measurement; a size on a fixed scale; a bit; one bit of a one-hot; an index divided by its
largest value. Only measurements (`continuous`) are standardised."""

LOSS_CEILING = 2.0
"""Largest value of a loss feature; it is reached at a loss of 120."""

LOSS_UNIT = math.log(11.0)
"""ln(1 + loss) is divided by this, so that a loss of 10 reads 1."""

FRESHNESS_DECAY = 0.995
"""A measurement fades by this factor per epoch: to a half in about 138."""


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """One feature: `clamp(raw / unit, low, high)`."""

    name: str
    formula: str
    """What is computed, from which signal."""
    low: float = 0.0
    high: float = 1.0
    unit: float = 1.0
    """What the raw value is divided by."""
    kind: FeatureKind = "continuous"

    @property
    def is_curve(self) -> bool:
        """Whether it depends on what the run has shown: losses, scores, gradients, contributions.

        All others follow from the network, its task, the clock and the operations so far.
        """
        return self.name in _CURVES


_CURVES = frozenset(
    {
        # Observation V3
        *("loss_norm", "loss_delta_norm", "accuracy_norm", "accuracy_delta_norm", "plateau_norm"),
        *(f"{kind}_history_{place}" for kind in ("loss", "acc") for place in range(HISTORY)),
        *("best_accuracy_norm", "best_loss_norm", "host_stabilized"),
        *("contribution_norm", "contribution_velocity_norm", "interaction_sum_norm"),
        *("boost_received_norm", "gradient_norm_norm", "gradient_health", "gradient_health_prev"),
        # Those of the travelling layout and of ratios
        *("loss", "best_loss", "train_loss", "generalization_gap", "error", "best_error"),
        *(f"{kind}_change_{back}" for kind in ("loss", "error") for back in range(1, HISTORY)),
        *("score_step", "score_trend", "below_best", "plateau", "plateau_share"),
        *("contribution", "contribution_noise", "contribution_velocity", "interaction_sum"),
        *("boost_received", "grad_norm", "grad_health", "grad_health_prev"),
        *("has_vanishing", "has_exploding"),
    }
)
"""Names of the features that are curves, in all layouts."""


def flag(name: str, formula: str) -> FeatureSpec:
    """Return a feature that is 0 or 1."""
    return FeatureSpec(name, formula, kind="flag")


def bit(name: str, formula: str) -> FeatureSpec:
    """Return one bit of a one-hot."""
    return FeatureSpec(name, formula, kind="one_hot")


def within(
    name: str,
    value: str,
    low: float,
    high: float,
    unit: float = 1.0,
    *,
    note: str = "",
    kind: FeatureKind = "continuous",
) -> FeatureSpec:
    """Return a feature that is a value clamped to a range and divided by a unit."""
    formula = f"clamp({value}, {low:g}, {high:g})" + (f" / {unit:g}" if unit != 1.0 else "") + note
    return FeatureSpec(name, formula, low=low / unit, high=high / unit, unit=unit, kind=kind)


def _loss(name: str, what: str) -> FeatureSpec:
    formula = f"min(ln(1 + max({what}, 0)) / ln 11, 2)"
    return FeatureSpec(name, formula, high=LOSS_CEILING, unit=LOSS_UNIT)


def _accuracy(name: str, what: str) -> FeatureSpec:
    return FeatureSpec(name, f"points({what}) / 100", unit=100.0)


BASE_FEATURES: tuple[FeatureSpec, ...] = (
    FeatureSpec("epoch_progress", "epoch / max_epochs"),
    _loss("loss_norm", "val_loss"),
    within("loss_delta_norm", "previous loss - val_loss", -2, 2, 2, note="; 1 in the first epoch"),
    _accuracy("accuracy_norm", "val_score"),
    within(
        "accuracy_delta_norm",
        "points(val_score) - points(previous score)",
        *(-10, 10, 10),
        note="; in the first epoch the previous score counts as 0 points",
    ),
    within("plateau_norm", "plateau_epochs", 0, 20, 20),
    flag("host_stabilized", "1 once the host has settled"),
    *(_loss(f"loss_history_{i}", f"loss_history[{i}]") for i in range(HISTORY)),
    *(_accuracy(f"acc_history_{i}", f"score_history[{i}]") for i in range(HISTORY)),
    _accuracy("best_accuracy_norm", "best_score"),
    _loss("best_loss_norm", "best_loss"),
    FeatureSpec("params_utilization", "min(ln(1 + params) / ln(1 + budget), 1)"),
    FeatureSpec("slot_utilization", "slots with a record / enabled slots"),
    FeatureSpec("num_training", "seeds in TRAINING / enabled slots"),
    FeatureSpec("num_blending", "seeds in BLENDING / enabled slots"),
    FeatureSpec("num_holding", "seeds in HOLDING / enabled slots"),
)
"""What is known about the host; histories run from the oldest to the newest epoch."""

FEEDBACK_FEATURES: tuple[FeatureSpec, ...] = (
    flag("last_action_success", "1 if the previous action took effect"),
    *(
        bit(f"last_action_op_{op.name.lower()}", f"1 if the previous op was {op.name}")
        for op in LifecycleOp
    ),
)
"""What became of the previous action; WAIT and 1 at the start."""

SLOT_FEATURES: tuple[FeatureSpec, ...] = (
    flag("is_active", "1 if the slot has a record, cooldown included"),
    *(bit(f"stage_{each.name.lower()}", f"1 if the stage is {each.name}") for each in SeedStage),
    FeatureSpec("alpha", "alpha"),
    FeatureSpec("alpha_target", "alpha_target"),
    FeatureSpec("alpha_mode_norm", "index / 2 of HOLD, UP, DOWN", unit=2.0, kind="code"),
    within("alpha_velocity", "alpha_velocity", -1, 1),
    FeatureSpec("time_to_target_norm", "clamp(time_to_target, 0, max_epochs) / max_epochs"),
    FeatureSpec("alpha_algorithm_norm", "index / 2 of ADD, MULTIPLY, GATE", unit=2.0, kind="code"),
    *(
        within(f"{name}_norm", name, -10, 10, 10, note="; 0 before the first ablation")
        for name in ("contribution", "contribution_velocity")
    ),
    within("epochs_in_stage_norm", "epochs_in_stage", 0, 150, 150),
    within("gradient_norm_norm", "grad_norm", 0, 10, 10),
    FeatureSpec("gradient_health", "grad_health"),
    FeatureSpec("gradient_health_prev", "grad_health_prev"),
    flag("has_vanishing", "1 if a gradient tensor has vanished"),
    flag("has_exploding", "1 if a gradient tensor explodes"),
    within("interaction_sum_norm", "sum over j of interaction[i, j]", 0, 10, 10),
    within("boost_received_norm", "max over j of interaction[i, j]", 0, 5, 5),
    within("upstream_alpha_norm", "sum of alpha of measured seeds before", 0, 3, 3),
    within("downstream_alpha_norm", "sum of alpha of measured seeds after", 0, 3, 3),
    FeatureSpec("counterfactual_fresh", "0.995 ^ counterfactual_age; 0 before the first ablation"),
)
"""What is known about one slot; all zero where it is empty or not enabled."""

BASE_INDEX = {spec.name: index for index, spec in enumerate(BASE_FEATURES)}
SLOT_INDEX = {spec.name: index for index, spec in enumerate(SLOT_FEATURES)}
"""Positions by name, within the base and within a slot."""

NUM_BASE = len(BASE_FEATURES)
NUM_FEEDBACK = len(FEEDBACK_FEATURES)
NUM_PER_SLOT = len(SLOT_FEATURES)

# The one-hots above follow the enumerations, and `index / 2` is the value of the member itself.
assert (NUM_BASE, NUM_FEEDBACK, NUM_PER_SLOT) == (24, 7, 30)
assert [STAGE_INDEX[stage] for stage in SeedStage] == list(range(10))
assert [int(op) for op in LifecycleOp] == list(range(6))
assert [int(mode) for mode in AlphaMode] == [int(kind) for kind in AlphaAlgorithm] == [0, 1, 2]


def get_feature_size(slot_config: SlotConfig) -> int:
    """Return the number of features for these slots: 121 for three, 181 for five."""
    return NUM_BASE + NUM_FEEDBACK + NUM_PER_SLOT * slot_config.num_slots


def feature_specs(slot_config: SlotConfig) -> tuple[FeatureSpec, ...]:
    """Return the spec of every index; the features of a slot repeat for each."""
    return (*BASE_FEATURES, *FEEDBACK_FEATURES, *(SLOT_FEATURES * slot_config.num_slots))


def feature_names(slot_config: SlotConfig) -> tuple[str, ...]:
    """Return the name of every index; those of a slot start with its id, as in 'r0c0.alpha'."""
    shared = [spec.name for spec in (*BASE_FEATURES, *FEEDBACK_FEATURES)]
    own = [f"{slot}.{spec.name}" for slot in slot_config.slot_ids for spec in SLOT_FEATURES]
    return (*shared, *own)


FEATURE_NAMES: tuple[str, ...] = feature_names(SlotConfig.default())
"""The name of every index for the three default slots."""


def checks_on_device(device: torch.device) -> bool:
    """Return whether checks run on the device, without waiting for their result.

    On a GPU a failed check then aborts the process later; ESPER_DEBUG=1 waits and says where.
    """
    return device.type != "cpu" and not is_checking_stages()


def check_codes(signals: Signals, *, expected: Any, found: Any) -> None:
    """Raise unless as many valid stages, blueprints and last ops were found as expected.

    Both are counts: numbers, or tensors without dimensions.
    """
    if checks_on_device(signals.stage.device):
        torch._assert_async(
            found == expected,
            "a stage, blueprint or op in the signals does not exist; ESPER_DEBUG=1 says where",
        )
    elif int(found) != int(expected):
        raise unknown_code_error(signals)


def unknown_code_error(signals: Signals) -> ValueError:
    """Return the error that names the first stage, blueprint or op that does not exist."""
    active = signals.occupied.cpu()
    stages, blueprints = signals.stage.cpu(), signals.blueprint.cpu()
    for row, slot in active.nonzero().tolist():
        where = f"row {row}, slot {slot}"
        stage, blueprint = int(stages[row, slot]), int(blueprints[row, slot])
        try:
            parse_stage(stage)
        except ValueError as error:
            return UsageError(f"{where}: {error}")
        if blueprint < 0:
            return UsageError(
                f"{where}: a seed in {SeedStage(stage).name} has the blueprint {blueprint}; "
                "a record needs a blueprint id of 0 or more"
            )
    for row, op in enumerate(signals.last_op.tolist()):
        if not 0 <= op < NUM_OPS:
            return UsageError(f"row {row}: last_op must be 0 to {NUM_OPS - 1}, got {op}")
    return UsageError("the signals hold a stage, blueprint or op that does not exist")


def refuse_unknown_stages(signals: Signals) -> None:
    """Raise where a record's stage does not exist."""
    fine = (is_in(signals.stage, tuple(SeedStage)) | ~signals.occupied).all()
    if checks_on_device(fine.device):
        torch._assert_async(fine, "a stage in the signals does not exist; ESPER_DEBUG=1 says where")
    elif not bool(fine):
        raise unknown_code_error(signals)


def check_signals(signals: Signals) -> None:
    """Raise where a code does not exist, or two signals about one measurement disagree."""
    active = signals.occupied & signals.enabled
    for name, count in (("alpha_mode", len(AlphaMode)), ("algorithm", len(AlphaAlgorithm))):
        code: Tensor = getattr(signals, name)
        wrong = active & ((code < 0) | (code >= count))
        if bool(wrong.any()):
            row, slot = wrong.nonzero()[0].tolist()
            raise UsageError(
                f"row {row}, slot {slot}: {name} must be 0 to {count - 1}, "
                f"got {int(code[row, slot])}"
            )
    wrong = active & (signals.contribution.isnan() != (signals.counterfactual_age < 0))
    if bool(wrong.any()):
        row, slot = wrong.nonzero()[0].tolist()
        raise UsageError(
            f"row {row}, slot {slot}: the contribution is {float(signals.contribution[row, slot])}"
            f" but counterfactual_age is {int(signals.counterfactual_age[row, slot])}; "
            "a seed has both or neither"
        )


def check_finite(features: Tensor, names: Sequence[str]) -> None:
    """Raise where a feature is NaN or infinite."""
    wrong = ~torch.isfinite(features)
    if bool(wrong.any()):
        row, index = wrong.nonzero()[0].tolist()
        raise NonFiniteError(
            f"row {row}: feature {index} ({names[index]}) is {float(features[row, index])}; "
            "the signal behind it was not measured or has diverged"
        )


# ---- The layout of the travelling observation, feature by feature


LEAST_SHARE = 1e-3
"""Smallest loss or error, relative to guessing, whose logarithm is taken."""

RATIO_LOW, RATIO_HIGH = -7.0, 2.0
"""Range of the logarithm of a loss or error relative to guessing."""

CHANGE = 2.0
"""Largest logarithm of a ratio between epochs; e^2 is a loss seven times as large."""

COST_LOW, COST_HIGH = -9.0, 3.0
"""Range of the logarithm of a seed's cost relative to the host's: from 1/8,000 to 20 times."""

NO_LIMIT = 5.0
"""Room left where there is no limit: the logarithm of 150 times the host."""

NOISES = 5.0
"""Largest change of a score, in units of its noise."""

_LARGEST = 30.0
"""More than the natural logarithm of any number of parameters, operations or samples."""


def _ratio(name: str, what: str) -> FeatureSpec:
    """Return the logarithm of a loss or an error relative to guessing."""
    return within(name, f"ln(max({what}, {LEAST_SHARE:g}))", RATIO_LOW, RATIO_HIGH, 2.0)


def _count(name: str, what: str) -> FeatureSpec:
    """Return the logarithm of a count, such as a number of epochs."""
    return FeatureSpec(name, f"ln(1 + {what}) / 3", high=_LARGEST / 3.0, unit=3.0)


def _size(name: str, what: str) -> FeatureSpec:
    """Return the logarithm of a size on a fixed scale."""
    return FeatureSpec(name, f"ln({what}) / 10", high=_LARGEST / 10.0, unit=10.0, kind="size")


def _share(name: str, what: str) -> FeatureSpec:
    """Return the logarithm of a cost relative to the host's, on a fixed scale."""
    return within(name, f"ln({what})", COST_LOW, COST_HIGH, 3.0, kind="size")


PAST = tuple(range(1, HISTORY))
"""Epochs back that histories reach."""

HOST_FEATURES: tuple[FeatureSpec, ...] = (
    FeatureSpec("progress", "epoch / max_epochs"),
    _count("epochs_left", "max_epochs - epoch"),
    _size("horizon", "max_epochs"),
    flag("chance_known", "1 if the loss of guessing is known"),
    _ratio("loss", "val_loss / chance_loss"),
    _ratio("best_loss", "best_loss / chance_loss"),
    flag("train_known", "1 if the training loss is known"),
    _ratio("train_loss", "train_loss / chance_loss"),
    within("generalization_gap", "ln(val_loss / train_loss)", -CHANGE, 2 * CHANGE),
    _ratio("error", "error"),
    _ratio("best_error", "error of best_score"),
    *(
        within(f"loss_change_{back}", f"ln(val_loss {back} back / val_loss)", -CHANGE, CHANGE)
        for back in PAST
    ),
    *(
        within(f"error_change_{back}", f"ln(error {back} back / error)", -CHANGE, CHANGE)
        for back in PAST
    ),
    within("score_step", "(val_score - previous score) / noise", -NOISES, NOISES, 2.0),
    within("score_trend", "(val_score - oldest score) / noise", -NOISES, NOISES, 2.0),
    within("below_best", "(best_score - val_score) / noise", 0.0, NOISES, 2.0),
    _count("plateau", "plateau_epochs"),
    flag("host_stabilized", "1 once the host has settled"),
    _size("params", "params"),
    within("params_grown", "ln(params / host_params)", 0.0, 5.0),
    flag("flops_known", "1 if operations are counted"),
    _size("flops", "flops"),
    within("flops_grown", "ln(flops / host_flops)", 0.0, 5.0),
    within("budget_used", "params / budget", 0.0, 2.0),
    flag("param_limited", "1 if parameters are limited"),
    within("param_limit_used", "params / param_limit", 0.0, 1.0),
    within("param_limit_left", "ln(1 + (param_limit - params) / host_params)", 0.0, 2 * NO_LIMIT),
    flag("flop_limited", "1 if operations are limited"),
    within("flop_limit_used", "flops / flop_limit", 0.0, 1.0),
    within("flop_limit_left", "ln(1 + (flop_limit - flops) / host_flops)", 0.0, 2 * NO_LIMIT),
    flag("samples_known", "1 if the size of the training set is known"),
    _size("train_samples", "train_samples"),
    within("samples_per_param", "ln(train_samples / params)", -10, 10, 5, kind="size"),
    _count("passes", "epoch * samples_per_epoch / train_samples"),
    _count("passes_left", "(max_epochs - epoch) * samples_per_epoch / train_samples"),
    flag("rate_known", "1 if the learning rate is known"),
    within("learning_rate", "ln(learning_rate)", -15, 5, 5, kind="size"),
    within("rate_factor", "rate_factor", 0.0, 1.0),
    _size("classes", "max(num_classes, 1)"),
    flag("is_accuracy", "1 if the score is an accuracy, 0 if it is a negative loss"),
    _size("num_slots", "enabled slots"),
    FeatureSpec("occupied_share", "slots with a record / enabled slots"),
    FeatureSpec("training_share", "seeds in TRAINING / enabled slots"),
    FeatureSpec("blending_share", "seeds in BLENDING / enabled slots"),
    FeatureSpec("holding_share", "seeds in HOLDING / enabled slots"),
    FeatureSpec("fossilized_share", "seeds in FOSSILIZED / enabled slots"),
    *FEEDBACK_FEATURES,
)
"""What is known about the host, its task and the previous action."""

TRAVELLING_SLOT_FEATURES: tuple[FeatureSpec, ...] = (
    flag("exists", "1 if the host has the slot and it is enabled"),
    FeatureSpec("depth", "place among the enabled slots, from 0 for the first to 1 for the last"),
    flag("is_first", "1 for the first enabled slot"),
    flag("is_last", "1 for the last enabled slot"),
    *(bit(f"topology_{kind}", f"1 if the activation is that of {kind}") for kind in TOPOLOGIES),
    _size("channels", "max(slot_channels, 1)"),
    _size("positions", "max(slot_positions, 1)"),
    _count("fitting", "blueprints that fit"),
    _share("cheapest_params", "least seed_params that fits / host_params"),
    _share("cheapest_flops", "least seed_flops that fits / host_flops"),
    flag("is_active", "1 if the slot has a record, cooldown included"),
    *(bit(f"stage_{each.name.lower()}", f"1 if the stage is {each.name}") for each in SeedStage),
    FeatureSpec("alpha", "alpha"),
    FeatureSpec("alpha_target", "alpha_target"),
    *(bit(f"mode_{mode.name.lower()}", f"1 if alpha is in {mode.name}") for mode in AlphaMode),
    *(
        bit(f"algorithm_{kind.name.lower()}", f"1 if it is blended by {kind.name}")
        for kind in AlphaAlgorithm
    ),
    within("alpha_velocity", "alpha_velocity", -1.0, 1.0),
    _count("time_to_target", "time_to_target"),
    _count("epochs_in_stage", "epochs_in_stage"),
    _count("age", "age"),
    flag("measured", "1 once an ablation has told the contribution"),
    FeatureSpec("freshness", f"{FRESHNESS_DECAY} ^ counterfactual_age; 0 unless measured"),
    within("contribution", "contribution / what is left to gain", -2.0, 2.0),
    within("contribution_noise", "contribution / contribution_se", -10.0, 10.0, NOISES),
    within("contribution_velocity", "contribution_velocity / what is left to gain", -2.0, 2.0),
    within("interaction_sum", "sum over j of interaction[i, j] / what is left to gain", -2.0, 2.0),
    within("boost_received", "max over j of interaction[i, j] / what is left to gain", 0.0, 2.0),
    within("upstream_alpha", "sum of alpha of measured seeds before", 0.0, 3.0),
    within("downstream_alpha", "sum of alpha of measured seeds after", 0.0, 3.0),
    _count("grad_norm", "grad_norm"),
    FeatureSpec("grad_health", "grad_health"),
    FeatureSpec("grad_health_prev", "grad_health_prev"),
    flag("has_vanishing", "1 if a gradient tensor has vanished"),
    flag("has_exploding", "1 if a gradient tensor explodes"),
    within("params_share", "ln(1 + slot_params / host_params)", 0.0, 5.0),
    within("flops_share", "ln(1 + slot_flops / host_flops)", 0.0, 5.0),
)
"""What is known about one slot; all zero where the host has no such slot."""

PAIR_FEATURES: tuple[FeatureSpec, ...] = (
    flag("fits", "1 if the blueprint is for the slot, within the limits on growth"),
    _share("params", "seed_params / host_params"),
    _share("flops", "seed_flops / host_flops"),
)
"""What a seed of a blueprint would cost at a slot; all zero where it does not fit."""

HOST_INDEX = {spec.name: index for index, spec in enumerate(HOST_FEATURES)}
TRAVELLING_SLOT_INDEX = {spec.name: index for index, spec in enumerate(TRAVELLING_SLOT_FEATURES)}
PAIR_INDEX = {spec.name: index for index, spec in enumerate(PAIR_FEATURES)}
"""Positions by name, within the host, a slot, and a blueprint at a slot."""

NUM_HOST = len(HOST_FEATURES)
