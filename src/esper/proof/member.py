"""What arms are played on: members, tasks with a label, chosen by family and split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from esper.leyline.errors import UsageError
from esper.tasks.task import Task


class Member(Protocol):
    """A task with a name that says how it differs from others of its family."""

    @property
    def label(self) -> str:
        """The name, one of its own."""
        ...

    def task(self) -> Task:
        """Return the task."""
        ...


@dataclass(frozen=True)
class GivenMember:
    """A task under a label of the caller's choice."""

    label: str
    given: Task

    def task(self) -> Task:
        """Return the task."""
        return self.given


def matching(members: Sequence[Member], parts: Sequence[str]) -> tuple[Member, ...]:
    """Return the members whose label contains one of some texts; all without any."""
    found = tuple(
        member for member in members if not parts or any(part in member.label for part in parts)
    )
    if not found:
        raise UsageError(
            f"no member has {' or '.join(map(repr, parts))} in its label; --list shows them"
        )
    return found


def descriptors(task: Task) -> dict[str, float]:
    """Return what is known of a task before it is trained, in units that compare."""
    config = task.config
    return {
        "log_parameters": _log2(task.host_parameters),
        "log_flops": _log2(task.host_flops),
        "slots": float(len(task.slot_paths)),
        "log_train_size": _log2(config.train_size or 1 << 20),
        "label_noise": 10.0 * config.label_noise,
        "log_classes": _log2(config.num_classes or 1),
        "log_horizon": _log2(config.horizon),
        "log_rate": _log2(config.learning_rate),
    }


def _log2(value: float) -> float:
    import math

    return math.log2(max(value, 1e-12))
