"""Contributions of all rows at once against the estimator of a single network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.kasmina.contribution import (
    Measured,
    compare_rows,
    estimate_contributions,
    plan_ablations,
    plan_differences,
)
from tests.plots import contribution_tensors, same

PATTERNS = [
    (False, False, False, False, False),
    (True, False, False, False, False),
    (False, True, False, True, False),
    (True, True, True, False, False),
    (True, True, False, True, True),
    (True, True, True, True, True),
]


def draw(rows: list[tuple[bool, ...]], samples: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return plans, losses and values of every configuration."""
    plans = [plan_ablations(row) for row in rows]
    total = sum(map(len, plans))
    generator = torch.Generator().manual_seed(4)
    loss = torch.rand((total, samples), generator=generator)
    return plans, loss, 100 * torch.rand((total, samples), generator=generator).double()


def test_every_row_is_estimated_as_a_network_alone() -> None:
    plans, loss, values = draw(PATTERNS, 40)
    found = compare_rows(torch.tensor(PATTERNS), plans, loss, values)()
    names = ("a", "b", "c", "d", "e")
    start = 0
    for row, (pattern, plan) in enumerate(zip(PATTERNS, plans, strict=True)):
        own = slice(start, start + len(plan))
        start += len(plan)
        alone = estimate_contributions(plan, values[own], pattern, names)
        worth, error, interaction = contribution_tensors(alone, names)
        assert found.score[row] == alone.score.value
        assert found.loss[row] == loss[own][0].double().mean()
        torch.testing.assert_close(found.worth[row], worth[0], rtol=1e-12, atol=0, equal_nan=True)
        torch.testing.assert_close(found.error[row], error[0], rtol=1e-12, atol=0, equal_nan=True)
        torch.testing.assert_close(found.interaction[row], interaction[0], rtol=1e-10, atol=1e-10)


def test_a_row_is_the_same_to_the_bit_alone_and_among_others() -> None:
    rows = [PATTERNS[number % len(PATTERNS)] for number in range(30)]
    plans, loss, values = draw(rows, 100)
    together = compare_rows(torch.tensor(rows), plans, loss, values)()
    start = 0
    for row, plan in enumerate(plans):
        own = slice(start, start + len(plan))
        start += len(plan)
        alone = compare_rows(torch.tensor(rows[row : row + 1]), [plan], loss[own], values[own])()
        for name in Measured.__slots__:
            assert same(getattr(together, name)[row], getattr(alone, name)[0]), (row, name)


def test_one_sample_has_no_standard_error() -> None:
    plans, loss, values = draw(PATTERNS[1:2], 1)
    found = compare_rows(torch.tensor(PATTERNS[1:2]), plans, loss, values)()
    assert bool(torch.isfinite(found.worth[0, 0]))
    assert bool(torch.isnan(found.error[0, 0]))


def test_a_row_that_is_not_finite_stays_alone() -> None:
    plans, loss, values = draw(PATTERNS, 20)
    clean = compare_rows(torch.tensor(PATTERNS), plans, loss, values)()
    first = len(plans[0]) + len(plans[1])
    for tensor in (loss, values):
        tensor[first : first + len(plans[2])] = torch.nan
    spoiled = compare_rows(torch.tensor(PATTERNS), plans, loss, values)()
    assert not bool(torch.isfinite(spoiled.loss[2]))
    others = torch.tensor([row for row in range(len(PATTERNS)) if row != 2])
    for name in Measured.__slots__:
        assert same(getattr(clean, name)[others], getattr(spoiled, name)[others]), name


@pytest.mark.parametrize("pattern", PATTERNS)
def test_comparisons_point_into_the_plan(pattern: tuple[bool, ...]) -> None:
    plan = plan_ablations(pattern).tolist()
    seeds = [slot for slot, member in enumerate(pattern) if member]

    def on(configuration: int) -> set[int]:
        return {slot for slot in seeds if plan[configuration][slot]}

    found = plan_differences(pattern)
    assert [slots for slots in found if len(slots) == 1] == [(slot,) for slot in seeds]
    assert len(found) == len(seeds) * (len(seeds) + 1) // 2
    for slots, places in found.items():
        everyone, chosen = set(seeds), set(slots)
        solo = [everyone, everyone - chosen]
        pair = [chosen, *({slot} for slot in slots), set()]
        assert [on(place) for place in places] == (solo if len(slots) == 1 else pair)
