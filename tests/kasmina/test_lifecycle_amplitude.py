"""Ramps of the amplitude: their curves, and that they never overshoot, turn back or stop short."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina.lifecycle import (
    ramp_fraction,
    retarget,
    tick_amplitude,
    time_to_target,
    velocity,
)
from esper.kasmina.state import SlotState
from esper.leyline.stages import AlphaCurve, AlphaMode, SeedStage
from tests.kasmina.gardens import one_slot

HERE = torch.tensor([[True]])


def aim(state: SlotState, target: float, steps: int, curve: AlphaCurve) -> SlotState:
    return retarget(
        state,
        HERE,
        torch.tensor([[target]], dtype=torch.float64),
        torch.tensor([[steps]]),
        torch.tensor([[int(curve)]]),
    )


def ramp(start: float, target: float, steps: int, curve: AlphaCurve) -> list[float]:
    """Every amplitude of a ramp, with its start."""
    state = aim(one_slot(SeedStage.BLENDING, alpha=start), target, steps, curve)
    values = [float(state.alpha)]
    while int(state.alpha_mode) != AlphaMode.HOLD:
        state, _ = tick_amplitude(state, HERE)
        values.append(float(state.alpha))
    return values


@pytest.mark.parametrize(
    ("curve", "values"),
    [
        (AlphaCurve.LINEAR, [0.2, 0.4, 0.6, 0.8]),
        (AlphaCurve.COSINE, [0.0955, 0.3455, 0.6545, 0.9045]),
        (AlphaCurve.SIGMOID_GENTLE, [0.104, 0.339, 0.661, 0.896]),
        (AlphaCurve.SIGMOID, [0.024, 0.230, 0.770, 0.976]),
        (AlphaCurve.SIGMOID_SHARP, [0.0007, 0.083, 0.917, 0.999]),
    ],
)
def test_five_steps_take_their_golden_values(curve: AlphaCurve, values: list[float]) -> None:
    first, *between, last = ramp(0.0, 1.0, 5, curve)
    assert (first, last) == (0.0, 1.0)
    assert between == pytest.approx(values, abs=5e-4)
    # The first value of the sharp curve is given to four digits.
    assert between[0] == pytest.approx(values[0], rel=0.07)


@pytest.mark.parametrize("curve", list(AlphaCurve))
def test_every_curve_runs_from_zero_to_one_symmetrically(curve: AlphaCurve) -> None:
    progress = torch.linspace(0, 1, 21, dtype=torch.float64)
    fraction = ramp_fraction(progress, torch.full((21,), int(curve)))
    assert fraction[0] == pytest.approx(0, abs=1e-12)
    assert fraction[-1] == pytest.approx(1, abs=1e-12)
    assert bool((fraction.diff() >= 0).all())
    torch.testing.assert_close(fraction + fraction.flip(0), torch.ones_like(fraction))


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 30), st.sampled_from(list(AlphaCurve)))
def test_a_ramp_is_monotone_and_ends_exactly_at_its_target(
    start: float, target: float, steps: int, curve: AlphaCurve
) -> None:
    values = ramp(start, target, steps, curve)
    pairs = list(itertools.pairwise(values))
    assert values[-1] == target
    assert all(one <= two for one, two in pairs) or all(one >= two for one, two in pairs)
    assert all(min(start, target) <= value <= max(start, target) for value in values)
    assert len(values) == (1 if start == target else steps + 1)


@pytest.mark.parametrize(("target", "mode"), [(0.9, AlphaMode.UP), (0.1, AlphaMode.DOWN)])
def test_the_mode_says_which_way_a_ramp_goes(target: float, mode: AlphaMode) -> None:
    state = aim(one_slot(SeedStage.BLENDING, alpha=0.5), target, 3, AlphaCurve.COSINE)
    assert int(state.alpha_mode) == mode
    assert float(state.alpha_start) == 0.5
    assert float(state.alpha_target) == target
    assert int(state.alpha_curve) == AlphaCurve.COSINE
    assert (int(state.steps_total), int(state.steps_done)) == (3, 0)


@pytest.mark.parametrize(("target", "steps"), [(0.9, 0), (0.5, 4)])
def test_zero_steps_or_no_distance_is_a_jump(target: float, steps: int) -> None:
    state = aim(one_slot(SeedStage.BLENDING, alpha=0.5), target, steps, AlphaCurve.SIGMOID)
    assert float(state.alpha) == target
    assert int(state.alpha_mode) == AlphaMode.HOLD
    assert int(state.steps_total) == 0


def test_only_the_masked_slots_move_and_reaching_is_reported_once() -> None:
    state = one_slot(SeedStage.BLENDING, alpha=0.2)
    assert float(retarget(state, ~HERE, *_to(0.9, 2)).alpha_target) == 0.0
    state = aim(state, 0.9, 2, AlphaCurve.LINEAR)
    still, reached = tick_amplitude(state, ~HERE)
    assert float(still.alpha) == 0.2
    assert not bool(reached)
    reports = []
    for _ in range(4):
        state, reached = tick_amplitude(state, HERE)
        reports.append(bool(reached))
    assert reports == [False, True, False, False]
    assert float(state.alpha) == 0.9


def test_velocity_and_time_to_target_follow_the_ramp_and_are_zero_in_hold() -> None:
    state = one_slot(SeedStage.BLENDING, alpha=1.0)
    assert (float(velocity(state)), int(time_to_target(state))) == (0.0, 0)
    state = aim(state, 0.5, 5, AlphaCurve.SIGMOID)
    state, _ = tick_amplitude(state, HERE)
    assert math.isclose(float(velocity(state)), -0.1)
    assert int(time_to_target(state)) == 4


def _to(target: float, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    goal = torch.tensor([[target]], dtype=torch.float64)
    return goal, torch.tensor([[steps]]), torch.tensor([[0]])
