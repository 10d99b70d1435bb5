"""The registry of tasks: one decorated class each, and how to make one by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from esper.leyline.errors import UsageError
from esper.leyline.registry import Registry
from esper.tasks.config import TaskConfig
from esper.tasks.task import Task

K = TypeVar("K", bound=type[Task])

TASKS: Registry[type[Task]] = Registry("task")


def register_task(name: str) -> Callable[[K], K]:
    """Register a class as the task called `name`; the class is returned with its name set."""

    def decorate(task_class: K) -> K:
        if not (isinstance(task_class, type) and issubclass(task_class, Task)):
            raise UsageError(f"task {name!r} must be a class that derives from Task")
        if not isinstance(getattr(task_class, "defaults", None), TaskConfig):
            raise UsageError(f"task {name!r} needs a class attribute defaults, a TaskConfig")
        if not (task_class.__doc__ or "").strip():
            raise UsageError(f"task {name!r} needs a docstring; its first line is shown to users")
        TASKS.register(name, task_class)
        task_class.name = name
        return task_class

    return decorate


def get_task(name: str, **changes: Any) -> Task:
    """Return the task called `name`, with some fields of its configuration changed."""
    task_class = TASKS.get(name)
    return task_class(task_class.defaults.replace(**changes))
