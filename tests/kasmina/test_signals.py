"""From the lifecycle's memory to what a controller sees."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from esper.kasmina.signals import (
    TrackerConfig,
    TrackerState,
    read_signals,
    row_facts,
    start_tracking,
    track_epoch,
    unknown_rates,
)
from esper.kasmina.state import SlotState, empty_state
from esper.leyline.signals import Signals
from esper.leyline.stages import AlphaMode, SeedStage
from tests.kasmina.gardens import one_slot, plain_table


def read(state: SlotState, losses: list[float] | None = None, **changes: Any) -> Signals:
    config = TrackerConfig()
    tracker = start_tracking(state.rows, config)
    for loss in losses or [2.0]:
        value = torch.full((state.rows,), loss, dtype=torch.float64)
        tracker = track_epoch(tracker, value, 10 * value, config)
    ones = torch.ones(state.rows, dtype=torch.int64)
    given = {
        "train_loss": torch.full((state.rows,), math.nan),
        "spent": 0 * ones,
        "rates": unknown_rates,
        "last_op": ones,
        "last_success": ones.bool(),
        "rolled_back": ~ones.bool(),
        "twin_score": torch.full((state.rows,), math.nan),
        **changes,
    }
    return read_signals(
        plain_table(state), tracker, row_facts(state.rows, horizon=60, budget=500), **given
    )


def test_an_empty_slot_shows_the_absent_value_of_each_field() -> None:
    signals = read(empty_state(1, 2))
    for name in (
        "stage",
        "blueprint",
        "alpha_mode",
        "algorithm",
        "epochs_in_stage",
        "age",
        "counterfactual_age",
    ):
        assert getattr(signals, name).tolist() == [[-1, -1]], name
    for name in ("alpha", "alpha_target", "alpha_velocity", "grad_norm", "grad_health"):
        assert getattr(signals, name).tolist() == [[0.0, 0.0]], name
    for name in ("contribution", "contribution_se", "contribution_velocity"):
        assert bool(getattr(signals, name).isnan().all()), name
    assert not bool(signals.occupied.any())
    assert signals.slot_params.tolist() == [[0, 0]]


def test_a_seed_shows_what_is_known_of_it() -> None:
    state = one_slot(
        SeedStage.BLENDING,
        blueprint=3,
        alpha=0.5,
        alpha_start=0.0,
        alpha_target=1.0,
        alpha_mode=int(AlphaMode.UP),
        steps_total=4,
        steps_done=2,
        age=7,
        epochs_in_stage=2,
        params=40,
        contribution=1.5,
        contribution_se=0.5,
        contribution_velocity=-0.25,
        counterfactual_age=0,
        grad_norm=3.0,
        grad_health=0.75,
        vanishing=True,
    )
    signals = read(state)
    assert (int(signals.stage), int(signals.blueprint), int(signals.age)) == (4, 3, 7)
    assert (float(signals.alpha), float(signals.alpha_target)) == (0.5, 1.0)
    assert (float(signals.alpha_velocity), float(signals.time_to_target)) == (0.25, 2.0)
    assert (float(signals.contribution), float(signals.contribution_se)) == (1.5, 0.5)
    assert float(signals.contribution_velocity) == -0.25
    assert (float(signals.grad_norm), float(signals.grad_health)) == (3.0, 0.75)
    assert bool(signals.vanishing)
    assert not bool(signals.exploding)
    assert (int(signals.params), int(signals.host_params)) == (140, 100)


def test_a_seed_that_was_never_measured_has_no_contribution() -> None:
    signals = read(one_slot(SeedStage.TRAINING, age=3))
    assert bool(signals.contribution.isnan())
    assert bool(signals.contribution_velocity.isnan())
    assert int(signals.counterfactual_age) == -1


def test_a_cooling_slot_is_occupied_without_amplitude() -> None:
    signals = read(one_slot(SeedStage.EMBARGOED, cooldown=2))
    assert bool(signals.occupied)
    assert int(signals.stage) == SeedStage.EMBARGOED
    assert float(signals.alpha) == 0.0


def test_the_host_is_described_by_its_tracker() -> None:
    signals = read(empty_state(2, 1), [3.0, 1.0, 2.0])
    assert signals.epoch.tolist() == [3, 3]
    assert signals.val_loss.tolist() == [2.0, 2.0]
    assert signals.val_score.tolist() == [20.0, 20.0]
    assert signals.best_loss.tolist() == [1.0, 1.0]
    assert signals.best_score.tolist() == [30.0, 30.0]
    assert signals.loss_history[0, -3:].tolist() == [3.0, 1.0, 2.0]
    assert bool(signals.loss_history[0, :2].isnan().all())
    assert signals.plateau_epochs.tolist() == [2, 2]


def test_what_the_caller_knows_is_passed_on() -> None:
    signals = read(
        empty_state(1, 1), twin_score=torch.tensor([33.0]), rolled_back=torch.tensor([True])
    )
    assert signals.twin_score.tolist() == [33.0]
    assert signals.rolled_back.tolist() == [True]
    assert signals.budget.tolist() == [500]
    assert signals.max_epochs.tolist() == [60]
    assert signals.last_op.tolist() == [1]
    assert signals.last_success.tolist() == [True]


def track(
    losses: list[float], scores: list[float] | None = None, **config: float
) -> list[TrackerState]:
    """Every state of one host with these losses; without scores, their negatives."""
    settings = TrackerConfig(**config)  # type: ignore[arg-type]
    state = start_tracking(1, settings)
    states = [state]
    for index, loss in enumerate(losses):
        score = -loss if scores is None else scores[index]
        state = track_epoch(
            state,
            torch.tensor([loss], dtype=torch.float64),
            torch.tensor([score], dtype=torch.float64),
            settings,
        )
        states.append(state)
    return states


def latched_at(losses: list[float], **config: float) -> int | None:
    """The epoch at which the latch closes."""
    for epoch, state in enumerate(track(losses, **config)):
        if bool(state.stabilized):
            return epoch
    return None


def test_histories_hold_the_newest_last_and_nan_before() -> None:
    state = track([3.0, 2.0], [10.0, 20.0])[-1]
    assert int(state.epoch) == 2
    assert state.loss_history[0, -2:].tolist() == [3.0, 2.0]
    assert bool(state.loss_history[0, :3].isnan().all())
    assert track([9, 8, 7, 6, 5, 4, 3.0])[-1].loss_history.tolist() == [[7, 6, 5, 4, 3]]


def test_bests_and_the_first_loss_are_remembered() -> None:
    state = track([3.0, 1.0, 2.0], [10.0, 30.0, 20.0])[-1]
    assert (float(state.first_loss), float(state.best_loss), float(state.best_score)) == (3, 1, 30)


def test_a_plateau_counts_epochs_since_the_score_last_rose_half_a_point_above_its_best() -> None:
    scores = [50.0, 50.25, 51.0, 51.25, 50.0, 51.5, 52.0, 52.0]
    states = track([1.0] * len(scores), scores)[1:]
    assert [int(state.plateau_epochs) for state in states] == [0, 1, 0, 1, 2, 3, 0, 1]


def test_a_plateau_of_negative_losses_is_relative() -> None:
    states = track([2.0, 1.995, 1.985, 1.98])[1:]
    # Half a percent of the best loss: 0.01, then 0.009975.
    assert [int(state.plateau_epochs) for state in states] == [0, 1, 0, 1]


def test_the_latch_needs_three_stable_epochs_in_a_row() -> None:
    falling = [10.0, 9.0, 8.0, 7.0]
    # Mean gain over three epochs, relative to all progress: the last fast epoch leaves the window
    # three epochs later.
    assert latched_at([*falling, *[7.0] * 10]) == 9
    assert latched_at([*falling, *[7.0] * 10], stable_epochs=1) == 7
    assert latched_at([*falling, *[7.0] * 4]) is None


def test_a_constant_loss_is_stable_as_soon_as_it_can_be_seen() -> None:
    assert latched_at([5.0] * 10) == 6


def test_a_fast_fall_or_rise_keeps_the_latch_open() -> None:
    assert latched_at([10.0 - 0.5 * epoch for epoch in range(12)]) is None
    assert latched_at([1.0 + 0.5 * epoch for epoch in range(12)]) is None


@pytest.mark.parametrize(
    ("slope", "closes"), [(-0.029, True), (-0.031, False), (0.049, True), (0.051, False)]
)
def test_the_latch_closes_just_below_its_slopes(slope: float, closes: bool) -> None:
    """With a first loss of 100 and a best of 0, all progress is 100: a slope is in hundredths."""
    losses = [100.0, 0.0, *[50.0 + 100 * slope * epoch for epoch in range(7)]]
    assert latched_at(losses) == (8 if closes else None)


def test_an_unstable_epoch_starts_the_count_anew() -> None:
    losses = [10.0, 5.0, 5.0, 5.0, 5.0, 5.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    states = track(losses)
    runs = [int(state.stable_run) for state in states[1:]]
    assert max(runs[:7]) == 2
    assert runs[6] == 0
    assert bool(states[-1].stabilized)


def test_the_latch_never_opens_again() -> None:
    states = track([5.0] * 8 + [50.0, 1.0, 90.0])
    assert bool(states[6].stabilized)
    assert bool(states[-1].stabilized)


def test_zero_stable_epochs_close_the_latch_at_once() -> None:
    assert latched_at([], stable_epochs=0) == 0


def test_an_exponential_decay_closes_the_latch() -> None:
    losses = [2.3 * math.exp(-0.1 * epoch) for epoch in range(60)]
    epoch = latched_at(losses)
    assert epoch is not None
    assert 5 <= epoch <= 40


def test_rows_are_tracked_apart() -> None:
    config = TrackerConfig()
    state = start_tracking(2, config)
    for epoch in range(8):
        loss = torch.tensor([5.0, 5.0 - 0.5 * epoch], dtype=torch.float64)
        state = track_epoch(state, loss, -loss, config)
    assert state.stabilized.tolist() == [True, False]


def test_the_state_survives_a_state_dict() -> None:
    state = track([3.0, 2.0, 2.5])[-1]
    again = TrackerState.from_state_dict(state.state_dict())
    for name, value in state.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, equal_nan=True)


@pytest.mark.parametrize("field", ["stable_gain", "stable_loss"])
def test_a_threshold_of_zero_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        TrackerConfig.from_mapping({field: 0.0})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("first", [False, True])
def test_a_loss_that_is_not_finite_is_neither_first_nor_best(bad: float, first: bool) -> None:
    config = TrackerConfig()
    tracker = start_tracking(1, config)
    for loss in (bad, 2.0, 1.5) if first else (2.0, bad, 1.5):
        value = torch.tensor([loss], dtype=torch.float64)
        stuck = int(tracker.plateau_epochs)
        tracker = track_epoch(tracker, value, -value, config)
        if loss == bad:
            assert int(tracker.plateau_epochs) == stuck + 1
    assert (float(tracker.first_loss), float(tracker.best_loss)) == (2.0, 1.5)
    assert float(tracker.best_score) == -1.5
    assert int(tracker.epoch) == 3
    assert int(tracker.loss_history.isfinite().sum()) == 2
