"""From the lifecycle's memory to what a controller sees."""

from __future__ import annotations

import math
from typing import Any

import torch

from esper.kasmina.signals import read_signals
from esper.kasmina.state import SlotState, empty_state
from esper.kasmina.tracking import TrackerConfig, start_tracking, track_epoch
from esper.leyline.alpha import AlphaMode
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import one_slot


def read(state: SlotState, losses: list[float] | None = None, **changes: Any) -> Signals:
    config = TrackerConfig()
    tracker = start_tracking(state.rows, config)
    for loss in losses or [2.0]:
        value = torch.full((state.rows,), loss, dtype=torch.float64)
        tracker = track_epoch(tracker, value, 10 * value, config)
    ones = torch.ones(state.rows, dtype=torch.int64)
    given = {
        "enabled": torch.ones(state.rows, state.num_slots, dtype=torch.bool),
        "max_epochs": 60 * ones,
        "host_params": 100 * ones,
        "budget": 500 * ones,
        "last_op": ones,
        "last_success": ones.bool(),
        "rolled_back": ~ones.bool(),
        "twin_score": torch.full((state.rows,), math.nan),
        **changes,
    }
    return read_signals(state, tracker, **given)


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
