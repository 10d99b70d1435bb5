"""`Task`: data and a host that belong together, their settings, and the registry of tasks."""

from __future__ import annotations

import dataclasses
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from esper.kasmina.budget import NO_BUDGET, count_budget, parse_budget
from esper.kasmina.costs import NO_LIMIT, HostMultiples, times_host
from esper.kasmina.evaluation import Objective
from esper.kasmina.flops import HOW_TO_COUNT, FlopCount, forward_flops
from esper.kasmina.hosts.registry import (
    HOSTS,
    build_host,
    check_host_options,
    host_slots,
    read_host_options,
)
from esper.kasmina.training import (
    OBJECTIVES,
    SCORE_KINDS,
    ObjectiveName,
    ScoreKind,
    TrainingConfig,
)
from esper.lab.tasks.data.source import Source, existing
from esper.lab.tasks.dataset import VALIDATION_SAMPLES, Augmentation, TaskData, choose_data
from esper.lab.tasks.splits import OBJECTIVE_FOR, Splits, make_splits, select_classes
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, DataError, UsageError, warn
from esper.leyline.registry import Registry
from esper.leyline.slots import Topology
from esper.utils.randomness import seeded

_META_HOSTS: dict[Hashable, nn.Module] = {}
"""Hosts on the meta device by class and options: the members of a family share a few hosts."""
_COUNTED: dict[Hashable, FlopCount] = {}
"""FLOP counts of hosts, likewise."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig(HostMultiples, TrainingConfig):
    """A host, how it is trained, and how its data is prepared."""

    host: str = option(help="Name of the host.")
    host_options: Config = option(help="Options of the host, in its own class.")
    input_shape: tuple[int, ...] = option(
        help="Shape of one sample: channels, height, width; or features; or tokens.", minimum=1
    )
    num_classes: int | None = option(
        10, "Number of classes or distinct tokens; empty for real targets.", minimum=1
    )
    objective: ObjectiveName = option("classification", "What is predicted.")

    samples_per_step: int = option(4096, "Samples in one epoch, that is, one decision.", minimum=1)
    horizon: int = option(150, "Epochs of one whole run.", minimum=1)
    budget: float | str | None = option(
        None,
        "Training FLOPs of one whole run, such as 2e12, or a multiple of what the host would take "
        "for all its epochs, such as 10x: every epoch is then an equal share of them, and a small "
        "network takes more steps than a grown one; empty is no budget.",
    )

    level: int | None = option(
        None,
        "How hard a computed text is: digits, variables, facts, letters or words, as the task "
        "says; empty is the task's own.",
        minimum=1,
    )
    augment: Augmentation = option("none", "How training images are varied.")
    classes: tuple[int, ...] | None = option(
        None, "Classes to keep, renumbered in this order; all if empty.", minimum=0
    )
    train_size: int | None = option(
        None, "Keep only this many training samples; all if empty.", minimum=1
    )
    label_noise: float = option(
        0.0,
        "Share of the training labels replaced by another class, or of the next tokens of a text "
        "by another of its tokens.",
        minimum=0.0,
        maximum=1.0,
    )
    val_fraction: float = option(
        0.1, "Share of the training data set aside for validation.", above=0.0, maximum=0.9
    )
    test_fraction: float = option(
        0.1,
        "Share set aside for testing where no official test split exists.",
        above=0.0,
        maximum=0.9,
    )
    validation_samples: int = option(
        VALIDATION_SAMPLES, "Fixed validation samples scored after every epoch.", minimum=1
    )

    param_budget: int = option(500_000, "Parameters that count as a full budget.", minimum=1)
    baseline_loss: float = option(2.3, "Loss of a network that knows nothing.", above=0.0)
    target_loss: float = option(0.3, "Loss that counts as solved.", minimum=0.0)

    def __post_init__(self) -> None:
        """Check rules that span several fields."""
        if self.budget is not None:
            object.__setattr__(self, "budget", parse_budget(self.budget))
        super().__post_init__()
        check_host_options("TaskConfig", self.host, self.host_options)
        if (self.num_classes is None) != (self.objective == "regression"):
            raise ConfigError(
                f"TaskConfig.num_classes must be empty for regression and only there, "
                f"got {self.num_classes!r} for {self.objective}"
            )
        if self.classes is not None:
            self._check_classes(self.classes)
        if self.baseline_loss <= self.target_loss:
            raise ConfigError(
                f"TaskConfig.target_loss must be below baseline_loss ({self.baseline_loss}), "
                f"got {self.target_loss}"
            )

    def _check_classes(self, classes: tuple[int, ...]) -> None:
        if self.objective != "classification":
            raise ConfigError(f"TaskConfig.classes is for classification, not {self.objective}")
        if len(set(classes)) != len(classes) or len(classes) != self.num_classes:
            raise ConfigError(
                f"TaskConfig.classes must be {self.num_classes} different classes, as many as "
                f"num_classes, got {classes}"
            )

    @property
    def training(self) -> TrainingConfig:
        """The settings of training alone."""
        names = (field.name for field in dataclasses.fields(TrainingConfig))
        return TrainingConfig(**{name: getattr(self, name) for name in names})

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Build the configuration from plain data; the host's own class reads its options."""
        return super().from_mapping(read_host_options(mapping))


