"""The `travelling` observation: task-relative features that mean the same on every task.

`observe_host`, `observe_slots` and `observe_pairs` compute the features that `layout.py` lists, for
all rows at once, on the device of the signals. Unknown values are neutral; where a neutral value
could be a measurement, a flag beside it says which it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.signals import HISTORY, Signals
from esper.leyline.slots import NOOP, TOPOLOGIES
from esper.leyline.stages import AlphaAlgorithm, AlphaMode, SeedStage
from esper.tamiyo.policy.layout import (
    FEEDBACK_FEATURES,
    FRESHNESS_DECAY,
    HOST_FEATURES,
    LEAST_SHARE,
    NO_LIMIT,
    PAIR_FEATURES,
    PAIR_INDEX,
    PAST,
    TRAVELLING_SLOT_FEATURES,
    FeatureSpec,
    check_codes,
)

_LEAST_LEFT = 0.01
"""Minimum of what is left to gain, as a share of the error of guessing."""

_LEAST_NOISE = 0.01
"""Minimum noise of a score, as a share of what is left to gain."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Units by which the measurements of every row are divided, float32 [R] each."""

    is_accuracy: Tensor
    """bool [R], scores are points; else negative losses."""
    chance_loss: Tensor
    """The loss of guessing; 1 where it is not known."""
    chance_error: Tensor
    """What an error is divided by: in points, or the loss of guessing."""
    left: Tensor
    """What is left to gain, in units of the score."""
    noise: Tensor
    """Root mean square of recent changes between epochs, in units of the score."""

    @classmethod
    def of(cls, signals: Signals) -> Scale:
        """Return the scale of every row."""
        is_accuracy = signals.best_score >= 0
        chance_loss = torch.where(signals.chance_loss > 0, signals.chance_loss, 1.0)
        classes = signals.num_classes
        guessed = torch.where(classes > 1, 1.0 / classes.clamp(min=1), 0.0)
        chance_error = torch.where(is_accuracy, 100.0 * (1.0 - guessed), chance_loss)
        top = torch.where(is_accuracy, 100.0, 0.0)
        left = torch.maximum(top - signals.val_score, _LEAST_LEFT * chance_error)
        return cls(
            is_accuracy=is_accuracy,
            chance_loss=chance_loss,
            chance_error=chance_error,
            left=left,
            noise=_noise(signals.score_history, left),
        )

    def error(self, score: Tensor) -> Tensor:
        """Return scores [R, ...] as errors relative to guessing: 1 is chance, 0 is perfect."""
        shape = (-1, *[1] * (score.dim() - 1))
        top = torch.where(self.is_accuracy, 100.0, 0.0).view(shape)
        return (top - score) / self.chance_error.view(shape)


