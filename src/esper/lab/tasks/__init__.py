"""Tasks: data sets on the user's disk, hosts that train on them, and training settings.

`get_task(name)` makes one, `task.load()` reads and splits its data, `task.build_host(seed)` makes
its network. To add one: docs/how-to/add-a-task.md. Where data comes from: docs/data.md.
"""

from __future__ import annotations

from esper.kasmina.training import TrainingConfig
from esper.lab.tasks import family_presets as _families
from esper.lab.tasks import presets as _presets
from esper.lab.tasks.data import Source, open_data
from esper.lab.tasks.dataset import TaskData, make_data
from esper.lab.tasks.family import FAMILIES, Axes, Family, get_family, register_family
from esper.lab.tasks.member import Member
from esper.lab.tasks.task import (
    TASKS,
    DataCache,
    Task,
    TaskConfig,
    describe_task,
    get_task,
    register_task,
)

del _families, _presets

__all__ = [
    "FAMILIES",
    "TASKS",
    "Axes",
    "DataCache",
    "Family",
    "Member",
    "Source",
    "Task",
    "TaskConfig",
    "TaskData",
    "TrainingConfig",
    "describe_task",
    "get_family",
    "get_task",
    "make_data",
    "open_data",
    "register_family",
    "register_task",
]
