"""The layout of Observation V3, feature by feature, and checks of what goes in and comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from esper.leyline.actions import NUM_OPS, LifecycleOp
from esper.leyline.alpha import AlphaAlgorithm, AlphaMode
from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.process import is_checking_stages
from esper.leyline.signals import HISTORY, Signals
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import STAGE_INDEX, SeedStage, parse_stage

FeatureKind = Literal["continuous", "size", "flag", "one_hot", "code"]
"""A measurement; a size that tells regimes apart, on a fixed scale; a bit; one bit of several of
which one is set; an index divided by its largest. Measurements alone are standardised."""

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


def flag(name: str, formula: str) -> FeatureSpec:
    """Return a feature that is 0 or 1."""
    return FeatureSpec(name, formula, kind="flag")


def bit(name: str, formula: str) -> FeatureSpec:
    """Return a feature that is 1 of one choice among several."""
    return FeatureSpec(name, formula, kind="one_hot")


def _loss(name: str, what: str) -> FeatureSpec:
    formula = f"min(ln(1 + max({what}, 0)) / ln 11, 2)"
    return FeatureSpec(name, formula, high=LOSS_CEILING, unit=LOSS_UNIT)


def _accuracy(name: str, what: str) -> FeatureSpec:
    return FeatureSpec(name, f"points({what}) / 100", unit=100.0)


BASE_FEATURES: tuple[FeatureSpec, ...] = (
    FeatureSpec("epoch_progress", "epoch / max_epochs"),
    _loss("loss_norm", "val_loss"),
    FeatureSpec(
        "loss_delta_norm",
        "clamp(previous loss - val_loss, -2, 2) / 2; 1 in the first epoch",
        low=-1.0,
        unit=2.0,
    ),
    _accuracy("accuracy_norm", "val_score"),
    FeatureSpec(
        "accuracy_delta_norm",
        "clamp(points(val_score) - points(previous score), -10, 10) / 10; "
        "in the first epoch the previous score counts as 0 points",
        low=-1.0,
        unit=10.0,
    ),
    FeatureSpec("plateau_norm", "clamp(plateau_epochs, 0, 20) / 20", unit=20.0),
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
    FeatureSpec("alpha_velocity", "clamp(alpha_velocity, -1, 1)", low=-1.0),
    FeatureSpec("time_to_target_norm", "clamp(time_to_target, 0, max_epochs) / max_epochs"),
    FeatureSpec("alpha_algorithm_norm", "index / 2 of ADD, MULTIPLY, GATE", unit=2.0, kind="code"),
    FeatureSpec(
        "contribution_norm",
        "clamp(contribution, -10, 10) / 10; 0 before the first ablation",
        low=-1.0,
        unit=10.0,
    ),
    FeatureSpec(
        "contribution_velocity_norm",
        "clamp(contribution_velocity, -10, 10) / 10; 0 before the first ablation",
        low=-1.0,
        unit=10.0,
    ),
    FeatureSpec("epochs_in_stage_norm", "clamp(epochs_in_stage, 0, 150) / 150", unit=150.0),
    FeatureSpec("gradient_norm_norm", "clamp(grad_norm, 0, 10) / 10", unit=10.0),
    FeatureSpec("gradient_health", "grad_health"),
    FeatureSpec("gradient_health_prev", "grad_health_prev"),
    flag("has_vanishing", "1 if a gradient tensor has vanished"),
    flag("has_exploding", "1 if a gradient tensor explodes"),
    FeatureSpec(
        "interaction_sum_norm", "clamp(sum over j of interaction[i, j], 0, 10) / 10", unit=10.0
    ),
    FeatureSpec(
        "boost_received_norm", "clamp(max over j of interaction[i, j], 0, 5) / 5", unit=5.0
    ),
    FeatureSpec(
        "upstream_alpha_norm", "clamp(sum of alpha of measured seeds before, 0, 3) / 3", unit=3.0
    ),
    FeatureSpec(
        "downstream_alpha_norm", "clamp(sum of alpha of measured seeds after, 0, 3) / 3", unit=3.0
    ),
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


def must_not_wait(device: torch.device) -> bool:
    """Return whether a check there leaves its verdict to the device instead of reading it."""
    return device.type != "cpu" and not is_checking_stages()


def refuse_strangers(signals: Signals, *, expected: Any, found: Any) -> None:
    """Raise unless as many stages, blueprints and last ops were found as there must be.

    Both are counts, as numbers or as tensors without dimensions.
    """
    if must_not_wait(signals.stage.device):
        torch._assert_async(
            found == expected,
            "a stage, blueprint or op in the signals does not exist; ESPER_DEBUG=1 says where",
        )
    elif int(found) != int(expected):
        raise find_stranger(signals)


def find_stranger(signals: Signals) -> ValueError:
    """Return the error that names the first record no observation could express."""
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
    exists = torch.zeros_like(signals.occupied)
    for stage in SeedStage:
        exists |= signals.stage == int(stage)
    fine = (exists | ~signals.occupied).all()
    if must_not_wait(fine.device):
        torch._assert_async(fine, "a stage in the signals does not exist; ESPER_DEBUG=1 says where")
    elif not bool(fine):
        raise find_stranger(signals)


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