def observe_host(signals: Signals, specs: Sequence[FeatureSpec] = HOST_FEATURES) -> Tensor:
    """Return float32 [R, host features], those of the specs."""
    scale = Scale.of(signals)
    epoch, horizon = signals.epoch.float(), signals.max_epochs.float()
    params, host_params = signals.params.float(), signals.host_params.clamp(min=1).float()
    flops, host_flops = signals.flops.float(), signals.host_flops.clamp(min=1).float()
    losses = _log_share(signals.loss_history / scale.chance_loss[:, None])
    errors = _log_share(scale.error(signals.score_history))
    loss = _log_share(signals.val_loss / scale.chance_loss)
    error = _log_share(scale.error(signals.val_score))
    scores = signals.score_history
    oldest = _first_known(scores)
    train_known = signals.train_loss.isfinite()
    train = _log_share(torch.where(train_known, signals.train_loss, 0.0) / scale.chance_loss)
    samples = signals.train_samples.float()
    samples_known = samples > 0
    passes = torch.where(samples_known, signals.samples_per_epoch / samples.clamp(min=1), 0.0)
    rate_known = signals.learning_rate > 0
    enabled = signals.enabled.sum(1).clamp(min=1).float()
    active = signals.occupied & signals.enabled

    def share(*stages: SeedStage) -> Tensor:
        found = sum((signals.stage == int(stage)) & active for stage in stages)
        assert isinstance(found, Tensor)
        return found.sum(1) / enabled

    has_budget = signals.compute_budget > 0
    budget = signals.compute_budget.clamp(min=1).float()
    spent = torch.where(has_budget, signals.compute_spent / budget, epoch / horizon)
    ops = _one_hot(signals.last_op, LifecycleOp)
    _check_codes(signals, active, ops)
    return _columns(
        specs,
        {
            "budget_known": has_budget,
            "budget_left": 1.0 - spent,
            "plateau_share": signals.plateau_epochs / horizon,
            "progress": epoch / horizon,
            "epochs_left": torch.log1p((horizon - epoch).clamp(min=0)),
            "horizon": horizon.log(),
            "chance_known": signals.chance_loss > 0,
            "loss": loss,
            "best_loss": _log_share(signals.best_loss / scale.chance_loss),
            "train_known": train_known,
            "train_loss": torch.where(train_known, train, 0.0),
            "generalization_gap": torch.where(train_known, loss - train, 0.0),
            "error": error,
            "best_error": _log_share(scale.error(signals.best_score)),
            **{f"loss_change_{back}": _change(losses[:, -1 - back], loss) for back in PAST},
            **{f"error_change_{back}": _change(errors[:, -1 - back], error) for back in PAST},
            "score_step": _known(signals.val_score - scores[:, -2]) / scale.noise,
            "score_trend": _known(signals.val_score - oldest) / scale.noise,
            "below_best": (signals.best_score - signals.val_score) / scale.noise,
            "plateau": torch.log1p(signals.plateau_epochs.float()),
            "host_stabilized": signals.stabilized,
            "params": params.clamp(min=1).log(),
            "params_grown": (params / host_params).clamp(min=1).log(),
            "flops_known": signals.flops > 0,
            "flops": flops.clamp(min=1).log(),
            "flops_grown": (flops / host_flops).clamp(min=1).log(),
            "budget_used": params / signals.budget.clamp(min=1),
            **_limit("param", params, signals.param_limit, host_params),
            **_limit("flop", flops, signals.flop_limit, host_flops),
            "samples_known": samples_known,
            "train_samples": samples.clamp(min=1).log(),
            "samples_per_param": torch.where(
                samples_known, (samples / params.clamp(min=1)).clamp(min=1e-6).log(), 0.0
            ),
            "passes": torch.log1p(epoch * passes),
            "passes_left": torch.log1p((horizon - epoch).clamp(min=0) * passes),
            "rate_known": rate_known,
            "learning_rate": torch.where(rate_known, signals.learning_rate, 1.0).log(),
            "rate_factor": signals.rate_factor,
            "classes": signals.num_classes.clamp(min=1).float().log(),
            "is_accuracy": scale.is_accuracy,
            "num_slots": enabled.log(),
            "occupied_share": active.sum(1) / enabled,
            "training_share": share(SeedStage.TRAINING),
            "blending_share": share(SeedStage.BLENDING),
            "holding_share": share(SeedStage.HOLDING),
            "fossilized_share": share(SeedStage.FOSSILIZED),
            "last_action_success": signals.last_success,
            **_named(FEEDBACK_FEATURES[1:], ops),
        },
    )


