"""The layout of the travelling observation, feature by feature.

Every number is relative to the task it is about: losses to that of guessing, deltas to their own
noise, parameters and operations to the host's. What tells one regime from another (size of data,
network and horizon, learning rate, classes) is there as logarithms. Slots, and blueprints at slots,
have the same features wherever they are, so any number of them is read by the same weights.
"""

from __future__ import annotations

from dataclasses import replace

from esper.leyline.actions import LifecycleOp
from esper.leyline.alpha import AlphaAlgorithm, AlphaMode
from esper.leyline.blueprints import TOPOLOGIES
from esper.leyline.signals import HISTORY
from esper.leyline.stages import SeedStage
from esper.tamiyo.policy.layout import FEEDBACK_FEATURES, FRESHNESS_DECAY, FeatureSpec, bit, flag

LEAST_SHARE = 1e-3
"""Least loss or error, relative to guessing, whose logarithm is taken: below it nothing is left."""

RATIO_LOW, RATIO_HIGH = -7.0, 2.0
"""Range of the logarithm of a loss or error relative to guessing."""

CHANGE = 2.0
"""Largest logarithm of a ratio between epochs; e^2 is a loss seven times as large."""

COST_LOW, COST_HIGH = -9.0, 3.0
"""Range of the logarithm of what a seed costs relative to the host: from 1 in 8,000 to 20 times."""

NO_LIMIT = 5.0
"""What is left where nothing is limited: the logarithm of 150 times the host."""

NOISES = 5.0
"""Most units of noise that a change is told in."""

_LARGEST = 30.0
"""More than the natural logarithm of any number of parameters, operations or samples."""


def _within(name: str, formula: str, low: float, high: float, unit: float = 1.0) -> FeatureSpec:
    told = f"clamp({formula}, {low:g}, {high:g})" + (f" / {unit:g}" if unit != 1.0 else "")
    return FeatureSpec(name, told, low=low / unit, high=high / unit, unit=unit)


def _ratio(name: str, what: str) -> FeatureSpec:
    """A loss or an error relative to guessing, as a logarithm."""
    return _within(name, f"ln(max({what}, {LEAST_SHARE:g}))", RATIO_LOW, RATIO_HIGH, 2.0)


def _count(name: str, what: str) -> FeatureSpec:
    """A number of epochs or the like, as a logarithm."""
    return FeatureSpec(name, f"ln(1 + {what}) / 3", high=_LARGEST / 3.0, unit=3.0)


def _size(name: str, what: str) -> FeatureSpec:
    """A size that tells regimes apart, as a logarithm on a fixed scale."""
    return FeatureSpec(name, f"ln({what}) / 10", high=_LARGEST / 10.0, unit=10.0, kind="size")


def _share(name: str, what: str) -> FeatureSpec:
    """A cost relative to the host's, as a logarithm on a fixed scale."""
    spec = _within(name, f"ln({what})", COST_LOW, COST_HIGH, 3.0)
    return replace(spec, kind="size")


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
    _within("generalization_gap", "ln(val_loss / train_loss)", -CHANGE, 2 * CHANGE),
    _ratio("error", "error"),
    _ratio("best_error", "error of best_score"),
    *(
        _within(f"loss_change_{back}", f"ln(val_loss {back} back / val_loss)", -CHANGE, CHANGE)
        for back in PAST
    ),
    *(
        _within(f"error_change_{back}", f"ln(error {back} back / error)", -CHANGE, CHANGE)
        for back in PAST
    ),
    _within("score_step", "(val_score - previous score) / noise", -NOISES, NOISES, 2.0),
    _within("score_trend", "(val_score - oldest score) / noise", -NOISES, NOISES, 2.0),
    _within("below_best", "(best_score - val_score) / noise", 0.0, NOISES, 2.0),
    _count("plateau", "plateau_epochs"),
    flag("host_stabilized", "1 once the host has settled"),
    _size("params", "params"),
    _within("params_grown", "ln(params / host_params)", 0.0, 5.0),
    flag("flops_known", "1 if operations are counted"),
    _size("flops", "flops"),
    _within("flops_grown", "ln(flops / host_flops)", 0.0, 5.0),
    _within("budget_used", "params / budget", 0.0, 2.0),
    flag("param_limited", "1 if parameters are limited"),
    _within("param_limit_used", "params / param_limit", 0.0, 1.0),
    _within("param_limit_left", "ln(1 + (param_limit - params) / host_params)", 0.0, 2 * NO_LIMIT),
    flag("flop_limited", "1 if operations are limited"),
    _within("flop_limit_used", "flops / flop_limit", 0.0, 1.0),
    _within("flop_limit_left", "ln(1 + (flop_limit - flops) / host_flops)", 0.0, 2 * NO_LIMIT),
    flag("samples_known", "1 if the size of the training set is known"),
    _size("train_samples", "train_samples"),
    FeatureSpec(
        "samples_per_param",
        "clamp(ln(train_samples / params), -10, 10) / 5",
        low=-2.0,
        high=2.0,
        unit=5.0,
        kind="size",
    ),
    _count("passes", "epoch * samples_per_epoch / train_samples"),
    _count("passes_left", "(max_epochs - epoch) * samples_per_epoch / train_samples"),
    flag("rate_known", "1 if the learning rate is known"),
    FeatureSpec(
        "learning_rate",
        "clamp(ln(learning_rate), -15, 5) / 5",
        low=-3.0,
        high=1.0,
        unit=5.0,
        kind="size",
    ),
    _within("rate_factor", "rate_factor", 0.0, 1.0),
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

