"""Rows of several architectures against as many of one: what it costs that a round is a family.

Four hosts, each under four conditions (how many samples, how noisy, at which rate), live in one
population, and each of the hosts under the same conditions in a population of its own with as many
rows altogether. All take turns, step by step; what is compared is the time of the family with the
mean time of the others. Every round begins with other conditions, as rounds of training do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from benchmarks.table import print_table

CHANNELS = ((2, 4, 4), (4, 8, 8), (6, 8), (8, 8))
"""Hosts of digits; for other images they are as much wider as `--width` says."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks family_speed", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--task", default="digits", help="whose data and settings hosts have")
    parser.add_argument("--rows", type=int, default=None, help="16 on a CPU, 256 on a device")
    parser.add_argument("--samples", type=int, default=None, help="of an epoch")
    parser.add_argument("--width", type=int, default=1, help="how much wider the hosts are")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--rounds", type=int, default=2, help="the first is not timed")
    parser.add_argument("--steps", type=int, default=8, help="of every round")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--waiting", action="store_true", help="nobody grows anything")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = measure(options)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print_table(
        ["host", "rows", "ms a step", "row-epochs/s", "captures", "after the first round"],
        [
            [
                each["host"],
                str(each["rows"]),
                f"{each['step_ms']:.0f}",
                f"{each['row_epochs_per_s']:.1f}",
                str(each["captures"]),
                str(each["later_captures"]),
            ]
            for each in found["populations"]
        ],
    )
    print(
        f"\na step of the family takes {found['cost']:.2f} times the mean step of the hosts alone, "
        f"{100 / found['cost']:.0f} % of their row-epochs/s ({found['device']}, "
        f"{found['strategy']}; medians of {found['steps']} interleaved steps, middle half "
        f"{found['quartiles'][0]:.2f} to {found['quartiles'][1]:.2f})"
    )
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Let all populations take turns; return their times and the ratio."""
    import numpy as np
    import torch

    from esper.bench.timing import now
    from esper.leyline.process import choose_device
    from esper.population.engine import PopulationConfig
    from esper.population.population import Population
    from esper.tamiyo.controllers import RandomController, WaitController
    from esper.tasks import DataShelf

    torch.set_num_threads(1)
    device = choose_device(options.device)
    rows = options.rows or (16 if device.type == "cpu" else 256)
    shelf = DataShelf(device=device)
    hosts = [tuple(options.width * each for each in channels) for channels in CHANNELS]
    casts = {"family": hosts, **{"-".join(map(str, channels)): [channels] for channels in hosts}}
    populations: dict[str, Any] = {}
    times: dict[str, list[float]] = {name: [] for name in casts}
    captures: dict[str, list[int]] = {name: [] for name in casts}
    try:
        for number in range(options.rounds):
            signals, controllers = {}, {}
            for name, cast in casts.items():
                tasks = make_tasks(options.task, cast, len(hosts), number, options.samples)
                data = [shelf.load(task) for task in tasks]
                if name not in populations:
                    populations[name] = Population(
                        tasks,
                        rows,
                        1,
                        str(device),
                        options.strategy,
                        data=data,
                        config=PopulationConfig(use_bf16=options.bf16),
                    )
                else:
                    populations[name].assign(tasks, rows, data)
                signals[name] = populations[name].reset(range(number * rows, (number + 1) * rows))
                controllers[name] = WaitController() if options.waiting else RandomController(5)
                controllers[name].reset(rows, device)
            for _ in range(options.steps):
                for name, population in populations.items():
                    started = now(device)
                    actions = controllers[name].act(signals[name], population.masks())
                    signals[name] = population.step(actions)
                    if number:
                        times[name].append(now(device) - started)
            for name, population in populations.items():
                captures[name].append(
                    sum(getattr(group.engine, "captures", 0) for group in population.groups)
                )
        strategy = populations["family"].strategy
    finally:
        for population in populations.values():
            population.close()
    alone = [mean(step) for step in zip(*(times[name] for name in list(casts)[1:]), strict=True)]
    ratios = [mine / theirs for mine, theirs in zip(times["family"], alone, strict=True)]
    return {
        "device": str(device),
        "strategy": strategy,
        "steps": len(ratios),
        "cost": median(ratios),
        "quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "populations": [
            {
                "host": name,
                "rows": rows,
                "step_ms": 1e3 * median(times[name]),
                "row_epochs_per_s": rows / median(times[name]),
                "captures": captures[name][-1],
                "later_captures": captures[name][-1] - captures[name][0],
            }
            for name in casts
        ],
    }


def make_tasks(
    name: str,
    hosts: Sequence[tuple[int, ...]],
    conditions: int,
    number: int,
    samples: int | None = None,
) -> list[Any]:
    """Return the tasks of a round: every host under conditions that the round's number draws."""
    from esper.kasmina.hosts import CnnConfig
    from esper.tasks import get_task

    base = get_task(name)
    options = base.config.host_options
    assert isinstance(options, CnnConfig), "hosts of this benchmark are convolutional"
    tasks = []
    for channels in hosts:
        for each in range(conditions):
            turn = number + each
            config = base.config.replace(
                host_options=CnnConfig(channels=channels, in_channels=options.in_channels),
                train_size=(None, 600, 200)[turn % 3],
                label_noise=(0.0, 0.1, 0.3, 0.0)[turn % 4],
                samples_per_step=samples or base.config.samples_per_step,
                learning_rate=base.config.learning_rate * (0.5, 1.0, 2.0)[turn % 3],
            )
            tasks.append(type(base)(config))
    return tasks
