from __future__ import annotations

import math

import pytest
import torch

from esper.leyline.randomness import derive_seed
from esper.simic.training.draws import draw_uniforms

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def test_draws_are_the_hash_of_their_counter() -> None:
    seed = derive_seed(5, 2, 7, "policy")
    expected = [
        (mixed((mixed((place * GOLDEN + seed) & MASK) + GOLDEN) & MASK) >> 40) / 2**24
        for place in range(3 * 8)
    ]
    assert draw_uniforms(3, 5, 2, 7, "policy").flatten().tolist() == expected


@pytest.mark.parametrize("rows", [1, 5, 256])
def test_a_row_draws_the_same_whatever_runs_beside_it(rows: int) -> None:
    alone = draw_uniforms(rows, 1, 2, 3)
    assert torch.equal(draw_uniforms(300, 1, 2, 3)[:rows], alone)


def test_draws_are_even_and_below_one() -> None:
    draws = torch.cat([draw_uniforms(256, 0, 0, step) for step in range(100)]).flatten().double()
    assert float(draws.min()) >= 0.0
    assert float(draws.max()) < 1.0
    # Kolmogorov and Smirnov: the largest distance to the even distribution.
    ordered = draws.sort().values
    ideal = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    assert float((ordered - ideal).abs().max()) < 2.0 / math.sqrt(len(ordered))


@pytest.mark.parametrize(
    ("one", "other"), [((0, 0, 0), (0, 0, 1)), ((0, 0, 0), (0, 1, 0)), ((0, 0, 0), (1, 0, 0))]
)
def test_neighbouring_keys_have_nothing_in_common(
    one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    first, second = draw_uniforms(4096, *one).flatten(), draw_uniforms(4096, *other).flatten()
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
    assert abs(float(correlation)) < 0.02


def test_neighbouring_rows_and_heads_have_nothing_in_common() -> None:
    draws = draw_uniforms(20_000, 9)
    by_head = torch.corrcoef(draws.T) - torch.eye(8)
    assert float(by_head.abs().max()) < 0.03
    by_row = torch.corrcoef(torch.stack([draws[:-1].flatten(), draws[1:].flatten()]))[0, 1]
    assert abs(float(by_row)) < 0.01
