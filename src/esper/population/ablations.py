"""Contributions of all rows at once, from the per-sample values of every configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from esper.kasmina.contribution import plan_ablations


@dataclass(frozen=True, slots=True)
class Differences:
    """Which configurations to compare for one pattern of participating slots."""

    solo: tuple[tuple[int, int], ...]
    """(slot, configuration without it)."""
    pairs: tuple[tuple[int, int, int, int, int, int], ...]
    """(slot i, slot j, f({i, j}), f({i}), f({j}), f(none))."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the ablations of all rows say; float64 on the CPU."""

    loss: Tensor
    """[R], validation loss with every seed as it is."""
    score: Tensor
    """[R], in points."""
    worth: Tensor
    """[R, S], NaN where not measured."""
    error: Tensor
    """[R, S], NaN where not measured."""
    interaction: Tensor
    """[R, S, S], 0 where not measured."""


@lru_cache(maxsize=1024)
def plan_differences(members: tuple[bool, ...]) -> Differences:
    """Return the comparisons for these participating slots, by position in their plan."""
    seeds = [slot for slot, member in enumerate(members) if member]
    rows = plan_ablations(members).tolist()
    where = {frozenset(s for s in seeds if row[s]): k for k, row in enumerate(rows)}
    everyone = frozenset(seeds)
    solo = tuple((slot, where[everyone - {slot}]) for slot in seeds)
    pairs = tuple(
        (
            i,
            j,
            where[frozenset((i, j))],
            where[frozenset((i,))],
            where[frozenset((j,))],
            where[frozenset()],
        )
        for position, i in enumerate(seeds)
        for j in seeds[position + 1 :]
    )
    return Differences(solo, pairs)


def compare(members: Tensor, plans: Sequence[Tensor], loss: Tensor, values: Tensor) -> Measured:
    """Estimate all rows' contributions; loss and values are [sum of K, M], on any device.

    Everything is computed where the values are; one small block comes back.
    """
    rows, slots = members.shape
    starts, total = [], 0
    for plan in plans:
        starts.append(total)
        total += len(plan)
    solo_at: list[tuple[int, int]] = []
    solo: list[tuple[int, int]] = []
    pair_at: list[tuple[int, int, int]] = []
    pairs: list[tuple[int, int, int, int]] = []
    for row, pattern in enumerate(members.tolist()):
        found, start = plan_differences(tuple(pattern)), starts[row]
        for slot, without in found.solo:
            solo_at.append((row, slot))
            solo.append((start, start + without))
        for i, j, both, first, second, none in found.pairs:
            pair_at.append((row, i, j))
            pairs.append((start + both, start + first, start + second, start + none))
    device = values.device
    main = torch.tensor(starts, device=device)
    parts = [loss[main].to(torch.float64).mean(1), values[main].mean(1)]
    if solo:
        index = torch.tensor(solo, device=device)
        difference = values[index[:, 0]] - values[index[:, 1]]
        parts += [difference.mean(1), _standard_error(difference)]
    if pairs:
        index = torch.tensor(pairs, device=device)
        means = values.mean(1)[index]
        parts.append(means[:, 0] - means[:, 1] - means[:, 2] + means[:, 3])
    block = torch.cat(parts).cpu()

    worth = torch.full((rows, slots), torch.nan, dtype=torch.float64)
    error = worth.clone()
    interaction = torch.zeros((rows, slots, slots), dtype=torch.float64)
    place = 2 * rows
    for number, (row, slot) in enumerate(solo_at):
        worth[row, slot] = block[place + number]
        error[row, slot] = block[place + len(solo_at) + number]
    place += 2 * len(solo_at)
    for number, (row, i, j) in enumerate(pair_at):
        interaction[row, i, j] = interaction[row, j, i] = block[place + number]
    return Measured(block[:rows], block[rows : 2 * rows], worth, error, interaction)


def _standard_error(samples: Tensor) -> Tensor:
    """Return the standard error [n] of the means of samples [n, M]; NaN with fewer than two.

    By two sums, not by `std`, whose last bits depend on how many rows there are.
    """
    count = samples.shape[1]
    if count < 2:
        return torch.full_like(samples[:, 0], torch.nan)
    spread = (samples - samples.mean(1, keepdim=True)).square().sum(1)
    return (spread / (count - 1) / count).sqrt()
