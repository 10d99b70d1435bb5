"""How much faster two Ray actors are than one, and what the way to them costs.

One cluster on this machine; the same rows live in one actor and in two, step by step in turns, so
that whatever else the machine does falls on both; figures are medians over steps. *Transfer* is
what a step takes beyond the slowest actor's rows: packing, the request, waking up, unpacking. Where
others use the machine too, two actors cannot be twice as fast by the clock; *with free cores* a
step would take the slowest actor's processor time, and the transfer. Needs `esper-grow[ray]`.

    python -m benchmarks cluster --rows 16 --steps 8              # the speed-up, on idle cores
    python -m benchmarks cluster --rows 64 --steps 40 --short     # the transfer
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.table import print_table
from esper.leyline.actions import Actions, placeholder_actions
from esper.population.cluster import RayCluster, RayPopulation
from esper.population.cluster.ray_cluster import import_ray
from esper.tasks.task import get_task


@dataclass(frozen=True, slots=True)
class Step:
    """What a step took, in seconds."""

    clock: float
    transfer: float
    """Beyond the rows of the slowest actor."""
    processor: float
    """That the busiest actor had the processor for its rows."""

    @property
    def with_free_cores(self) -> float:
        """What it would take if every actor had a core to itself."""
        return self.processor + self.transfer


class Timed:
    """Rows in some actors, and what their steps took."""

    def __init__(self, actors: int, options: argparse.Namespace) -> None:
        self.cluster = RayCluster(options.address, actors=actors)
        task = get_task(options.task, horizon=options.steps + 2)
        if options.short:
            few = task.config.batch_size
            task = type(task)(task.config.replace(samples_per_step=few, validation_samples=few))
        rows, device = options.rows, options.device
        self.population = RayPopulation(self.cluster, task, rows, 0, device)
        self.population.reset()
        self.cluster.take_work()
        self.steps: list[Step] = []

    def step(self, actions: Actions) -> None:
        """Live through an epoch and count it."""
        started = time.perf_counter()
        self.population.step(actions)
        spent = time.perf_counter() - started
        work = self.cluster.take_work()
        transfer = spent - max(each.seconds for each in work)
        self.steps.append(Step(spent, transfer, max(each.processor_seconds for each in work)))


def main(arguments: Sequence[str]) -> int:
    """Print steps per second of one actor and of two, and the share of transfer."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cluster", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--task", default="digits", help="what rows are of (default: digits)")
    parser.add_argument("--rows", type=int, default=64, help="networks (default: 64)")
    parser.add_argument("--steps", type=int, default=10, help="steps (default: 10)")
    parser.add_argument(
        "--short", action="store_true", help="epochs of one batch: for the way, not the work"
    )
    parser.add_argument(
        "--epoch-ms",
        type=float,
        default=186.0,
        help="epoch to compare transfer with (default: 186, 64 rows of `cifar` on an H200)",
    )
    parser.add_argument("--device", default="cpu", help="where rows live (default: cpu)")
    parser.add_argument("--address", help="of a cluster (default: one on this machine)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.address is None:
        # Three actors must find room; never more than two of them work at once.
        import_ray().init(num_cpus=3, log_to_driver=False, logging_level="ERROR")
    one, two = Timed(1, options), Timed(2, options)
    wait = placeholder_actions(options.rows)
    for number in range(options.steps):
        for timed in (one, two) if number % 2 else (two, one):
            timed.step(wait)
    table = []
    for actors, timed in ((1, one), (2, two)):
        transfers = [step.transfer for step in timed.steps]
        table.append(
            [
                actors,
                f"{options.rows / median(step.clock for step in timed.steps):.1f}",
                f"{median(transfers) * 1e3:.1f}",
                f"{min(transfers) * 1e3:.1f}",
                f"{median(transfers) * 1e3 / options.epoch_ms:.2%}",
            ]
        )
    share = f"of {options.epoch_ms:g} ms"
    print_table(["actors", "steps/s, by the clock", "transfer, ms a step", "least", share], table)
    pairs = list(zip(one.steps, two.steps, strict=True))
    by_clock = median(a.clock / b.clock for a, b in pairs)
    free = median(a.with_free_cores / b.with_free_cores for a, b in pairs)
    print(f"two / one: {by_clock:.2f} by the clock, {free:.2f} with free cores")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    two.cluster.close()
    one.cluster.close()
    return 0