DataPath = str | os.PathLike[str]

EMBEDDED = "embedded"


class Task(ABC):
    """Data and a host; a subclass reads the data and has the default configuration."""

    name: ClassVar[str]
    """Set by `register_task`."""

    defaults: ClassVar[TaskConfig]
    """The configuration used when none is given."""

    levels: ClassVar[tuple[int, int] | None] = None
    """The least and the largest `level` that its data has; None if it has none."""

    def __init__(self, config: TaskConfig | None = None) -> None:
        """Create the task with its defaults, or with a configuration of the caller's."""
        self.config = self.defaults if config is None else config
        self._check_level(self.config.level)

    def _check_level(self, level: int | None) -> None:
        if level is None:
            return
        if self.levels is None:
            raise ConfigError(f"task {self.name!r} has no levels, got level={level}; leave it out")
        least, most = self.levels
        if not least <= level <= most:
            raise ConfigError(f"task {self.name!r} has levels {least} to {most}, got {level}")

    @abstractmethod
    def read(self, data_path: DataPath | None) -> Source:
        """Read the data from the user's path, or from its usual place.

        The result may depend on no setting but `input_shape`, and those that `source_key` names:
        tasks of the same class, path and source key share it.
        """

    def find(self, data_path: DataPath | None = None) -> str:
        """Return where the data lies, without reading it, or raise; by default it needs no file."""
        return EMBEDDED if data_path is None else str(existing(data_path))

    def load(
        self, data_path: DataPath | None = None, device: torch.device | str = "cpu"
    ) -> TaskData:
        """Read and split the data, and put it on a device."""
        return self.choose(self.split(self.read(data_path), device))

    @property
    def source_key(self) -> Hashable:
        """Key of the source; tasks with the same key share what `read` returns."""
        return type(self), self.config.input_shape

    @property
    def splits_key(self) -> Hashable:
        """Key of the splits; tasks with the same key share what `split` returns."""
        config = self.config
        return self.source_key, config.classes, config.val_fraction, config.test_fraction

    @property
    def data_key(self) -> Hashable:
        """Key of the data; tasks with the same key share what `choose` returns."""
        config = self.config
        return (
            self.splits_key,
            config.samples_per_step,
            config.train_size,
            config.label_noise,
            config.augment,
            config.validation_samples,
        )

    def split(self, source: Source, device: torch.device | str = "cpu") -> Splits:
        """Split a source, and put it on a device."""
        if self.config.classes is not None:
            source = select_classes(source, self.config.classes)
        self._check(source)
        return make_splits(
            source,
            val_fraction=self.config.val_fraction,
            test_fraction=self.config.test_fraction,
            device=device,
        )

    def choose(self, splits: Splits) -> TaskData:
        """Return the part of the splits that this task uses."""
        config = self.config
        return choose_data(
            splits,
            samples_per_step=config.samples_per_step,
            train_size=config.train_size,
            label_noise=config.label_noise,
            augmentation=config.augment,
            validation_samples=config.validation_samples,
        )

    def build_host(self, seed: int) -> nn.Module:
        """Return a fresh host whose weights depend on `seed` alone."""
        with seeded(seed, "host"):
            return build_host(self.config.host, self.config.host_options)

    @cached_property
    def slot_paths(self) -> dict[str, str]:
        """Submodule name by slot id, in action order."""
        return host_slots(self._meta_host)

    @cached_property
    def host_parameters(self) -> int:
        """Trainable parameters of the host."""
        return sum(p.numel() for p in self._meta_host.parameters() if p.requires_grad)

    @cached_property
    def host_flops(self) -> int:
        """Operations of one sample's forward pass through the host."""
        return self._host_count.total

    @property
    def param_limit(self) -> int:
        """Most parameters of the grown network, -1 without a limit."""
        return times_host(self.config.param_limit, self.host_parameters)

    @property
    def flop_limit(self) -> int:
        """Most operations per sample of the grown network, -1 without a limit."""
        if self._host_count.uncounted:
            return NO_LIMIT
        return times_host(self.config.flop_limit, self.host_flops)

    def compute_budget(self, val_samples: int) -> int:
        """Return the training FLOPs of a run that is measured by so many samples.

        It is `NO_BUDGET` where the task has none.
        """
        config = self.config
        if config.budget is None:
            return NO_BUDGET
        if self._host_count.uncounted:
            raise ConfigError(
                f"the operations of {self._host_count.describe_uncounted()} in the host of task "
                f"{self.name!r} cannot be counted, so that it can have no budget; {HOW_TO_COUNT}"
            )
        return count_budget(
            config.budget,
            host_flops=self.host_flops,
            samples_per_epoch=config.samples_per_step,
            batch_samples=config.batch_size,
            val_samples=val_samples,
            epochs=config.horizon,
        )

    @property
    def topology(self) -> Topology:
        """Kind of activation at the slots."""
        return HOSTS.get(self.config.host).topology

    @property
    def objective(self) -> Objective:
        """Function from outputs and targets to per-sample loss and correctness."""
        return OBJECTIVES[self.config.objective]

    @property
    def score_kind(self) -> ScoreKind:
        """Unit of the score."""
        return SCORE_KINDS[self.config.objective]

    def example_input(self, batch: int = 2) -> Tensor:
        """Return a batch of zeros of the right shape and type."""
        dtype = torch.int64 if self.config.objective == "language" else torch.float32
        return torch.zeros(batch, *self.config.input_shape, dtype=dtype)

    @cached_property
    def _host_count(self) -> FlopCount:
        """The count of one sample's forward pass through the host."""
        example = self.example_input(1)
        key = (*self._host_key, example.shape, example.dtype)
        count = _COUNTED.get(key)
        if count is None:
            count = forward_flops(self._meta_host, example.to("meta"))
            if not count.uncounted:
                _COUNTED[key] = count
        if count.uncounted and self.config.flop_limit is not None:
            warn(
                f"the operations of {count.describe_uncounted()} in the host of task "
                f"{self.name!r} cannot be counted: flop_limit is not applied, {HOW_TO_COUNT}"
            )
        return count

    @property
    def _host_key(self) -> tuple[Hashable, ...]:
        """Key of the host's class and options."""
        return HOSTS.get(self.config.host), repr(self.config.host_options)

    @cached_property
    def _meta_host(self) -> nn.Module:
        """The host on the meta device, for its slots and sizes."""
        found = _META_HOSTS.get(self._host_key)
        if found is None:
            with torch.device("meta"):
                found = build_host(self.config.host, self.config.host_options)
            _META_HOSTS[self._host_key] = found
        return found

    def _check(self, source: Source) -> None:
        """Raise where the host cannot take the data."""
        config = self.config
        shape = tuple(source.x.shape[1:])
        if source.kind == "tokens":
            shape = (shape[0] - 1,)
        found = OBJECTIVE_FOR[source.target]
        if found != config.objective:
            raise DataError(
                f"{source.origin} is data for {found}, but task {self.name} is {config.objective}"
            )
        if shape != config.input_shape:
            raise DataError(
                f"{source.origin} has samples of shape {'x'.join(map(str, shape))}, "
                f"but task {self.name} takes {'x'.join(map(str, config.input_shape))}"
            )
        if (source.num_classes or 0) > (config.num_classes or 0):
            raise DataError(
                f"{source.origin} has {source.num_classes} classes, "
                f"but task {self.name} has {config.num_classes}"
            )


