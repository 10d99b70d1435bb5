"""Rows of several architectures against as many of one: what it costs that a round is a family.

Four hosts, each under four conditions (how many samples, how noisy, at which rate), live in one
population, and each of the hosts under the same conditions in a population of its own with as many
rows altogether. All take turns, step by step; what is compared is the time of the family with the
mean time of the others. Every round begins with other conditions, as rounds of training do.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from esper.bench.timing import now
from esper.kasmina.hosts import CnnConfig
from esper.leyline.process import choose_device
from esper.population.engine import PopulationConfig, Strategy
from esper.population.population import Population
from esper.tamiyo.controllers import RandomController
from esper.tasks import DataShelf, Task, get_task

CHANNELS = ((2, 4, 4), (4, 8, 8), (6, 8), (8, 8))
"""Channels of the four hosts."""


def measure_family(
    task: str,
    *,
    rows: int | None = None,
    device: str = "auto",
    strategy: Strategy = "auto",
    use_bf16: bool = False,
    samples: int | None = None,
    rounds: int = 2,
    steps: int = 8,
) -> dict[str, Any]:
    """Let all populations take turns; return their times and the ratio.

    Args:
        task: whose data and settings hosts have.
        rows: of every population; 16 on a CPU and 256 on a device by default.
        device: where.
        strategy: how rows run.
        use_bf16: run hosts in BF16.
        samples: of an epoch; the task's by default.
        rounds: how many, the first of which is not timed.
        steps: of every round.
    """
    here = choose_device(device)
    rows = rows or (16 if here.type == "cpu" else 256)
    shelf = DataShelf(device=here)
    casts: dict[str, Sequence[tuple[int, ...]]] = {
        "family": CHANNELS,
        **{"-".join(map(str, channels)): [channels] for channels in CHANNELS},
    }
    populations: dict[str, Population] = {}
    times: dict[str, list[float]] = {name: [] for name in casts}
    captures: dict[str, list[int]] = {name: [] for name in casts}
    try:
        for number in range(rounds):
            signals, controllers = {}, {}
            for name, cast in casts.items():
                tasks = make_tasks(task, cast, len(CHANNELS), number, samples)
                data = [shelf.load(task) for task in tasks]
                if name not in populations:
                    populations[name] = Population(
                        tasks,
                        rows,
                        1,
                        str(here),
                        strategy,
                        data=data,
                        config=PopulationConfig(use_bf16=use_bf16),
                    )
                else:
                    populations[name].assign(tasks, rows, data)
                signals[name] = populations[name].reset(range(number * rows, (number + 1) * rows))
                controllers[name] = RandomController(5)
                controllers[name].reset(rows, here)
            for _ in range(steps):
                for name, population in populations.items():
                    started = now(here)
                    actions = controllers[name].act(signals[name], population.masks())
                    signals[name] = population.step(actions)
                    if number:
                        times[name].append(now(here) - started)
            for name, population in populations.items():
                captures[name].append(
                    sum(getattr(group.engine, "captures", 0) for group in population.groups)
                )
        ran = populations["family"].strategy
    finally:
        for population in populations.values():
            population.close()
    alone = [mean(step) for step in zip(*(times[name] for name in list(casts)[1:]), strict=True)]
    ratios = [mine / theirs for mine, theirs in zip(times["family"], alone, strict=True)]
    return {
        "device": str(here),
        "strategy": ran,
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
) -> list[Task]:
    """Return the tasks of a round: every host under conditions that the round's number draws."""
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
