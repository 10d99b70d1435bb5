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
Job = tuple[int, int, float | None, float]
"""Which network, its seed, its learning rate where it is not the demo's, and its compute."""


def measure(job: Job, name: str = "", out: str | None = None) -> Any:
    """Train one network of the demo; write and return its results."""
    from dataclasses import replace

    from esper.scripts.cli.demo import ARMS
    from esper.scripts.cli.demo_networks import train_arm

    number, seed, rate, compute = job
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
    """Return by how many percent the grown network is below the best static one.

    There is one figure for each instruction set, budget and seed.

    Positive is better. The best static network is chosen anew for each of them, and every network
    counts at its best rate.
    """
    runs: dict[tuple[str, float, int], dict[str, float]] = {}
    for one in results:
        losses = runs.setdefault((one["set"], one["compute"], one["seed"]), {})
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
    cells: dict[tuple[str, float, str, float], list[dict[str, Any]]] = {}
    for one in results:
        key = (one["set"], one["compute"], one["network"], one["rate"])
        cells.setdefault(key, []).append(one)
    rows = [
        [
            name,
            f"{compute:g}",
            network,
            str(own[0]["steps"]),
            f"{rate:g}",
            str(len(own)),
            f"{median(one['test_loss'] for one in own):.4f}",
            f"{min(one['test_loss'] for one in own):.4f} to "
            f"{max(one['test_loss'] for one in own):.4f}",
            f"{own[0]['flops']:.3g}",
            f"{median(one['cpu_s'] for one in own):.0f}",
        ]
        for (name, compute, network, rate), own in sorted(
            cells.items(), key=lambda cell: (cell[0][0], cell[0][1], cell[0][3])
        )
    ]
    columns = ["set", "compute", "network", "steps", "rate", "seeds", "median", "test loss"]
    print_table([*columns, "FLOPs", "CPU s"], rows)
    for compute in sorted({one["compute"] for one in results}):
        gains = gains_of([one for one in results if one["compute"] == compute])
        if gains:
            print(
                f"\ncompute {compute:g}: test loss below the best static network: "
                f"{median(gains):+.1f} % in the median ({min(gains):+.1f} to {max(gains):+.1f}), "
                f"ahead in {sum(gain > 0 for gain in gains)} of {len(gains)} runs"
            )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks demo", description=__doc__)
    add_sets_option(parser)
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="K")
    parser.add_argument(
        "--rates", type=float, nargs="+", metavar="R", help="learning rates instead of the demo's"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="networks side by side")
    parser.add_argument(
        "--compute",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="X",
        help="training FLOPs as multiples of the demo's",
    )
    parser.add_argument("--out", metavar="FILE", help="JSON lines of results, to go on with")
    parser.add_argument(
        "--summary", action="store_true", help=f"only print what --out holds, or {RECORDED}"
    )
    options = parser.parse_args(arguments)
    if options.summary:
        recorded = RECORDED if options.out is None else Path(options.out)
        require_results(recorded)
        summarize(read(recorded))
        return 0
    results = [] if options.out is None else read(Path(options.out))
    rates = options.rates or [None]
    jobs = [
        (arm, seed, rate, compute)
        for compute in options.compute
        for seed in range(options.seeds)
        for rate in rates
        for arm in range(3)
    ]
    sets = ["as it is"] if options.sets is None else options.sets or available()
    for name in sets:
        done = [one for one in results if one["set"] == name]
        todo = [job for job in jobs if not _is_done(job, done)]
        work = partial(measure, name=name, out=options.out)
        results += run_all(work, todo, options.jobs, INSTRUCTION_SETS.get(name))
    summarize(results)
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file; none if it does not exist yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _is_done(job: Job, done: Sequence[dict[str, Any]]) -> bool:
    from esper.scripts.cli.demo import ARMS

    number, seed, rate, compute = job
    arm = ARMS[number]
    wanted = (arm.name, seed, arm.learning_rate if rate is None else rate, compute)
    return any((one["network"], one["seed"], one["rate"], one["compute"]) == wanted for one in done)
