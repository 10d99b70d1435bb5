"""Panics on hand-made series of losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from esper.kasmina.signals import GovernorConfig, GovernorState, Panic, govern, start_governing

CHANCE = math.log(10)
CONFIG = GovernorConfig()


def run(losses: Sequence[float], chance: float = CHANCE, **changes: float) -> list[Panic]:
    """Return what the governor says of one row, epoch by epoch."""
    config = CONFIG.replace(**changes)
    state, said = start_governing(1), []
    for loss in losses:
        state, panic = govern(state, torch.tensor([loss], dtype=torch.float64), chance, config)
        said.append(Panic(int(panic[0])))
    return said


def first_panic(losses: Sequence[float], **changes: float) -> tuple[int, Panic] | None:
    said = run(losses, **changes)
    return next(((n, panic) for n, panic in enumerate(said) if panic), None)


LEARNED = [1.9, 1.5, 1.2, 1.0, 0.9, 0.8, 0.7, 0.6, 0.55, 0.5]


@pytest.mark.parametrize("seed", range(5))
def test_healthy_noise_never_panics(seed: int) -> None:
    noise = torch.randn(150, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    learning = [CHANCE * math.exp(-epoch / 30) + 0.2 for epoch in range(150)]
    losses = [
        max(0.01, loss * (1 + 0.3 * float(n))) for loss, n in zip(learning, noise, strict=True)
    ]
    said = run(losses)
    # A host that has learned and lands on the chance loss to within 6.5 % is lobotomised by
    # definition; noise of 30 % does not get there once it has learned.
    assert not any(said)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("before", [[], LEARNED])
def test_a_loss_that_is_not_finite_is_a_panic_at_once(loss: float, before: list[float]) -> None:
    assert first_panic([*before, loss]) == (len(before), Panic.NOT_FINITE)


def test_a_network_that_forgets_everything_is_lobotomised() -> None:
    assert first_panic([*LEARNED, CHANCE * 1.01]) == (10, Panic.LOBOTOMY)
    assert first_panic([*LEARNED, CHANCE * 0.94]) == (10, Panic.LOBOTOMY)
    # Far beyond chance, or clearly below it, is something else.
    assert first_panic([*LEARNED, CHANCE * 1.1]) is None
    assert first_panic([*LEARNED, CHANCE * 0.9]) is None
    # It must have been well below chance before, for at least ten epochs.
    assert first_panic([*LEARNED[1:], CHANCE]) is None
    assert first_panic([CHANCE * 0.7] * 30 + [CHANCE]) is None


def test_three_exploded_losses_in_a_row_are_a_divergence() -> None:
    assert first_panic([*LEARNED, 50.0, 60.0, 70.0]) == (12, Panic.DIVERGENCE)
    assert first_panic([*LEARNED, 50.0, 60.0, 0.5, 70.0, 80.0, 0.5]) is None
    assert first_panic([*LEARNED, 50.0], patience=1) == (10, Panic.DIVERGENCE)


@pytest.mark.parametrize(
    "losses",
    [
        [0.5] * 10 + [11.9] * 5,  # below the absolute threshold
        [20.0, 21.0] * 10 + [50.0] * 5,  # below three times the mean
        [1.0, 40.0] * 10 + [70.0] * 5,  # within six standard deviations
        [50.0] * 9,  # too few epochs to judge
    ],
)
def test_each_condition_of_a_divergence_is_needed(losses: list[float]) -> None:
    assert first_panic(losses) is None


def test_anomalies_do_not_become_normal() -> None:
    state = start_governing(1)
    for loss in (*LEARNED, 50.0, 60.0):
        state, _ = govern(state, torch.tensor([loss], dtype=torch.float64), CHANCE, CONFIG)
    known = state.losses[0][torch.isfinite(state.losses[0])]
    assert known.tolist() == LEARNED
    assert int(state.anomalies[0]) == 2
    state, panic = govern(state, torch.tensor([70.0], dtype=torch.float64), CHANCE, CONFIG)
    assert int(panic[0]) == Panic.DIVERGENCE
    assert int(state.anomalies[0]) == 0, "a panic starts the count anew"


def test_a_window_of_losses_is_remembered() -> None:
    state = start_governing(1)
    for loss in range(23):
        state, _ = govern(state, torch.tensor([float(loss)], dtype=torch.float64), 999.0, CONFIG)
    assert state.losses[0].tolist() == [float(loss) for loss in range(3, 23)]


def test_rows_are_judged_apart() -> None:
    series = [[*LEARNED, 0.5], [*LEARNED, math.nan], [*LEARNED, CHANCE], [*LEARNED, 50.0]]
    state = start_governing(4)
    for losses in zip(*series, strict=True):
        state, panic = govern(state, torch.tensor(losses, dtype=torch.float64), CHANCE, CONFIG)
    assert panic.tolist() == [Panic.NONE, Panic.NOT_FINITE, Panic.LOBOTOMY, Panic.NONE]
    assert state.anomalies.tolist() == [0, 0, 0, 1]


def test_the_state_is_plain_tensors() -> None:
    state = start_governing(3)
    state, _ = govern(state, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), CHANCE, CONFIG)
    again = GovernorState.from_state_dict(state.state_dict())
    assert torch.equal(again.losses[:, -1], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert state.select(torch.tensor([2])).losses[0, -1] == 3.0
