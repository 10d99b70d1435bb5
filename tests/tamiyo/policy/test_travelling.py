from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.leyline.signals import Signals
from esper.leyline.slots import BUILTIN_BLUEPRINTS, NOOP
from esper.leyline.stages import SeedStage
from esper.tamiyo.policy.layout import (
    HOST_INDEX,
    NO_LIMIT,
    PAIR_INDEX,
    TRAVELLING_SLOT_FEATURES,
    TRAVELLING_SLOT_INDEX,
)
from esper.tamiyo.policy.observation import TravellingLayout
from esper.tamiyo.policy.travelling import observe_host, observe_pairs, observe_slots
from esper.testing.controllers import random_signals

LAYOUT = TravellingLayout(3, len(BUILTIN_BLUEPRINTS))


def some(rows: int = 40, seed: int = 0) -> Signals:
    return random_signals(rows, 3, torch.Generator().manual_seed(seed))[0]


def told(signals: Signals, **changes: Any) -> Signals:
    """Return the signals with some fields of every row set to a number."""
    filled = {
        name: torch.full_like(getattr(signals, name), value) for name, value in changes.items()
    }
    return replace(signals, **filled)


def host(signals: Signals, name: str) -> Tensor:
    return observe_host(signals)[:, HOST_INDEX[name]]


def slot(signals: Signals, name: str) -> Tensor:
    return observe_slots(signals, observe_pairs(signals))[..., TRAVELLING_SLOT_INDEX[name]]


def pair(signals: Signals, name: str) -> Tensor:
    return observe_pairs(signals)[..., PAIR_INDEX[name]]


@pytest.mark.parametrize("seed", range(8))
def test_every_number_is_finite_and_within_its_range(seed: int) -> None:
    numbers, blueprints = LAYOUT.observe(some(seed=seed))
    assert numbers.shape == (40, LAYOUT.size)
    assert blueprints.shape == (40, 3)
    low = torch.tensor([spec.low for spec in LAYOUT.specs])
    high = torch.tensor([spec.high for spec in LAYOUT.specs])
    assert bool((torch.isfinite(numbers) & (numbers >= low) & (numbers <= high)).all())


def test_what_nobody_knows_is_neutral_and_marked() -> None:
    signals = told(
        some(),
        train_loss=math.nan,
        learning_rate=math.nan,
        chance_loss=math.nan,
        train_samples=0,
        samples_per_epoch=0,
        num_classes=0,
        flops=0,
        host_flops=0,
        slot_flops=0,
        slot_channels=0,
        slot_positions=0,
        slot_topology=-1,
        seed_flops=0,
        param_limit=-1,
        flop_limit=-1,
    )
    assert bool(torch.isfinite(LAYOUT.observe(signals)[0]).all())
    for name in ("train_known", "rate_known", "chance_known", "samples_known", "flops_known"):
        assert not host(signals, name).any(), name
    for name in ("train_loss", "generalization_gap", "learning_rate", "train_samples", "passes"):
        assert not host(signals, name).any(), name
    assert not host(signals, "param_limited").any()
    assert not host(signals, "param_limit_used").any()
    assert bool((host(signals, "param_limit_left") == NO_LIMIT).all())
    topologies = [
        index for index, spec in enumerate(TRAVELLING_SLOT_FEATURES) if "topology" in spec.name
    ]
    assert not observe_slots(signals, observe_pairs(signals))[..., topologies].any()


# ------------------------------------------------------------------------------- what numbers mean


def test_losses_are_relative_to_guessing() -> None:
    signals = told(some(), val_loss=0.5, train_loss=0.25, chance_loss=2.0)
    torch.testing.assert_close(host(signals, "loss"), torch.full((40,), math.log(0.25) / 2))
    torch.testing.assert_close(host(signals, "train_loss"), torch.full((40,), math.log(0.125) / 2))
    torch.testing.assert_close(host(signals, "generalization_gap"), torch.full((40,), math.log(2)))