K = TypeVar("K", bound=type[Task])

TASKS: Registry[type[Task]] = Registry("task")


def register_task(name: str) -> Callable[[K], K]:
    """Register the decorated class as the task called `name`, and set its `name`."""

    def decorate(task_class: K) -> K:
        if not (isinstance(task_class, type) and issubclass(task_class, Task)):
            raise UsageError(f"task {name!r} must be a class that derives from Task")
        if not isinstance(getattr(task_class, "defaults", None), TaskConfig):
            raise UsageError(f"task {name!r} needs a class attribute defaults, a TaskConfig")
        # Under `python -OO` no class has a docstring.
        if not (task_class.__doc__ or "").strip() and sys.flags.optimize < 2:
            raise UsageError(f"task {name!r} needs a docstring; its first line is shown to users")
        TASKS.register(name, task_class)
        task_class.name = name
        return task_class

    return decorate


def get_task(name: str, **changes: Any) -> Task:
    """Return the task called `name`, with some fields of its configuration changed."""
    task_class = TASKS.get(name)
    return task_class(task_class.defaults.replace(**changes))


_DESCRIBED_SETTINGS = (
    *("host", "num_classes", "objective", "samples_per_step", "batch_size", "horizon"),
    *("optimizer", "learning_rate", "param_budget", "param_limit", "flop_limit"),
)


