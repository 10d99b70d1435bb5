"""Signals about the host: histories, the plateau, the stabilisation latch."""

from __future__ import annotations

import math

import pytest
import torch

from esper.kasmina.tracking import TrackerConfig, TrackerState, start_tracking, track_epoch


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


@pytest.mark.parametrize("field", ["stable_gain", "stable_loss", "least_progress"])
def test_a_threshold_of_zero_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        TrackerConfig.from_mapping({field: 0.0})
