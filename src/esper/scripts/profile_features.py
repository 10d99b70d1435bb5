"""`python -m esper.scripts.profile_features`: time of an observation, by function.

`esper bench observation` measures the same; this also lists the functions that take the time. It
uses one thread.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict

import torch

from esper.lab.bench.learning import ExtractionTiming, time_extraction
from esper.lab.imagined import middle_aged_hosts
from esper.leyline.errors import UsageError
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig
from esper.tamiyo.policy.features import batch_obs_to_features


def where_time_goes(signals: Signals, calls: int = 500) -> list[tuple[str, float]]:
    """Return the functions of one extraction with their shares of its time, largest first."""
    slots = SlotConfig.of(signals.num_slots)
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
        prog="python -m esper.scripts.profile_features",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument(
        "--version", choices=("v3",), default="v3", help="observation: only v3 exists"
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
    signals = hosts.signals()
    timing = time_extraction(signals, options.turns)
    shares = where_time_goes(signals)
    if options.json:
        print(json.dumps({"timing": asdict(timing), "shares": dict(shares)}, indent=1))
    else:
        print(_describe(timing, shares))
    return 0


def _describe(timing: ExtractionTiming, shares: Sequence[tuple[str, float]]) -> str:
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


if __name__ == "__main__":
    sys.exit(main())
