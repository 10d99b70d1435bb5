"""How fast a whole round of training is: twins, episodes and update of a recipe, on real data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

import numpy as np

from esper.kasmina.hosts import CnnConfig
from esper.lab.bench import now
from esper.lab.population.engine import PopulationConfig, Strategy
from esper.lab.population.population import Population
from esper.lab.tasks import DataShelf, Task, get_task
from esper.simic.training.config import get_recipe
from esper.simic.training.row_source import TaskRows
from esper.simic.training.vectorized import Trainer
from esper.tamiyo.controllers import RandomController
from esper.utils.process import choose_device

# ---- Rows of several architectures against as many of one: what it costs that a round is a family


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


@dataclass(frozen=True, slots=True)
class RoundRate:
    """What a round of a recipe takes; medians over the rounds that were timed."""

    recipe: str
    rows: int
    rounds: int
    first_s: float
    """The first round, which compiles and captures what the others use."""
    round_s: float
    twins_s: float
    """Twins by themselves; on a device those of the next round are trained beside the episodes."""
    episodes_s: float
    update_s: float
    images: int
    """Samples that rows and twins learn from in a round."""

    @property
    def images_per_s(self) -> float:
        """Samples learned from in a second of a round."""
        return self.images / self.round_s

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "images_per_s": self.images_per_s}


def measure_rounds(
    recipe: str, rounds: int, device: str = "auto", rows: int | None = None
) -> RoundRate:
    """Train for some rounds after a first one; every round trains its own twins.

    Args:
        recipe: name of the recipe; its data must be there.
        rounds: how many are timed.
        device: where.
        rows: episodes side by side; the recipe's by default.
    """
    # There is one round more than are played, whose twins the last of them may train.
    config = get_recipe(recipe).replace(
        device=choose_device(device).type, rounds=rounds + 2, evaluate_every=0, twin_rounds=1
    )
    config = config if rows is None else config.replace(rows=rows)
    trainer = Trainer(config)
    times: list[float] = []
    parts: list[Mapping[str, float]] = []
    started = time.perf_counter()
    try:
        for report in trainer.run(rounds + 1):
            times.append(time.perf_counter() - started)
            parts.append(report.timings)
            started = time.perf_counter()
        images = count_images(trainer)
    finally:
        trainer.close()

    def typical(*names: str) -> float:
        return median(sum(part[name] for name in names) for part in parts[1:])

    return RoundRate(
        recipe=recipe,
        rows=config.rows,
        rounds=rounds,
        first_s=times[0],
        round_s=median(times[1:]),
        twins_s=typical("twins"),
        episodes_s=typical("population", "policy", "reward"),
        update_s=typical("update"),
        images=images,
    )


def count_images(trainer: Trainer) -> int:
    """Return how many samples the rows of a round learn from, and their twins."""
    source, config = trainer.row_source, trainer.config
    assert isinstance(source, TaskRows), "a recipe trains on tasks"
    groups = {group.label: group.task for group in source.groups(0, 0)}
    plan = source.plan(0, 0)
    rows = list(zip(plan.tasks, plan.env_seeds, strict=True))
    twins = set(rows) if trainer.twins is not None else set()

    def samples(label: str) -> int:
        own = groups[label].config
        return min(own.horizon, config.epochs) * own.samples_per_step

    return sum(samples(label) for label, _ in [*rows, *twins])