@pytest.mark.parametrize(
    ("score", "classes", "error"), [(80.0, 10, 0.2 / 0.9), (80.0, 0, 0.2), (55.0, 2, 0.9)]
)
def test_errors_are_relative_to_guessing(score: float, classes: int, error: float) -> None:
    signals = told(some(), val_score=score, best_score=score, num_classes=classes)
    torch.testing.assert_close(host(signals, "error"), torch.full((40,), math.log(error) / 2))
    assert bool(host(signals, "is_accuracy").all())


def test_a_score_that_is_a_negative_loss_is_an_error_by_itself() -> None:
    signals = told(some(), val_score=-1.5, best_score=-1.2, chance_loss=3.0)
    torch.testing.assert_close(host(signals, "error"), torch.full((40,), math.log(0.5) / 2))
    torch.testing.assert_close(host(signals, "best_error"), torch.full((40,), math.log(0.4) / 2))
    assert not host(signals, "is_accuracy").any()


def test_an_observation_does_not_depend_on_the_units_of_the_task() -> None:
    """Ten times the parameters and operations of everything: the same shares."""
    signals = some()
    counts = ("params", "host_params", "budget", "flops", "host_flops", "slot_params", "slot_flops")
    larger = {name: 10 * getattr(signals, name) for name in counts}
    for name in ("seed_params", "seed_flops", "param_limit", "flop_limit"):
        value = getattr(signals, name)
        larger[name] = torch.where(value > 0, 10 * value, value)
    larger["train_samples"] = 10 * signals.train_samples
    larger["samples_per_epoch"] = 10 * signals.samples_per_epoch
    one, other = LAYOUT.observe(signals)[0], LAYOUT.observe(replace(signals, **larger))[0]
    sizes = ("params", "flops", "train_samples")
    moved = [HOST_INDEX[name] for name in sizes]
    kept = torch.ones(LAYOUT.size, dtype=torch.bool)
    kept[moved] = False
    torch.testing.assert_close(one[:, kept], other[:, kept])
    torch.testing.assert_close(other[:, moved] - one[:, moved], torch.full((40, 3), 0.230259))


def test_changes_are_told_in_units_of_their_own_noise() -> None:
    """Scores that move ten times as much are no more surprising."""
    history = torch.tensor([50.0, 52.0, 51.0, 53.0, 52.5]).expand(40, -1)
    signals = replace(told(some(), val_score=52.5, best_score=53.0), score_history=history)
    steps = history[0].diff()
    noise = float(steps.square().mean().sqrt())
    torch.testing.assert_close(host(signals, "score_step"), torch.full((40,), -0.5 / noise / 2))
    torch.testing.assert_close(host(signals, "score_trend"), torch.full((40,), 2.5 / noise / 2))
    wide = replace(
        told(signals, val_score=25.0, best_score=30.0),
        score_history=torch.tensor([0.0, 20.0, 10.0, 30.0, 25.0]).expand(40, -1),
    )
    torch.testing.assert_close(host(wide, "score_step"), host(signals, "score_step"))
    torch.testing.assert_close(host(wide, "below_best"), host(signals, "below_best"))


def test_the_first_epoch_has_no_past() -> None:
    unknown = torch.full((40, 5), torch.nan)
    signals = some()
    scores, losses = unknown.clone(), unknown.clone()
    scores[:, -1], losses[:, -1] = signals.val_score, signals.val_loss
    signals = replace(signals, score_history=scores, loss_history=losses)
    for name in ("score_step", "score_trend", "loss_change_1", "error_change_4"):
        assert not host(signals, name).any(), name


def test_limits_say_what_is_used_and_what_is_left() -> None:
    signals = told(some(), params=1_500, host_params=1_000, param_limit=3_000)
    assert bool((host(signals, "param_limit_used") == 0.5).all())
    torch.testing.assert_close(host(signals, "param_limit_left"), torch.full((40,), math.log(2.5)))


