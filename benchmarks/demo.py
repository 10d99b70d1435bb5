"""Repeat `esper demo` over seeds, learning rates and instruction sets.

The networks are trained as in the demo, without picture and report. With a file of results
(`--out`), the command continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pool import add_sets_option, run_all
from benchmarks.table import print_table, require_results
from tools.instruction_sets import INSTRUCTION_SETS, available

RECORDED = Path("research/demo/results.jsonl")
SEEDS = 5
Job = tuple[int, int, float | None]
"""Which network, its seed, and its learning rate where it is not the demo's."""


def measure(job: Job, name: str = "", out: str | None = None, compute: float = 1.0) -> Any:
    """Train one network of the demo; write and return its results."""
    from dataclasses import replace

    from esper.scripts.cli.demo import ARMS
    from esper.scripts.cli.demo_networks import train_arm

    number, seed, rate = job
    arm = ARMS[number] if rate is None else replace(ARMS[number], learning_rate=rate)
    _, outcome = train_arm(arm, seed, compute, lambda point: True)
    found = {
        "set": name,
        "network": arm.name,
        "seed": seed,
        "rate": arm.learning_rate,
        "compute": compute,
        "steps": outcome.steps,
        "flops": outcome.curve[-1].flops,
        "parameters": outcome.parameters,
        "cpu_s": round(outcome.cpu_s, 1),
        "test_loss": outcome.test_loss,
    }
    if out is not None:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    return found


def gains_of(results: Sequence[dict[str, Any]]) -> list[float]:
    """Return by how many percent the grown network is below the best static one, by set and seed.

    Positive is better. The best static network is chosen anew for each of them, and every network
    counts at its best rate.
    """
    runs: dict[tuple[str, int], dict[str, float]] = {}
    for one in results:
        losses = runs.setdefault((one["set"], one["seed"]), {})
        losses[one["network"]] = min(one["test_loss"], losses.get(one["network"], float("inf")))
    gains = []
    for losses in runs.values():
        grown = [loss for name, loss in losses.items() if name.startswith("grown")]
        static = [loss for name, loss in losses.items() if not name.startswith("grown")]
        if grown and len(static) > 1:
            gains.append(100.0 * (1.0 - grown[0] / min(static)))
    return gains


def summarize(results: Sequence[dict[str, Any]]) -> None:
    """Print medians over seeds, and what growing gains."""
    cells: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for one in results:
        cells.setdefault((one["set"], one["network"], one["rate"]), []).append(one)
    rows = [
        [
            name,
            network,
            f"{rate:g}",
            str(len(own)),
            f"{median(one['test_loss'] for one in own):.4f}",
            f"{min(one['test_loss'] for one in own):.4f} to "
            f"{max(one['test_loss'] for one in own):.4f}",
            f"{own[0]['flops']:.3g}",
            f"{median(one['cpu_s'] for one in own):.0f}",
        ]
        for (name, network, rate), own in sorted(
            cells.items(), key=lambda cell: (cell[0][0], cell[0][2])
        )
    ]
    columns = ["set", "network", "rate", "seeds", "median", "test loss", "FLOPs", "CPU s"]
    print_table(columns, rows)
    if gains := gains_of(results):
        told = f"{sum(gain > 0 for gain in gains)} of {len(gains)} runs"
        print(
            f"\ntest loss below the best static network: {median(gains):+.1f} % in the median "
            f"({min(gains):+.1f} to {max(gains):+.1f}), ahead in {told}"
        )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks demo", description=__doc__)
    add_sets_option(parser)
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="K")
    parser.add_argument(
        "--rates", type=float, nargs="+", metavar="R", help="learning rates instead of the demo's"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="networks side by side")
    parser.add_argument("--compute", type=float, default=1.0, metavar="X")
    parser.add_argument("--out", metavar="FILE", help="JSON lines of results, to go on with")
    parser.add_argument(
        "--summary", action="store_true", help=f"only print what --out holds, or {RECORDED}"
    )
    options = parser.parse_args(arguments)
    if options.summary:
        recorded = RECORDED if options.out is None else Path(options.out)
        require_results(recorded)
        summarize(_read(str(recorded)))
        return 0
    results = _read(options.out)
    rates = options.rates or [None]
    jobs = [(arm, seed, r) for seed in range(options.seeds) for r in rates for arm in range(3)]
    sets = ["as it is"] if options.sets is None else options.sets or available()
    for name in sets:
        done = [one for one in results if one["set"] == name]
        todo = [job for job in jobs if not _is_done(job, done, options.compute)]
        work = partial(measure, name=name, out=options.out, compute=options.compute)
        results += run_all(work, todo, options.jobs, INSTRUCTION_SETS.get(name))
    summarize(results)
    return 0


def _read(path: str | None) -> list[dict[str, Any]]:
    if path is None or not Path(path).exists():
        return []
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _is_done(job: Job, done: Sequence[dict[str, Any]], compute: float) -> bool:
    from esper.scripts.cli.demo import ARMS

    number, seed, rate = job
    arm = ARMS[number]
    wanted = (arm.name, seed, arm.learning_rate if rate is None else rate, compute)
    return any((one["network"], one["seed"], one["rate"], one["compute"]) == wanted for one in done)