def describe_task(name: str, data_path: DataPath | None = None) -> dict[str, Any]:
    """Return sizes, slots, settings and whether the data is there; no data is read.

    Args:
        name: A registered task.
        data_path: Where to look for its data; None for the usual places.

    Returns:
        Plain numbers, strings, lists and dicts. `data` has `status` ("found" or "missing"),
        `where` (a folder, or "embedded") and, if missing, `problem`.
    """
    task = get_task(name)
    config = task.config
    data: dict[str, str | None]
    try:
        data = {"status": "found", "where": task.find(data_path), "problem": None}
    except DataError as error:
        data = {"status": "missing", "where": None, "problem": str(error)}
    return {
        "name": name,
        "summary": (TASKS.get(name).__doc__ or "").strip().partition("\n")[0],
        "host_options": config.host_options.to_mapping(),
        "topology": task.topology,
        "parameters": task.host_parameters,
        "flops": task.host_flops,
        "slots": dict(task.slot_paths),
        "input_shape": list(config.input_shape),
        "score": task.score_kind,
        **{setting: getattr(config, setting) for setting in _DESCRIBED_SETTINGS},
        "data": data,
    }


# ---- `DataCache`: the data of many tasks, each source read once and in memory once


class DataCache:
    """The data of many tasks on one device; tasks that use the same source share it.

    Tasks that differ in which samples they use, or in how they train, share the splits of their
    source. Tasks that split it differently share the arrays that were read.
    """

    def __init__(
        self, data_path: DataPath | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """Look for data at this path, by default in the usual places; `load` reads it."""
        self._path, self._device = data_path, device
        self._sources: dict[Hashable, Source] = {}
        self._splits: dict[Hashable, Splits] = {}
        self._data: dict[Hashable, TaskData] = {}

    def load(self, task: Task) -> TaskData:
        """Return the data of a task; its source is read unless another task has the same."""
        source_key, splits_key, data_key = task.source_key, task.splits_key, task.data_key
        if data_key not in self._data:
            if splits_key not in self._splits:
                if source_key not in self._sources:
                    self._sources[source_key] = task.read(self._path)
                self._splits[splits_key] = task.split(self._sources[source_key], self._device)
            self._data[data_key] = task.choose(self._splits[splits_key])
        return self._data[data_key]

    def forget_all_but(self, tasks: Iterable[Task]) -> None:
        """Drop everything that these tasks do not use."""
        needed = {
            key for task in tasks for key in (task.source_key, task.splits_key, task.data_key)
        }
        for kept in (self._sources, self._splits, self._data):
            for key in kept.keys() - needed:
                del kept[key]
