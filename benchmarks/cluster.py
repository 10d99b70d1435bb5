"""Measure the speed-up of two Ray actors over one, and the cost of transfer.

One cluster on this machine; the same rows live in one actor and in two, step by step in turns, so
that whatever else the machine does falls on both; figures are medians over steps. *Transfer* is
what a step takes beyond the slowest actor's rows: packing, the request, waking up, unpacking. Where
others use the machine too, it is mostly waiting for a core, and two actors cannot be twice as fast
by the clock. What then still holds is processor time: of the driver, for its part of the transfer;
of the slowest actor, which with the transfer is a step *with free cores*. Needs `esper-grow[ray]`.

    python -m benchmarks cluster --rows 16 --steps 8              # the speed-up, on idle cores
    python -m benchmarks cluster --rows 64 --steps 40 --short     # the transfer
    python -m benchmarks cluster --packing --device cuda          # its part that Ray has none in
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.table import print_table
from esper.lab.population.population import Population
from esper.lab.population.ray_actor import Lived
from esper.lab.population.ray_cluster import import_ray
from esper.lab.population.ray_population import RayCluster, RayPopulation
from esper.lab.tasks.task import Task, get_task
from esper.leyline.actions import Actions, placeholder_actions
from esper.leyline.signals import Signals


@dataclass(frozen=True, slots=True)
class Step:
    """What a step took, in seconds."""

    clock: float
    transfer: float
    """Beyond the rows of the slowest actor."""
    processor: float
    """That the busiest actor had the processor for its rows."""
    driver: float
    """That the thread which asks had the processor."""

    @property
    def with_free_cores(self) -> float:
        """What it would take if every actor had a core to itself."""
        return self.processor + self.transfer


class Timed:
    """Rows in some actors, and what their steps took."""

    def __init__(self, actors: int, options: argparse.Namespace) -> None:
        self.cluster = RayCluster(options.address, actors=actors)
        rows, device = options.rows, options.device
        self.population = RayPopulation(self.cluster, find_task(options), rows, 0, device)
        self.population.reset()
        self.cluster.take_work()
        self.steps: list[Step] = []

    def step(self, actions: Actions) -> None:
        """Live through an epoch and count it."""
        started, driver = time.perf_counter(), time.thread_time()
        self.population.step(actions)
        spent, driver = time.perf_counter() - started, time.thread_time() - driver
        work = self.cluster.take_work()
        transfer = spent - max(each.seconds for each in work)
        processor = max(each.processor_seconds for each in work)
        self.steps.append(Step(spent, transfer, processor, driver))


def find_task(options: argparse.Namespace) -> Task:
    """Return what rows are of."""
    task = get_task(options.task, horizon=2 * options.steps + 2)
    if not options.short:
        return task
    few = task.config.batch_size
    return type(task)(task.config.replace(samples_per_step=few, validation_samples=few))


def measure_packing(options: argparse.Namespace) -> None:
    """Print what packing and unpacking take after an epoch, beside tensors one by one."""
    population = Population(find_task(options), options.rows, 0, options.device)
    population.reset()
    wait = placeholder_actions(options.rows)
    order, device = list(range(options.rows)), population.device

    def together(signals: Signals) -> tuple[bytes, Callable[[bytes], Any]]:
        lived = Lived.pack(signals, population.panics(), population.view(), (0.0, 0.0))
        return pickle.dumps(lived), lambda sent: Lived.unpack([pickle.loads(sent)], order, device)

    def one_by_one(signals: Signals) -> tuple[bytes, Callable[[bytes], Any]]:
        records = (signals, population.view())
        names = [(each, field.name) for each in records for field in dataclasses.fields(each)]
        sent = [getattr(each, name).cpu().numpy() for each, name in names]
        sent.append(population.panics().cpu().numpy())
        return pickle.dumps(sent, protocol=5), lambda sent: [
            torch.from_numpy(each.copy()).to(device) for each in pickle.loads(sent)
        ]

    ways = {"one by one": one_by_one, "together": together}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    sizes = {}
    for _ in range(options.steps):
        for name, way in ways.items():
            signals = population.step(wait)
            started = time.perf_counter()
            sent, take = way(signals)
            packed = time.perf_counter()
            take(sent)
            if device.type == "cuda":
                torch.cuda.synchronize()
            spent[name].append((packed - started, time.perf_counter() - packed))
            sizes[name] = len(sent)
    population.close()
    print_table(
        [f"{options.rows} rows", "ms to pack", "ms to unpack", "kB"],
        [
            [
                name,
                *(f"{median(each) * 1e3:.2f}" for each in zip(*spent[name], strict=True)),
                f"{sizes[name] / 1e3:.1f}",
            ]
            for name in ways
        ],
    )


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
    parser.add_argument(
        "--packing", action="store_true", help="only pack and unpack what is seen; without Ray"
    )
    parser.add_argument("--device", default="cpu", help="where rows live (default: cpu)")
    parser.add_argument("--address", help="of a cluster (default: one on this machine)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.packing:
        measure_packing(options)
        return 0
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
                f"{median(step.driver for step in timed.steps) * 1e3:.1f}",
                f"{median(transfers) * 1e3 / options.epoch_ms:.2%}",
            ]
        )
    share = f"of {options.epoch_ms:g} ms"
    print_table(
        [
            "actors",
            "steps/s, by the clock",
            "transfer, ms a step",
            "least",
            "driver's processor",
            share,
        ],
        table,
    )
    pairs = list(zip(one.steps, two.steps, strict=True))
    by_clock = median(a.clock / b.clock for a, b in pairs)
    free = median(a.with_free_cores / b.with_free_cores for a, b in pairs)
    print(f"two / one: {by_clock:.2f} by the clock, {free:.2f} with free cores")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    two.cluster.close()
    one.cluster.close()
    return 0
