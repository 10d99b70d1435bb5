"""Timing: the clock of a device, and two ways of the same work taking turns.

A slow moment of the machine hits both sides of a pair, so ratios are taken between neighbours and
their median is reported. Every measurement of this package that has a reference is made here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

from esper.leyline.records import Plain

Work = Callable[[], object]


class Seconds(NamedTuple):
    """What a call took, by the wall clock and by the time of the thread itself."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Comparison(Plain):
    """Two ways of the same work, timed by turns; ratios say how many times faster the first is."""

    work: str
    """`step`, `plain_step`, `update` or `captured_step`."""
    reference: str
    """What it was compared with."""
    esper_ms: float
    reference_ms: float
    ratio: float
    """The median of the ratios of neighbours, by the wall clock."""
    least_ratio: float
    greatest_ratio: float
    cpu_ratio: float
    """The same median by the time of the thread itself; on a GPU that is the launching alone."""


def now(device: torch.device) -> float:
    """Return the time once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def take_turns(
    ours: Work,
    reference: Work,
    *,
    rounds: int,
    calls: int = 1,
    reference_calls: int = 1,
    device: str = "cpu",
) -> list[tuple[Seconds, Seconds]]:
    """Return what one call of each took in every round; several calls may be timed together."""
    where = torch.device(device)

    def timed(work: Work, calls: int) -> Seconds:
        wall, own = time.perf_counter(), time.thread_time()
        for _ in range(calls):
            work()
        return Seconds((now(where) - wall) / calls, (time.thread_time() - own) / calls)

    # The first turn only warms up.
    turns = range(rounds + 1)
    return [(timed(ours, calls), timed(reference, reference_calls)) for _ in turns][1:]


def compare(
    name: str,
    ours: Work,
    reference: Work,
    *,
    against: str,
    rounds: int,
    calls: int = 1,
    device: str = "cpu",
) -> Comparison:
    """Let both take turns and say how many times faster the first is."""
    pairs = take_turns(
        ours, reference, rounds=rounds, calls=calls, reference_calls=calls, device=device
    )
    ratios = [theirs.wall / own.wall for own, theirs in pairs]
    return Comparison(
        work=name,
        reference=against,
        esper_ms=1e3 * median(own.wall for own, _ in pairs),
        reference_ms=1e3 * median(theirs.wall for _, theirs in pairs),
        ratio=median(ratios),
        least_ratio=min(ratios),
        greatest_ratio=max(ratios),
        cpu_ratio=median(theirs.cpu / max(own.cpu, 1e-9) for own, theirs in pairs),
    )