def test_passes_over_the_data_count_what_an_epoch_sees() -> None:
    signals = told(some(), epoch=10, max_epochs=40, train_samples=500, samples_per_epoch=100)
    torch.testing.assert_close(host(signals, "passes"), torch.full((40,), math.log(3) / 3))
    torch.testing.assert_close(host(signals, "passes_left"), torch.full((40,), math.log(7) / 3))


# ---------------------------------------------------------------------------- slots and blueprints


def test_a_place_is_told_among_the_slots_that_are_there() -> None:
    signals = some(4)
    enabled = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 0], [0, 1, 1]], dtype=torch.bool)
    signals = replace(signals, enabled=enabled, occupied=signals.occupied & enabled)
    assert slot(signals, "depth").tolist() == [[0, 0.5, 1], [0, 0, 1], [0, 0, 0], [0, 0, 1]]
    assert slot(signals, "is_first").tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert slot(signals, "is_last").tolist() == [[0, 0, 1], [0, 0, 1], [0, 1, 0], [0, 0, 1]]


def test_a_slot_that_is_not_there_is_zero_throughout() -> None:
    signals = some()
    numbers = observe_slots(signals, observe_pairs(signals))
    assert not numbers[~signals.enabled].any()
    assert not observe_pairs(signals)[~signals.enabled].any()
    empty = signals.enabled & ~signals.occupied
    assert not numbers[empty][:, TRAVELLING_SLOT_INDEX["is_active"] :].any()
    assert bool(numbers[empty][:, TRAVELLING_SLOT_INDEX["exists"]].all())


def test_contributions_are_shares_of_what_is_left_to_gain() -> None:
    signals = told(some(), val_score=80.0, best_score=80.0)
    measured = signals.enabled & signals.occupied & ~signals.contribution.isnan()
    assert bool(measured.any())
    found = slot(signals, "contribution")
    torch.testing.assert_close(found[measured], (signals.contribution / 20.0)[measured])
    assert not found[~measured].any()
    assert torch.equal(slot(signals, "measured").bool(), measured)


def test_costs_are_relative_to_the_host_and_only_of_what_fits() -> None:
    signals = told(some(), param_limit=-1, flop_limit=-1)
    fits = (signals.seed_params >= 0) & signals.enabled.unsqueeze(-1)
    fits[..., NOOP] = False
    assert torch.equal(pair(signals, "fits").bool(), fits)
    share = signals.seed_params / signals.host_params[:, None, None]
    wanted = share.log().clamp(-9, 3) / 3
    torch.testing.assert_close(pair(signals, "params")[fits], wanted[fits])
    assert not pair(signals, "params")[~fits].any()


def test_what_would_break_a_limit_does_not_fit() -> None:
    signals = told(some(), params=1_000, param_limit=1_100, flop_limit=-1)
    affordable = (signals.seed_params >= 0) & (signals.seed_params <= 100)
    affordable[..., NOOP] = False
    wanted = affordable & signals.enabled.unsqueeze(-1)
    assert torch.equal(pair(signals, "fits").bool(), wanted)
    none = told(signals, param_limit=1_000)
    assert not (pair(none, "fits").bool() & (signals.seed_params > 0)).any()


def test_stages_are_one_hot() -> None:
    signals = some()
    start = TRAVELLING_SLOT_INDEX["stage_unknown"]
    bits = observe_slots(signals, observe_pairs(signals))[..., start : start + len(SeedStage)]
    active = signals.enabled & signals.occupied
    assert torch.equal(bits.sum(-1) == 1, active)
    stages = torch.tensor([int(stage) for stage in SeedStage])
    assert torch.equal(stages[bits.argmax(-1)][active], signals.stage[active])


def test_strangers_are_refused() -> None:
    signals = some()
    active = signals.enabled & signals.occupied
    assert bool(active.any())
    with pytest.raises(UsageError, match="stage"):
        observe_host(replace(signals, stage=torch.where(active, 5, signals.stage)))
    with pytest.raises(UsageError, match="last_op must be 0 to 5, got 9"):
        observe_host(told(signals, last_op=9))
    with pytest.raises(UsageError, match="needs a blueprint id"):
        observe_host(told(signals, blueprint=-1))
