"""Measurements of `esper bench`: timing against a reference in the same run, and its tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from esper.leyline.records import Plain

# ---- Timing: two implementations of the same work, measured in turns


Work = Callable[[], object]


class Seconds(NamedTuple):
    """Duration of a call: wall-clock time, and CPU time of the thread."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Comparison(Plain):
    """Two implementations of the same work, timed in turns; ratios are speed-ups of the first."""

    work: str
    """`step`, `plain_step`, `update` or `captured_step`."""
    reference: str
    """Name of the reference."""
    esper_ms: float
    reference_ms: float
    ratio: float
    """Median of the ratios of neighbouring turns, by wall-clock time."""
    least_ratio: float
    greatest_ratio: float
    cpu_ratio: float
    """The same median by CPU time; on a GPU that is only the launching."""


def now(device: torch.device) -> float:
    """Return the time after the device has finished its work."""
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
    """Return the duration of one call of each in every round; several calls are timed together."""
    where = torch.device(device)

    def timed(work: Work, calls: int) -> Seconds:
        wall, own = time.perf_counter(), time.thread_time()
        for _ in range(calls):
            work()
        return Seconds((now(where) - wall) / calls, (time.thread_time() - own) / calls)

    # The first turn is a warm-up.
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
    """Time both in turns, and return the speed-up of the first."""
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


# ---- The tables of `esper bench`


Column = tuple[str, str, Callable[[Any], str]]
"""Heading, key of a result, and format of its value."""

_CASE: tuple[Column, ...] = (
    ("task", "task", str),
    ("strategy", "strategy", str),
    ("rows", "rows", str),
    ("type", "precision", str),
)

RATES: tuple[Column, ...] = (
    *_CASE,
    ("ms per row", "row_ms", lambda value: f"{value:.1f}"),
    ("row epochs per s", "row_epochs_per_s", lambda value: f"{value:,.1f}"),
    ("images per s", "images_per_s", lambda value: f"{value:,.0f}"),
    ("ratio", "ratio", lambda value: "–" if value is None else f"{value:.2f}"),
)

PHASES: tuple[Column, ...] = (
    *_CASE,
    ("train s", "train_s", lambda value: f"{value:.3f}"),
    ("val s", "validate_s", lambda value: f"{value:.3f}"),
    ("other s", "other_s", lambda value: f"{value:.3f}"),
    ("GiB", "memory_gib", lambda value: "–" if value is None else f"{value:.1f}"),
    ("of mm", "matmul_share", lambda value: f"{100 * value:.1f}%"),
)

EXTRACTION: tuple[Column, ...] = (
    ("rows", "rows", lambda value: f"{value}"),
    ("slots", "slots", lambda value: f"{value}"),
    ("occupied", "occupied", lambda value: f"{100 * value:.0f}%"),
    ("us per row", "extraction_us", lambda value: f"{value:.2f}"),
    ("reference", "reference_us", lambda value: f"{value:.1f}"),
    ("ratio", "ratio", lambda value: f"{value:.1f}"),
)

_WORK = {
    "step": "step of a rollout",
    "plain_step": "step by get_action",
    "update": "forward + backward",
    "captured_step": "step, CUDA graph",
}

_COMPARED: tuple[Column, ...] = (
    ("ms", "esper_ms", lambda value: f"{value:.3f}"),
    ("reference ms", "reference_ms", lambda value: f"{value:.3f}"),
    ("ratio", "ratio", lambda value: f"{value:.2f}"),
    ("CPU ratio", "cpu_ratio", lambda value: f"{value:.2f}"),
    ("against", "reference", str),
)

POLICY: tuple[Column, ...] = (
    ("rows", "rows", lambda value: f"{value}"),
    ("work", "work", lambda value: _WORK[value]),
    *_COMPARED,
)

UPDATE: tuple[Column, ...] = (
    ("rows", "rows", lambda value: f"{value}"),
    ("minibatches", "minibatches", lambda value: f"{value}"),
    *_COMPARED,
)

ROUND: tuple[Column, ...] = (
    ("recipe", "recipe", str),
    ("rows", "rows", lambda value: f"{value}"),
    ("first s", "first_s", lambda value: f"{value:.1f}"),
    ("round s", "round_s", lambda value: f"{value:.2f}"),
    ("twins s", "twins_s", lambda value: f"{value:.2f}"),
    ("episodes s", "episodes_s", lambda value: f"{value:.2f}"),
    ("update s", "update_s", lambda value: f"{value:.3f}"),
    ("images per s", "images_per_s", lambda value: f"{value:,.0f}"),
)

FAMILY: tuple[Column, ...] = (
    ("host", "host", str),
    ("rows", "rows", lambda value: f"{value}"),
    ("ms a step", "step_ms", lambda value: f"{value:.0f}"),
    ("row epochs per s", "row_epochs_per_s", lambda value: f"{value:,.1f}"),
    ("captures", "captures", lambda value: f"{value}"),
    ("after the first round", "later_captures", lambda value: f"{value}"),
)