def observe_slots(
    signals: Signals, pairs: Tensor, specs: Sequence[FeatureSpec] = TRAVELLING_SLOT_FEATURES
) -> Tensor:
    """Return float32 [R, S, slot features]; all 0 where a slot is not enabled.

    Args:
        signals: the measurements.
        pairs: the result of `observe_pairs`.
        specs: the features.
    """
    scale = Scale.of(signals)
    exists, active = signals.enabled, signals.occupied & signals.enabled
    place = exists.cumsum(1) - 1
    last = place.amax(1, keepdim=True)
    left = scale.left[:, None]
    measured = active & signals.contribution.isfinite()
    error = torch.where(signals.contribution_se > 0, signals.contribution_se, torch.inf)
    weight = torch.where(measured, signals.alpha, 0.0)
    before = weight.cumsum(1) - weight
    host_params = signals.host_params.clamp(min=1)[:, None]
    host_flops = signals.host_flops.clamp(min=1)[:, None]
    horizon = signals.max_epochs.float()[:, None]
    fits = pairs[..., PAIR_INDEX["fits"]] > 0
    interaction = torch.where(active[:, :, None], signals.interaction, 0.0)
    own = {
        "exists": exists,
        "depth": place / last.clamp(min=1),
        "is_first": place == 0,
        "is_last": place == last,
        **{f"topology_{t}": signals.slot_topology == i for i, t in enumerate(TOPOLOGIES)},
        "channels": signals.slot_channels.clamp(min=1).float().log(),
        "positions": signals.slot_positions.clamp(min=1).float().log(),
        "fitting": torch.log1p(fits.sum(-1).float()),
        "fitting_share": fits.float().mean(-1),
        "cheapest_params": _cheapest(pairs, "params", fits),
        "cheapest_flops": _cheapest(pairs, "flops", fits),
    }
    seed = {
        "is_active": active,
        **_named(_spec_range("stage_"), _one_hot(signals.stage, SeedStage)),
        "alpha": signals.alpha,
        "alpha_target": signals.alpha_target,
        **_named(_spec_range("mode_"), _one_hot(signals.alpha_mode, AlphaMode)),
        **_named(_spec_range("algorithm_"), _one_hot(signals.algorithm, AlphaAlgorithm)),
        "alpha_velocity": signals.alpha_velocity,
        "time_to_target": torch.log1p(signals.time_to_target),
        "epochs_in_stage": torch.log1p(signals.epochs_in_stage.clamp(min=0).float()),
        "age": torch.log1p(signals.age.clamp(min=0).float()),
        "measured": measured,
        "freshness": torch.where(measured, FRESHNESS_DECAY**signals.counterfactual_age, 0.0),
        "contribution": torch.where(measured, signals.contribution / left, 0.0),
        "contribution_noise": torch.where(measured, signals.contribution / error, 0.0),
        "contribution_velocity": torch.where(measured, signals.contribution_velocity / left, 0.0),
        "interaction_sum": interaction.sum(-1) / left,
        "boost_received": interaction.amax(-1) / left,
        "upstream_alpha": before,
        "downstream_alpha": weight.sum(1, keepdim=True) - weight - before,
        "grad_norm": torch.log1p(signals.grad_norm),
        "grad_health": signals.grad_health,
        "grad_health_prev": signals.grad_health_prev,
        "has_vanishing": signals.vanishing,
        "has_exploding": signals.exploding,
        "params_share": torch.log1p(signals.slot_params / host_params),
        "flops_share": torch.log1p(signals.slot_flops / host_flops),
        "time_to_target_share": signals.time_to_target / horizon,
        "in_stage_share": signals.epochs_in_stage.clamp(min=0) / horizon,
        "age_share": signals.age.clamp(min=0) / horizon,
        "step_share": signals.slot_flops / signals.flops.clamp(min=1)[:, None],
    }
    seed = {name: torch.where(active, value, 0) for name, value in seed.items()}
    return torch.where(exists.unsqueeze(-1), _columns(specs, {**own, **seed}), 0.0)


def observe_pairs(signals: Signals, specs: Sequence[FeatureSpec] = PAIR_FEATURES) -> Tensor:
    """Return float32 [R, S, B, pair features]; 0 where a blueprint does not fit a slot."""
    cost, work = signals.seed_params, signals.seed_flops
    names = torch.arange(cost.shape[-1], device=cost.device)
    fits = (cost >= 0) & signals.enabled.unsqueeze(-1) & (names != NOOP)
    fits = fits & _within(signals.params, cost, signals.param_limit)
    fits = fits & _within(signals.flops, work, signals.flop_limit)
    host_params = signals.host_params[:, None, None]
    host_flops = signals.host_flops[:, None, None]
    values = {
        "fits": fits,
        "params": _log_cost(cost, host_params),
        "flops": _log_cost(work, host_flops),
        "step_cost": torch.log1p(work.clamp(min=0) / signals.flops.clamp(min=1)[:, None, None]),
    }
    return torch.where(fits.unsqueeze(-1), _columns(specs, values), 0.0)


def _columns(specs: Sequence[FeatureSpec], values: Mapping[str, Tensor]) -> Tensor:
    """Return [..., features] in the order of the specs, divided by their units and clamped."""
    columns = torch.stack([values[spec.name].float() for spec in specs], dim=-1)
    unit, low, high = _ranges(tuple(specs), columns.device)
    return torch.minimum(torch.maximum(columns / unit, low), high)


