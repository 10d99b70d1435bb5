"""How fast a whole round of training is: twins, episodes and update of a recipe, on real data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from esper.leyline.process import choose_device
from esper.simic.training.recipes import get_recipe
from esper.simic.training.row_source import TaskRows
from esper.simic.training.trainer import Trainer


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
