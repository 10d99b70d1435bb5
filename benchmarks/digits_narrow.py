"""Which narrow host on digits shows best what growing brings: the choice behind `esper demo`.

For every host the learning rate is tuned for waiting, by the median validation score; at that rate
the heuristic grows it beside its twin, and a static network of the same final size is trained at a
rate of its own. The host that growing spares the largest share of its validation errors, in the
median, is chosen, and measured again on seeds that had no part in the choice.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.pool import run_all
from benchmarks.table import print_table

TASK = "digits_narrow"
FRESH = 10
"""First of the seeds that had no part in the choice; `esper demo` begins with it too."""
HOSTS = ("2,2,8", "2,2,2", "2,4,4")


@dataclass(frozen=True)
class Job:
    """A host, the seeds it is measured on, and its rate where that is known already."""

    channels: tuple[int, ...]
    seeds: tuple[int, ...]
    learning_rate: float | None = None


def measure(job: Job, controller: str) -> dict[str, Any]:
    """Tune, grow and compare one host."""
    from esper.kasmina.hosts import CnnConfig
    from esper.lab.proof.arm import compare, grow_once, tune
    from esper.lab.proof.statistics import error_rate, log_ratios
    from esper.lab.tasks import get_task

    task = get_task(TASK, host_options=CnnConfig(channels=job.channels, in_channels=1))
    data = task.load()
    rate, tried = job.learning_rate, {}
    if rate is None:
        found = tune(task, job.seeds, data)
        tried = {each.task.config.learning_rate: median(each.val) for each in found}
        rate = found[0].task.config.learning_rate
    task = type(task)(task.config.replace(learning_rate=rate))
    grown = [grow_once(task, data, seed, controller) for seed in job.seeds]
    twin, tended, static = compare(task, grown, data)
    validated = len(data.subset)
    ratios = log_ratios(
        error_rate([summary.val_score for summary in grown], validated),
        error_rate([summary.twin_val_score or 0.0 for summary in grown], validated),
    )
    return {
        "channels": job.channels,
        "learning_rate": rate,
        "tried": tried,
        "seeds": job.seeds,
        "spared": 1.0 - math.exp(-median(ratios.tolist())),
        "test_gain": tended.gain(twin),
        "over_static": tended.lead(static),
        "static": static.name,
        **{
            name: {"test": arm.test, "parameters": arm.parameters, "flops": arm.flops}
            for name, arm in (("twin", twin), ("grown", tended), ("same_size", static))
        },
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks digits_narrow", description=__doc__)
    parser.add_argument("--hosts", nargs="+", default=HOSTS, metavar="C,C,C")
    parser.add_argument("--controller", default="heuristic")
    parser.add_argument("--seeds", type=int, default=5, help="for choosing, and as many fresh ones")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if not 1 <= options.seeds <= FRESH:
        parser.error(f"it needs 1 to {FRESH} seeds")
    hosts = [tuple(map(int, host.split(","))) for host in options.hosts]
    choosing = tuple(range(options.seeds))
    fresh = tuple(range(FRESH, FRESH + options.seeds))
    work = partial(measure, controller=options.controller)
    results = run_all(work, [Job(host, choosing) for host in hosts], options.jobs)
    best = max(results, key=lambda result: result["spared"])
    results += run_all(work, [Job(best["channels"], fresh, best["learning_rate"])], 1)
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    rows = [
        [
            " ".join(map(str, result["channels"])),
            f"{result['seeds'][0]}–{result['seeds'][-1]}",
            f"{result['learning_rate']:g}",
            *(f"{median(result[arm]['test']):.2f}" for arm in ("twin", "grown")),
            f"{median(result['same_size']['test']):.2f} ({result['static']})",
            f"{result['spared']:.0%}",
            f"{result['test_gain']:+.2f}",
            f"{result['over_static']:+.2f}",
            " / ".join(f"{result[a]['parameters']:,}" for a in ("twin", "grown", "same_size")),
        ]
        for result in results
    ]
    header = ["channels", "seeds", "rate", "twin", "grown", "static", "val errors spared", "gain"]
    print_table([*header, "over static", "parameters"], rows)
    print("\nmedians; the last row is the chosen host on seeds that had no part in the choice")
    return 0
