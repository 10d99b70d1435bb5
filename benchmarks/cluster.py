"""How much faster two Ray actors are than one, and what the way to them costs.

One cluster on this machine; the same rows live in one actor and in two, in turns, so that whatever
else the machine does falls on both. *Transfer* is what a step takes beyond the slowest actor's own
time. Processor's time says what a machine with free cores would do. Needs `esper-grow[ray]`.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Sequence

import torch

from esper.leyline.actions import Actions, placeholder_actions
from esper.population.cluster import RayCluster, RayPopulation
from esper.population.cluster.messages import pack
from esper.population.cluster.ray_cluster import import_ray
from esper.tasks.task import get_task


class Timed:
    """Rows in some actors, and what their steps took."""

    def __init__(self, actors: int, options: argparse.Namespace) -> None:
        self.cluster = RayCluster(options.address, actors=actors)
        task = get_task(options.task, horizon=options.steps + 2)
        rows, device = options.rows, options.device
        self.population = RayPopulation(self.cluster, task, rows, 0, device)
        self.population.reset()
        self.cluster.take_work()
        self.seconds = self.transfer = self.processor = 0.0

    def step(self, actions: Actions) -> None:
        """Live through an epoch and count it."""
        started = time.perf_counter()
        self.population.step(actions)
        spent = time.perf_counter() - started
        work = self.cluster.take_work()
        self.seconds += spent
        self.transfer += spent - max(each.seconds for each in work)
        self.processor += max(each.processor_seconds for each in work)


def main(arguments: Sequence[str]) -> int:
    """Print steps per second of one actor and of two, and the share of transfer."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cluster", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--task", default="digits", help="what rows are of (default: digits)")
    parser.add_argument("--rows", type=int, default=64, help="networks (default: 64)")
    parser.add_argument("--steps", type=int, default=10, help="steps (default: 10)")
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
    for actors, timed in ((1, one), (2, two)):
        steps = options.steps * options.rows
        print(
            f"{actors} actors: {steps / timed.seconds:8.1f} environment steps/s, "
            f"transfer {timed.transfer / options.steps * 1e3:.1f} ms a step, "
            f"{timed.transfer / timed.seconds:.2%}"
        )
    seen = len(pickle.dumps(pack(two.population.signals()), protocol=5))
    seen += len(pickle.dumps(pack(two.population.view()), protocol=5))
    out = len(pickle.dumps({head: chosen.numpy() for head, chosen in wait.items()}, protocol=5))
    print(f"a step of {options.rows} rows: {out / 1e3:.1f} kB out, {seen / 1e3:.1f} kB back")
    print(
        f"two / one: {one.seconds / two.seconds:.2f} by the clock, "
        f"{one.processor / two.processor:.2f} by the slowest actor's processor"
    )
    two.cluster.close()
    one.cluster.close()
    return 0
