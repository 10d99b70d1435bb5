"""The cells of the depth measurement, and the networks that are trained in each of them.

A cell is a network at its final depth, data and a number of steps. A job is one training run: at
which share of the run how many blocks are awake, and how new blocks begin.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.depth.models import Size

Plan = tuple[tuple[float, int], ...]
"""(share of the steps, blocks awake from there), the first at 0."""


@dataclass(frozen=True)
class Cell:
    """A network, its data, and how the static network of the final depth is trained on them."""

    name: str
    network: str
    data: str
    size: Size
    depth: int
    steps: int
    batch: int
    rate: float
    optimizer: str = "adamw"
    decay: float = 0.2
    warmup: int = 0
    """Steps; 0: a fiftieth of the run, 50 at least."""

    mixup: float = 0.0
    """Of images: the parameter of the beta distribution by which two are mixed; 0: none are."""

    grown: Plan = ()
    """What `esper.Deepen` does by default: a quarter, doubled at 20 and at 40 %."""

    later: Plan = ()
    """The other schedule that is tried everywhere: doubled at 30 and at 60 %."""


def doubling(start: int, *shares: float) -> Plan:
    """Double the blocks at these shares of the run."""
    return ((0.0, start), *((share, start << at + 1) for at, share in enumerate(shares)))


def by_default(depth: int) -> Plan:
    """Return what `esper.Deepen` does by default for a stack of this depth."""
    start = math.ceil(depth / 4)
    doublings = math.ceil(math.log2(depth / start))
    shares = (0.4 * (at + 1) / doublings for at in range(doublings))
    later = ((share, min(depth, start << at + 1)) for at, share in enumerate(shares))
    return ((0.0, start), *later)


GPT_10M = Size(dim=256, heads=4, length=256, classes=256)
_TWELVE = {"depth": 12, "grown": doubling(3, 0.2, 0.4), "later": doubling(3, 0.3, 0.6)}
_FOUR = {"depth": 4, "grown": doubling(1, 0.2, 0.4), "later": doubling(1, 0.3, 0.6)}

# Without mixed images this network overfits (training loss 0.02 to 0.2), so that more compute is
# worth little; measured first, and kept beside the other.
_VIT_PLAIN = Cell(
    "vit-plain", "vit", "images", Size(192, 3, 16, 10), steps=5_820, batch=512, rate=1e-3, **_TWELVE
)

CELLS = {
    cell.name: cell
    for cell in (
        Cell(
            "python-short", "gpt", "python", GPT_10M, steps=2_000, batch=128, rate=2e-3, **_TWELVE
        ),
        Cell("python-long", "gpt", "python", GPT_10M, steps=8_000, batch=128, rate=2e-3, **_TWELVE),
        Cell("prose", "gpt", "prose", GPT_10M, steps=2_000, batch=128, rate=2e-3, **_TWELVE),
        Cell(
            "ladder",
            "gpt",
            "python",
            Size(512, 8, 256, 256),
            steps=4_000,
            batch=128,
            rate=1e-3,
            **_TWELVE,
        ),
        replace(_VIT_PLAIN, name="vit", mixup=0.8),
        _VIT_PLAIN,
        Cell(
            "cnn",
            "resnet",
            "images",
            Size(64, 1, 16, 10),
            steps=2_910,
            batch=512,
            rate=0.3,
            optimizer="sgd",
            decay=0.4,
            **_FOUR,
        ),
        Cell(
            "small",
            "gpt",
            "stdlib",
            Size(32, 2, 64, 128, init=0.05),
            steps=5_000,
            batch=16,
            rate=4e-3,
            decay=0.25,
            warmup=100,
            **_FOUR,
        ),
    )
}


@dataclass(frozen=True)
class Job:
    """One training run. Its length is `length` times the cell's steps, or what `compute` buys."""

    cell: str
    plan: Plan
    rate: float
    seed: int = 0
    length: float = 1.0
    compute: float | None = None
    """In units of the cell's static network of final depth trained for the cell's steps."""

    start: str = "state"
    """How new blocks begin: "state" copies weights and optimizer state, "copy" weights only,
    "fresh" draws them, "zero" makes them the identity."""

    order: str = "stack"
    """Of copies, as `esper.Deepen` takes it; "first" stacks like "stack", but where blocks are not
    doubled in full it adds copies of the first blocks instead of the last ones."""

    schedule: str = "wsd"
    rewarm: int = 0
    """Steps over which the rate comes back after each growth."""

    ramp: float = 0.0
    """Share of the run over which new blocks are blended in."""

    @property
    def name(self) -> str:
        """Return what identifies the run in the results."""
        plan = ">".join(
            f"{blocks}@{share:g}" if share else str(blocks) for share, blocks in self.plan
        )
        size = f"c{self.compute:g}" if self.compute is not None else f"x{self.length:g}"
        odd = [
            f"{key}={value:g}" if isinstance(value, float | int) else value
            for key in ("start", "order", "schedule", "rewarm", "ramp")
            if (value := getattr(self, key)) != Job.__dataclass_fields__[key].default
        ]
        return " ".join([self.cell, plan, size, f"lr{self.rate:g}", *odd, f"s{self.seed}"])

    def as_record(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {"name": self.name, **asdict(self)}


def static(cell: Cell, blocks: int, **how: Any) -> Job:
    """Return a run that never grows."""
    return Job(cell.name, ((0.0, blocks),), **{"rate": cell.rate, **how})


def grown(cell: Cell, plan: Plan | None = None, **how: Any) -> Job:
    """Return a run that grows, by default as `esper.Deepen` does."""
    return Job(cell.name, plan or cell.grown, **{"rate": cell.rate, **how})


def jobs_of(name: str) -> list[Job]:
    """Return a cell's runs, the most telling first."""
    cell = CELLS[name]
    every = {
        "python-short": _all_arms,
        "prose": _prose_arms,
        "small": _small_arms,
        "cnn": _cnn_arms,
    }
    listed = every.get(name, _usual_arms)(cell)
    return list(dict.fromkeys(listed))


def _usual_arms(cell: Cell) -> Iterator[Job]:
    """Yield three static depths that bracket the result, the default and one other schedule."""
    half, quarter, share = cell.depth // 2, cell.depth // 4, 0.75
    to_half = by_default(half)
    for seed in (0, 1):
        yield grown(cell, seed=seed)
        yield static(cell, cell.depth, seed=seed)
        yield static(cell, half, compute=share, seed=seed)
        yield grown(cell, doubling(quarter, 0.3), compute=share, seed=seed)
    yield static(cell, cell.depth, length=1.25)
    yield static(cell, cell.depth, length=0.75)
    yield grown(cell, to_half, compute=share)
    yield static(cell, quarter, compute=share)
    yield grown(cell, cell.later)
    for factor in (0.5, 2.0):
        yield static(cell, half, compute=share, rate=cell.rate * factor)
        yield grown(cell, doubling(quarter, 0.3), compute=share, rate=cell.rate * factor)
        yield static(cell, cell.depth, length=0.75, rate=cell.rate * factor)
        yield grown(cell, rate=cell.rate * factor)
    yield grown(cell, to_half, compute=share, seed=1)
    for length in (0.75, 1.25):
        yield static(cell, cell.depth, length=length, seed=1)
    yield grown(cell, cell.later, seed=1)
    yield static(cell, half, compute=1.0)
    yield static(cell, cell.depth, length=1.5)


def _prose_arms(cell: Cell) -> Iterator[Job]:
    """Yield the usual arms, and more moments to double at: does any beat six static blocks?"""
    yield from _usual_arms(cell)
    for seed in (0, 1):
        for share in (0.15, 0.5):
            yield grown(cell, doubling(3, share), compute=0.75, seed=seed)


def _all_arms(cell: Cell) -> Iterator[Job]:
    """Yield every arm: five static depths with three rates, schedules, starts, targets, decays."""
    share = 0.75
    for seed in (0, 1):
        yield grown(cell, seed=seed)
        for length in (0.75, 1.0, 1.25):
            yield static(cell, 12, length=length, seed=seed)
        yield static(cell, 6, compute=share, seed=seed)
        yield grown(cell, doubling(3, 0.3), compute=share, seed=seed)
    for rate in (1e-3, 4e-3):
        yield grown(cell, rate=rate)
        for blocks in (12, 6, 3):
            yield static(cell, blocks, compute=share, rate=rate)
    yield static(cell, 3, compute=share)
    for start in ("copy", "fresh", "zero"):
        yield grown(cell, start=start)
    yield grown(cell, order="interleave")
    yield grown(cell, cell.later)
    yield grown(cell, doubling(3, 0.4, 0.75))
    yield grown(cell, ((0.0, 3), (0.3, 12)))
    yield grown(cell, ((0.0, 1), (0.1, 3), (0.25, 6), (0.5, 12)))
    yield grown(cell, rewarm=40)
    yield grown(cell, ramp=0.05)
    for draw in (0, 1):
        chance = random.Random(draw)
        moments = sorted(round(chance.uniform(0.05, 0.75), 3) for _ in range(2))
        yield grown(cell, doubling(3, *moments))
    for plan in (by_default(6), doubling(3, 0.4), ((0.0, 1), (0.2, 3), (0.4, 6))):
        yield grown(cell, plan, compute=share)
    yield grown(cell, by_default(6), compute=share, order="first")
    for schedule in ("linear", "cosine"):
        yield grown(cell, schedule=schedule)
        for length in (0.75, 1.0, 1.25):
            yield static(cell, 12, length=length, schedule=schedule)
    for rate in (2e-3, 4e-3, 8e-3):
        yield static(cell, 1, compute=share, rate=rate)
    for rate in (2e-3, 1e-3, 5e-4):
        yield static(cell, 24, compute=share, rate=rate)
    yield static(cell, 2, compute=share)
    yield static(cell, 4, compute=share)
    yield grown(cell, ((0.0, 1), (0.3, 2)), compute=share)
    yield grown(cell, ((0.0, 1), (0.2, 2), (0.4, 4)), compute=share)
    for length in (0.5, 1.5):
        yield static(cell, 12, length=length)
    for compute in (0.5, 1.0):
        yield static(cell, 6, compute=compute)
    for seed in (2, 3):
        yield grown(cell, seed=seed)
        yield static(cell, 12, seed=seed)


def _cnn_arms(cell: Cell) -> Iterator[Job]:
    """Yield the usual arms with four seeds, since errors of a CNN scatter."""
    share = 0.75
    for seed in range(4):
        yield grown(cell, seed=seed)
        for length in (0.75, 1.0):
            yield static(cell, 4, length=length, seed=seed)
        yield static(cell, 2, compute=share, seed=seed)
        yield grown(cell, doubling(1, 0.3), compute=share, seed=seed)
    for seed in (0, 1):
        yield grown(cell, cell.later, seed=seed)
        yield static(cell, 4, length=1.25, seed=seed)
        yield static(cell, 1, compute=share, seed=seed)
    for rate in (0.15, 0.6):
        yield grown(cell, rate=rate)
        yield static(cell, 4, length=0.75, rate=rate)
        yield static(cell, 2, compute=share, rate=rate)


def _small_arms(cell: Cell) -> Iterator[Job]:
    """Yield networks of 60 thousand parameters at equal compute, for one core of a CPU."""
    for seed in (0, 1):
        yield grown(cell, compute=1.0, seed=seed)
        yield static(cell, 4, compute=1.0, seed=seed)
        yield static(cell, 2, compute=1.0, seed=seed)
        if seed == 0:
            yield static(cell, 4, compute=1.5)
            yield static(cell, 4, compute=2.0)
    for rate in (2e-3, 8e-3):
        for blocks in (2, 4):
            yield static(cell, blocks, compute=1.0, rate=rate)
    yield static(cell, 4, compute=1.5, seed=1)
    yield static(cell, 4, compute=2.0, seed=1)
    yield grown(cell, doubling(1, 0.3), compute=1.0)
    yield static(cell, 1, compute=1.0)
    yield static(cell, 8, compute=1.0)
    for compute in (0.5, 1.5):
        yield grown(cell, compute=compute)
        yield static(cell, 2, compute=compute)
    yield static(cell, 4, compute=0.5)
    yield grown(cell, by_default(2), compute=1.0)


def scaled(job: Job, factor: float) -> Job:
    """Return the same run made shorter or longer, for trying things out."""
    if job.compute is not None:
        return replace(job, compute=job.compute * factor)
    return replace(job, length=job.length * factor)
