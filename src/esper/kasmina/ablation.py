"""Which on/off configurations of the seeds to evaluate, each exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from esper.kasmina.state import SlotState
from esper.leyline.stages import SeedStage

FACTORIAL_LIMIT = 4
"""Up to this many seeds every subset is evaluated; beyond, subsets of up to two and all but one."""


def participating(state: SlotState, *, fossils: bool = False) -> Tensor:
    """Return bool [R, S]: the seeds whose contribution can be measured now.

    Fossils take part only when asked for: they stay whatever an ablation says.
    """
    blended = state.has_module & (state.alpha > 0)
    return blended if fossils else blended & (state.stage != int(SeedStage.FOSSILIZED))


def plan_ablations(members: Sequence[bool]) -> Tensor:
    """Return bool [K, S]: the configurations for these participating slots, all-on first.

    A slot that does not take part is on everywhere (it is left as it is).
    """
    return _plan(tuple(bool(member) for member in members)).clone()


@lru_cache(maxsize=1024)
def _plan(members: tuple[bool, ...]) -> Tensor:
    seeds = [index for index, member in enumerate(members) if member]
    count = len(seeds)
    if count <= FACTORIAL_LIMIT:
        sizes = list(range(count, -1, -1))
    else:
        sizes = sorted({count, count - 1, 2, 1, 0}, reverse=True)
    rows = []
    for size in sizes:
        for chosen in itertools.combinations(seeds, size):
            rows.append([not member or index in chosen for index, member in enumerate(members)])
    return torch.tensor(rows, dtype=torch.bool)