@lru_cache(maxsize=16)
def _ranges(specs: tuple[FeatureSpec, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit, lowest and highest value of every feature."""
    # They are cached, so they must be ordinary tensors even when made in inference mode.
    with torch.inference_mode(False):
        columns = [(spec.unit, spec.low, spec.high) for spec in specs]
        unit, low, high = torch.tensor(columns, device=device).unbind(1)
        return unit, low, high


@lru_cache(maxsize=16)
def _members(kind: type[IntEnum], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor([int(member) for member in kind], device=device)


def _one_hot(values: Tensor, kind: type[IntEnum]) -> Tensor:
    """Return bool [..., members]: the one-hot of each value; all False for an unknown value."""
    return values.unsqueeze(-1) == _members(kind, values.device)


def _named(specs: Sequence[FeatureSpec], bits: Tensor) -> dict[str, Tensor]:
    """Return the columns of one-hots [..., members] under the names of these features."""
    names = [spec.name for spec in specs]
    return dict(zip(names, bits.unbind(-1), strict=True))


@lru_cache(maxsize=8)
def _spec_range(prefix: str) -> tuple[FeatureSpec, ...]:
    return tuple(spec for spec in TRAVELLING_SLOT_FEATURES if spec.name.startswith(prefix))


def _check_codes(signals: Signals, active: Tensor, ops: Tensor) -> None:
    """Raise where a stage, a blueprint or an op does not exist."""
    stages = _one_hot(signals.stage, SeedStage).any(-1)
    count = torch.count_nonzero
    check_codes(
        signals,
        expected=2 * count(active) + len(ops),
        found=count(stages & active) + count((signals.blueprint >= 0) & active) + count(ops),
    )


def _noise(history: Tensor, left: Tensor) -> Tensor:
    """Return the root mean square of the known differences in a history [R, 5]; [R]."""
    steps = history.diff(dim=1)
    known = steps.isfinite()
    squares = torch.where(known, steps, 0.0).square().sum(1)
    found = (squares / known.sum(1).clamp(min=1)).sqrt()
    # With fewer than two epochs there is no noise to measure: changes read as small.
    found = torch.where(known.any(1), found, left)
    return torch.maximum(found, _LEAST_NOISE * left)


def _log_share(share: Tensor) -> Tensor:
    return share.clamp(min=LEAST_SHARE).log()


def _known(values: Tensor) -> Tensor:
    """Return the values with 0 where there is none."""
    return torch.where(values.isnan(), 0.0, values)


def _change(before: Tensor, now: Tensor) -> Tensor:
    """Return how much larger a logarithm was before; 0 where it was not known."""
    return _known(before - now)


def _first_known(history: Tensor) -> Tensor:
    """Return the oldest known entry of every history [R, 5]; NaN where there is none."""
    first = history.isfinite().to(torch.uint8).argmax(1, keepdim=True)
    return history.gather(1, first).squeeze(1)


def _limit(name: str, used: Tensor, limit: Tensor, host: Tensor) -> dict[str, Tensor]:
    """Return the features of a limit; without one, nothing is used and `NO_LIMIT` is left."""
    limited = limit >= 0
    most = limit.clamp(min=1).float()
    left = torch.log1p((most - used).clamp(min=0) / host)
    return {
        f"{name}_limited": limited,
        f"{name}_limit_used": torch.where(limited, used / most, 0.0),
        f"{name}_limit_left": torch.where(limited, left, NO_LIMIT),
    }


def _within(used: Tensor, cost: Tensor, limit: Tensor) -> Tensor:
    """Return bool [R, S, B]: whether what a seed costs is within a limit [R], -1 for none."""
    total, most = used[:, None, None] + cost, limit[:, None, None]
    return (most < 0) | (total <= most)


def _log_cost(cost: Tensor, host: Tensor) -> Tensor:
    """Return the logarithm of a cost relative to the host's; 0 where the host's is not known."""
    share = cost.clamp(min=1) / host.clamp(min=1)
    return torch.where(host > 0, share.log(), 0.0)


def _cheapest(pairs: Tensor, name: str, fits: Tensor) -> Tensor:
    """Return the logarithm of the least cost [R, S] of what fits; 0 where nothing does."""
    index = PAIR_INDEX[name]
    least = torch.where(fits, pairs[..., index], torch.inf).amin(-1)
    return torch.where(fits.any(-1), least * PAIR_FEATURES[index].unit, 0.0)


assert max(PAST) < HISTORY
