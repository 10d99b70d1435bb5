"""`python -m esper.scripts.profile_features`: what an observation costs, and where the time goes.

Extraction and the readable reference are timed in turns on the same imagined hosts, so a slow
moment hits both; times are those of the thread itself. One thread is used.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from esper.leyline.errors import UsageError
from esper.leyline.slots import SlotConfig
from esper.scripts.imagined_hosts import ImaginedHosts, middle_aged_hosts
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.policy.reports import plain_reports

_CALLS = 20
"""Extractions timed together; the reference is timed once in the same turn."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What one observation costs."""

    rows: int
    slots: int
    occupied: float
    """Share of slots that hold a record; an empty slot costs the reference next to nothing."""
    extraction_us: float
    """Microseconds per row, of all rows together."""
    reference_us: float
    """Microseconds per row, one by one from plain floats."""
    ratio: float
    """How many times faster; the median over the turns."""


def time_extraction(hosts: ImaginedHosts, turns: int) -> Timing:
    """Time both ways to the observation of these hosts."""
    slots = SlotConfig.of(hosts.state.num_slots)
    signals = hosts.signals()
    reports = plain_reports(signals, slots)
    pairs = [
        (
            _seconds(lambda: batch_obs_to_features(signals, slots), _CALLS),
            _seconds(lambda: batch_obs_to_features(*reports, slots), 1),
        )
        # The first turn only warms up.
        for _ in range(turns + 1)
    ][1:]
    per_row = 1e6 / hosts.rows
    return Timing(
        rows=hosts.rows,
        slots=slots.num_slots,
        occupied=float(signals.occupied.float().mean()),
        extraction_us=per_row * median(ours for ours, _ in pairs),
        reference_us=per_row * median(theirs for _, theirs in pairs),
        ratio=median(theirs / ours for ours, theirs in pairs),
    )


def where_time_goes(hosts: ImaginedHosts, calls: int = 500) -> list[tuple[str, float]]:
    """Return the functions of one extraction with their shares of its time, largest first."""
    slots = SlotConfig.of(hosts.state.num_slots)
    signals = hosts.signals()
    batch_obs_to_features(signals, slots)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(calls):
        batch_obs_to_features(signals, slots)
    profiler.disable()
    stats = pstats.Stats(profiler)
    # (file, line, name) -> (calls, primitive calls, own time, time with callees, callers)
    entries: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = stats.stats  # type: ignore[attr-defined]
    total = sum(entry[2] for entry in entries.values())
    shares: dict[str, float] = defaultdict(float)
    for (_, _, name), entry in entries.items():
        # Built-in ones are called <method 'take' of 'numpy.ndarray' objects>.
        shares[name.strip("<>").replace("'", "")] += entry[2] / total
    return sorted(shares.items(), key=lambda item: -item[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the profile; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m esper.scripts.profile_features", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rows", type=int, default=64, help="hosts at once (default 64)")
    parser.add_argument("--slots", type=int, default=3, help="slots of each (default 3)")
    parser.add_argument("--epochs", type=int, default=30, help="epochs lived (default 30)")
    parser.add_argument("--turns", type=int, default=30, help="timed turns (default 30)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    if min(options.rows, options.slots, options.turns) < 1 or options.epochs < 0:
        parser.error("--rows, --slots and --turns must be 1 or more, --epochs 0 or more")
    torch.set_num_threads(1)
    try:
        hosts = middle_aged_hosts(options.rows, options.slots, epochs=options.epochs)
    except UsageError as error:
        parser.error(str(error))
    timing = time_extraction(hosts, options.turns)
    shares = where_time_goes(hosts)
    if options.json:
        print(json.dumps({"timing": asdict(timing), "shares": dict(shares)}, indent=1))
    else:
        print(_describe(timing, shares))
    return 0


def _describe(timing: Timing, shares: Sequence[tuple[str, float]]) -> str:
    lines = [
        f"{timing.rows} rows, {timing.slots} slots, {timing.occupied:.0%} of them occupied",
        f"extraction  {timing.extraction_us:8.2f} us per row",
        f"reference   {timing.reference_us:8.2f} us per row",
        f"ratio       {timing.ratio:8.1f} x",
        "",
        "where the time goes (own time of each function)",
        *(f"  {share:6.1%}  {name}" for name, share in shares[:15]),
    ]
    return "\n".join(lines)


def _seconds(call: Callable[[], object], calls: int) -> float:
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls


if __name__ == "__main__":
    sys.exit(main())
