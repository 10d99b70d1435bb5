"""Networks that do not grow: wider hosts, and what was grown trained from scratch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from esper.kasmina.hosts import BuiltInSeed, GrownConfig
from esper.leyline.config import Config
from esper.leyline.errors import UsageError
from esper.tasks.task import Task

WIDTHS = ("channels", "hidden", "dim")
"""The fields that hold the width of a host, whichever host it is."""

Architecture = tuple[BuiltInSeed, ...]


def widened(task: Task, factor: float, learning_rate: float) -> Task:
    """Return the task with a host of so many times the width, at a rate of its own.

    Raises:
        UsageError: Nobody knows what the width of such a host is.
    """
    options = task.config.host_options
    names = {field.name for field in dataclasses.fields(options)} & set(WIDTHS)
    if not names:
        raise UsageError(
            f"host {task.config.host!r} has none of {', '.join(WIDTHS)}, so it cannot be widened; "
            "leave the static arms out"
        )
    changed = {name: _scaled(options, name, factor) for name in names}
    config = task.config.replace(
        host_options=options.replace(**changed), learning_rate=learning_rate
    )
    return type(task)(config)


def _scaled(options: Config, name: str, factor: float) -> int | tuple[int, ...]:
    value: int | tuple[int, ...] = getattr(options, name)
    if isinstance(value, tuple):
        return tuple(max(1, round(factor * each)) for each in value)
    # A width that attention heads share stays divisible among them.
    unit: int = getattr(options, "heads", 1) if name == "dim" else 1
    return max(unit, unit * round(factor * value / unit))


def from_scratch(task: Task, seeds: Architecture) -> Task:
    """Return the task whose host has these seeds from the beginning."""
    options = GrownConfig(host=task.config.host, host_options=task.config.host_options, seeds=seeds)
    name = f"grown_{task.topology}"
    return type(task)(task.config.replace(host=name, host_options=options))


def commonest(architectures: Sequence[Architecture]) -> Architecture:
    """Return the architecture that came of most seeds; of several, the one that came first."""
    return Counter(architectures).most_common(1)[0][0]
