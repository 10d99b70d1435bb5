"""Tasks: data sets that a user has, hosts that train on them, and the settings they train under.

`get_task(name)` makes one, `task.load()` reads and splits its data, `task.build_host(seed)` makes
its network. To add one: docs/how-to/add-a-task.md. Where data comes from: docs/data.md.
"""

from esper.tasks import arena as _arena  # importing them registers them
from esper.tasks import presets as _presets
from esper.tasks.augmentation import Augmentation, Crops, crop_flip, draw_crops
from esper.tasks.data import Source, open_data
from esper.tasks.dataset import TaskData, choose_data, make_data
from esper.tasks.family import (
    FAMILIES,
    Axes,
    Family,
    FamilySplit,
    Purpose,
    get_family,
    register_family,
)
from esper.tasks.member import Architecture, Member
from esper.tasks.objective import (
    OBJECTIVES,
    SCORE_KINDS,
    Objective,
    ObjectiveName,
    ScoreKind,
    per_sample_classification,
    per_sample_language,
    per_sample_regression,
)
from esper.tasks.shelf import DataShelf
from esper.tasks.splits import SPLITS, Split, Splits, make_splits
from esper.tasks.task import (
    TASKS,
    Task,
    TaskConfig,
    describe_task,
    get_task,
    register_task,
)
from esper.tasks.training import TrainingConfig

del _arena, _presets

__all__ = [
    "FAMILIES",
    "OBJECTIVES",
    "SCORE_KINDS",
    "SPLITS",
    "TASKS",
    "Architecture",
    "Augmentation",
    "Axes",
    "Crops",
    "DataShelf",
    "Family",
    "FamilySplit",
    "Member",
    "Objective",
    "ObjectiveName",
    "Purpose",
    "ScoreKind",
    "Source",
    "Split",
    "Splits",
    "Task",
    "TaskConfig",
    "TaskData",
    "TrainingConfig",
    "choose_data",
    "crop_flip",
    "describe_task",
    "draw_crops",
    "get_family",
    "get_task",
    "make_data",
    "make_splits",
    "open_data",
    "per_sample_classification",
    "per_sample_language",
    "per_sample_regression",
    "register_family",
    "register_task",
]
