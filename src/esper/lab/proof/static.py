"""Static networks: wider and deeper hosts, and grown architectures trained from scratch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from esper.kasmina.blueprints.kin import KIN
from esper.kasmina.hosts import BuiltInSeed, GrownConfig
from esper.lab.population.engine import PopulationConfig, SlotSpec
from esper.lab.population.sequential import find_slots
from esper.lab.tasks.task import Task
from esper.leyline.config import Config
from esper.leyline.errors import ConfigError, UsageError

WIDTHS = ("channels", "hidden", "dim")
"""Options that are the width of a host."""

Architecture = tuple[BuiltInSeed, ...]


def widened(task: Task, factor: float, learning_rate: float) -> Task:
    """Return the task with a host of `factor` times the width, and another learning rate.

    Raises:
        UsageError: The host has no option for its width.
    """
    options = task.config.host_options
    names = {field.name for field in dataclasses.fields(options)} & set(WIDTHS)
    if not names:
        raise UsageError(
            f"host {task.config.host!r} has none of the options {', '.join(WIDTHS)}, so it cannot "
            "be widened; leave out the static arms"
        )
    changed = {name: _scaled(options, name, factor) for name in names}
    return _with_host(task, host_options=options.replace(**changed), learning_rate=learning_rate)


def _with_host(task: Task, **changes: Any) -> Task:
    """Return the task with another host, and as many FLOPs as before.

    A budget such as "10x" is a multiple of what the task's own host takes, so it becomes another
    multiple of what the new one takes.
    """
    changed = type(task)(task.config.replace(**changes))
    budget = task.config.budget
    if not isinstance(budget, str):
        return changed
    times = float(budget.removesuffix("x")) * task.host_flops / changed.host_flops
    return type(task)(changed.config.replace(budget=f"{times!r}x"))


def with_share(task: Task, share: float) -> Task:
    """Return the task with a share of its budget."""
    budget = task.config.budget
    if share == 1.0 or budget is None:
        return task
    less = f"{share * float(budget[:-1])!r}x" if isinstance(budget, str) else share * budget
    return type(task)(task.config.replace(budget=less))


def _scaled(options: Config, name: str, factor: float) -> int | tuple[int, ...]:
    value: int | tuple[int, ...] = getattr(options, name)
    if isinstance(value, tuple):
        return tuple(max(1, round(factor * each)) for each in value)
    # Keep the width divisible by the number of attention heads.
    unit: int = getattr(options, "heads", 1) if name == "dim" else 1
    return max(unit, unit * round(factor * value / unit))


def from_scratch(task: Task, seeds: Architecture) -> Task:
    """Return the task whose host has these seeds from the beginning."""
    options = GrownConfig(host=task.config.host, host_options=task.config.host_options, seeds=seeds)
    return _with_host(task, host=f"grown_{task.topology}", host_options=options)


def deepened(task: Task, depth: int) -> Task:
    """Return the task whose host has `depth` blocks from the beginning where it has one now.

    These are the blocks in front of slots in which copies can grow. A depth whose cost the budget
    does not pay for is halved until it does, as a controller could not grow to it either.

    Raises:
        UsageError: No block can be copied.
    """
    if depth == 1:
        return task
    deeper = from_scratch(task, _copies(task, depth - 1))
    try:
        deeper.compute_budget(task.config.validation_samples)
    except ConfigError:
        return deepened(task, depth // 2)
    return deeper


_COPYABLE: dict[Hashable, tuple[SlotSpec, ...]] = {}
"""Slots by host and options: the members of a family share a few hosts."""


def _copies(task: Task, count: int) -> Architecture:
    """Return so many copies of the block in front of every slot that can hold them."""
    config = task.config
    key = (type(task).build_host, config.host, repr(config.host_options), config.input_shape)
    if key not in _COPYABLE:
        _COPYABLE[key] = find_slots(task.build_host(0), task, PopulationConfig(copies=True))
    slots = _COPYABLE[key]
    fitting = [slot for slot in slots if not slot.kin.problem]
    if not fitting:
        raise UsageError(
            f"no block of host {task.config.host!r} can be copied, so that it cannot be deepened: "
            f"at {slots[0].name} {slots[0].kin.problem}; leave out the arms of depth"
        )
    return tuple(
        BuiltInSeed(slot=slot.name, blueprint=KIN, channels=slot.channels, copies=count)
        for slot in fitting
    )


def commonest(architectures: Sequence[Architecture]) -> Architecture:
    """Return the most frequent architecture; of equals the first."""
    return Counter(architectures).most_common(1)[0][0]
