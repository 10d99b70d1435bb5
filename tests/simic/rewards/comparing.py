"""Compares a vectorised reward with the reference, row by row and term by term."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from esper.leyline.signals import Signals
from esper.simic.rewards import RewardConfig, Transition, make_reward
from tests.simic.rewards.reference import RowReference, row_of

TOLERANCE = 2e-4
"""Scores are float32 of size 50, so differences of them carry about 1e-5."""


def assert_matches_reference(
    config: RewardConfig, first: Signals, transitions: Sequence[Transition]
) -> dict[str, int]:
    """Raise unless every term agrees in every row; return how often each term paid something."""
    reward = make_reward(config)
    reward.reset(first)
    references = [RowReference(config) for _ in range(first.rows)]
    for row, reference in enumerate(references):
        reference.reset(row_of(first, row))
    paid: dict[str, int] = {}
    for index, transition in enumerate(transitions):
        step = reward.step(transition)
        for row, reference in enumerate(references):
            expected = reference.step(transition, row)
            assert expected.keys() == step.terms.keys()
            for name, value in expected.items():
                got = float(step.terms[name][row])
                assert got == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), (
                    f"step {index}, row {row}, {name}: {got} instead of {value}"
                )
                paid[name] = paid.get(name, 0) + (value != 0)
    return paid
