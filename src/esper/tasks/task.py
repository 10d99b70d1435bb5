"""`Task`: data and a host that belong together, with the settings under which they train."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from esper.kasmina.hosts import HOSTS, build_host, host_slots
from esper.leyline.blueprints import Topology
from esper.leyline.errors import DataError
from esper.leyline.randomness import seeded
from esper.tasks.config import TaskConfig
from esper.tasks.data.locate import existing
from esper.tasks.data.source import Source
from esper.tasks.dataset import OBJECTIVE_FOR, TaskData, make_data
from esper.tasks.objective import OBJECTIVES, SCORE_KINDS, Objective, ScoreKind

DataPath = str | os.PathLike[str]

EMBEDDED = "embedded"


class Task(ABC):
    """What is grown: a subclass says where its data comes from and gives its defaults."""

    name: ClassVar[str]
    """Set by `register_task`."""

    defaults: ClassVar[TaskConfig]
    """The configuration used when none is given."""

    def __init__(self, config: TaskConfig | None = None) -> None:
        """Create the task with its defaults, or with a configuration of the caller's."""
        self.config = self.defaults if config is None else config

    @abstractmethod
    def read(self, data_path: DataPath | None) -> Source:
        """Return the data: from the path the user gave, or from where it usually lies."""

    def find(self, data_path: DataPath | None = None) -> str:
        """Say where the data lies without reading it, or raise; by default it needs no file."""
        return EMBEDDED if data_path is None else str(existing(data_path))

    def load(
        self, data_path: DataPath | None = None, device: torch.device | str = "cpu"
    ) -> TaskData:
        """Read and split the data, and put it on a device."""
        source = self.read(data_path)
        self._check(source)
        config = self.config
        return make_data(
            source,
            samples_per_step=config.samples_per_step,
            val_fraction=config.val_fraction,
            test_fraction=config.test_fraction,
            train_size=config.train_size,
            label_noise=config.label_noise,
            augmentation=config.augment,
            validation_samples=config.validation_samples,
            device=device,
        )

    def build_host(self, seed: int) -> nn.Module:
        """Return a fresh host whose weights depend on `seed` alone."""
        with seeded(seed, "host"):
            return build_host(self.config.host, self.config.host_options)

    @cached_property
    def slot_paths(self) -> dict[str, str]:
        """Slot id to submodule name, in action order."""
        return host_slots(self._outline)

    @cached_property
    def host_parameters(self) -> int:
        """Trainable parameters of the host."""
        return sum(p.numel() for p in self._outline.parameters() if p.requires_grad)

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
    def _outline(self) -> nn.Module:
        """The host without storage: enough to ask it for its shape."""
        with torch.device("meta"):
            return build_host(self.config.host, self.config.host_options)

    def _check(self, source: Source) -> None:
        """Refuse data that the host cannot take."""
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
                f"but task {self.name} tells apart {config.num_classes}"
            )