SLOT_FEATURES: tuple[FeatureSpec, ...] = (
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
    _within("alpha_velocity", "alpha_velocity", -1.0, 1.0),
    _count("time_to_target", "time_to_target"),
    _count("epochs_in_stage", "epochs_in_stage"),
    _count("age", "age"),
    flag("measured", "1 once an ablation has told the contribution"),
    FeatureSpec("freshness", f"{FRESHNESS_DECAY} ^ counterfactual_age; 0 unless measured"),
    _within("contribution", "contribution / what is left to gain", -2.0, 2.0),
    _within("contribution_noise", "contribution / contribution_se", -10.0, 10.0, NOISES),
    _within("contribution_velocity", "contribution_velocity / what is left to gain", -2.0, 2.0),
    _within("interaction_sum", "sum over j of interaction[i, j] / what is left to gain", -2.0, 2.0),
    _within("boost_received", "max over j of interaction[i, j] / what is left to gain", 0.0, 2.0),
    _within("upstream_alpha", "sum of alpha of measured seeds before", 0.0, 3.0),
    _within("downstream_alpha", "sum of alpha of measured seeds after", 0.0, 3.0),
    _count("grad_norm", "grad_norm"),
    FeatureSpec("grad_health", "grad_health"),
    FeatureSpec("grad_health_prev", "grad_health_prev"),
    flag("has_vanishing", "1 if a gradient tensor has vanished"),
    flag("has_exploding", "1 if a gradient tensor explodes"),
    _within("params_share", "ln(1 + slot_params / host_params)", 0.0, 5.0),
    _within("flops_share", "ln(1 + slot_flops / host_flops)", 0.0, 5.0),
)
"""What is known about one slot; all zero where the host has no such slot."""

PAIR_FEATURES: tuple[FeatureSpec, ...] = (
    flag("fits", "1 if the blueprint is for the slot, within the limits on growth"),
    _share("params", "seed_params / host_params"),
    _share("flops", "seed_flops / host_flops"),
)
"""What a seed of a blueprint would cost at a slot; all zero where it does not fit."""

HOST_INDEX = {spec.name: index for index, spec in enumerate(HOST_FEATURES)}
SLOT_INDEX = {spec.name: index for index, spec in enumerate(SLOT_FEATURES)}
PAIR_INDEX = {spec.name: index for index, spec in enumerate(PAIR_FEATURES)}
"""Positions by name, within the host, a slot, and a blueprint at a slot."""

NUM_HOST = len(HOST_FEATURES)
NUM_SLOT = len(SLOT_FEATURES)
NUM_PAIR = len(PAIR_FEATURES)

assert (len(HOST_INDEX), len(SLOT_INDEX), len(PAIR_INDEX)) == (NUM_HOST, NUM_SLOT, NUM_PAIR)
assert [int(op) for op in LifecycleOp] == list(range(len(LifecycleOp)))
