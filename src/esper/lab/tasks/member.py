"""`Member`: one task of a family, given by its values on the family's axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol, get_args

from esper.kasmina.hosts import CnnConfig, ResidualConfig, doubling
from esper.kasmina.training import Schedule
from esper.lab.tasks.task import Task, get_task
from esper.leyline.config import Config
from esper.leyline.errors import ConfigError
from esper.leyline.slots import slot_id

# ---- The best learning rate of a host without growth, by data, host and training images


SCHEDULE: Schedule = "wsd"
"""Learning-rate schedule of the members of all families, by default."""
WARM_UP = 0.05
"""Share of a run with a rising learning rate."""
SEED_WARM_UP = 3
"""Epochs in which the rate of a new seed rises; this helped where growing helps most."""

RATES: dict[tuple[str, str], tuple[tuple[int, float], ...]] = {
    ("digits", "plain"): ((1_079, 0.2),),
    ("cifar16", "plain"): ((2_000, 0.02), (20_000, 0.1)),
    ("cifar16", "residual"): ((2_000, 0.025), (8_000, 0.1)),
    ("fashion14", "plain"): ((2_000, 0.02), (20_000, 0.1)),
    ("fashion14", "residual"): ((2_000, 0.02), (20_000, 0.1)),
    ("cifar_baseline", "plain"): ((2_000, 0.02), (20_000, 0.1)),
}
"""(training images, rate) by data set and host, sorted by size."""


def tuned_rate(data: str, host: str, train_size: int) -> float:
    """Return the learning rate of a host of this kind on so many images, interpolated."""
    try:
        known = RATES[data, host]
    except KeyError:
        raise ConfigError(
            f"no learning rate is known for {host} hosts on {data}; measure it with "
            f"`python -m benchmarks tune_hosts` and add it to esper.lab.tasks.member"
        ) from None
    if train_size <= known[0][0]:
        return known[0][1]
    for (small, low), (large, high) in pairwise(known):
        if train_size <= large:
            share = math.log(train_size / small) / math.log(large / small)
            return math.exp((1.0 - share) * math.log(low) + share * math.log(high))
    return known[-1][1]


HostKind = Literal["plain", "residual"]
HOST_NAMES: dict[HostKind, str] = {"plain": "cnn", "residual": "residual"}
assert set(HOST_NAMES) == set(get_args(HostKind))

GROWTH_LIMIT = 2.0
"""Most parameters, and most operations per sample, of a grown member, as a multiple of its host's,
in training, search and proof."""

SlotPlace = Literal["blocks", "pools"]
SLOT_ROWS: dict[SlotPlace, int] = {"blocks": 0, "pools": 1}
"""The row of a host's slots that may grow."""


class Architecture(NamedTuple):
    """Values that members must share to run as one stack."""

    data: str
    host: HostKind
    width: int
    depth: int
    slots: SlotPlace
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class Member:
    """A task of a family: its value on every axis.

    Attributes:
        data: Name of the image task whose data and epoch size it uses.
        host: Plain or residual blocks.
        width: Channels of the first block; they double from block to block.
        depth: Number of blocks, each with a slot.
        slots: Position of seeds: after a block, or after its pool, where they cost a quarter.
        classes: Classes to classify; empty for all.
        train_size: Training images; 0 is all there are.
        label_noise: Share of the training labels that are wrong.
        horizon: Epochs of a run.
        rate_factor: Learning rate as a multiple of the best one of the host without growth.
    """

    data: str
    host: HostKind = "plain"
    width: int = 8
    depth: int = 3
    slots: SlotPlace = "blocks"
    classes: tuple[int, ...] = ()
    train_size: int = 0
    label_noise: float = 0.0
    horizon: int = 60
    rate_factor: float = 1.0

    @property
    def label(self) -> str:
        """A name that lists all values, usual ones left out."""
        pooled = " pooled" if self.slots == "pools" else ""
        parts = [f"{self.data} {self.host} {self.width}x{self.depth}{pooled}"]
        if self.classes:
            parts.append(f"classes {'-'.join(map(str, self.classes))}")
        parts.append(f"{self.train_size} images" if self.train_size else "all images")
        if self.label_noise:
            parts.append(f"noise {self.label_noise:g}")
        parts.append(f"{self.horizon} epochs")
        if self.rate_factor != 1.0:
            parts.append(f"rate x{self.rate_factor:g}")
        return ", ".join(parts)

    @property
    def architecture(self) -> Architecture:
        """The values that its host depends on."""
        return Architecture(
            self.data, self.host, self.width, self.depth, self.slots, self.num_classes
        )

    @property
    def num_slots(self) -> int:
        """Number of slots: one for each block."""
        return self.depth

    @property
    def num_classes(self) -> int:
        """Number of classes of the host."""
        return len(self.classes) or _ground(self.data).num_classes

    @property
    def learning_rate(self) -> float:
        """Highest learning rate of a run."""
        size = self.train_size or _ground(self.data).train_size
        return self.rate_factor * tuned_rate(self.data, self.host, size)

    @property
    def is_possible(self) -> bool:
        """Whether there are enough images of its classes, and enough pixels for its pools."""
        ground = _ground(self.data)
        images = ground.train_size * self.num_classes // ground.num_classes
        return self.train_size <= images and 2**self.depth <= ground.side

    def task(self, **changes: object) -> Task:
        """Return the task, with some fields of its configuration changed."""
        base = get_task(self.data)
        config = base.config.replace(
            host=HOST_NAMES[self.host],
            host_options=self._host_options(base.config.input_shape[0]),
            num_classes=self.num_classes,
            classes=self.classes or None,
            baseline_loss=math.log(self.num_classes),
            train_size=self.train_size or None,
            label_noise=self.label_noise,
            horizon=self.horizon,
            learning_rate=self.learning_rate,
            schedule=SCHEDULE,
            warmup=WARM_UP,
            seed_warmup=SEED_WARM_UP,
            param_limit=GROWTH_LIMIT,
            flop_limit=GROWTH_LIMIT,
        )
        return type(base)(config.replace(**changes))

    def descriptors(self) -> dict[str, float]:
        """Return figures of the task that are known before training."""
        return descriptors(self.task())

    def _host_options(self, in_channels: int) -> Config:
        kind = CnnConfig if self.host == "plain" else ResidualConfig
        return kind(
            channels=doubling(self.width, self.depth),
            in_channels=in_channels,
            num_classes=self.num_classes,
            slots=tuple(slot_id(SLOT_ROWS[self.slots], column) for column in range(self.depth)),
        )


class _Ground(NamedTuple):
    """Sizes of a data set, known without reading it."""

    side: int
    """Pixels of the shorter side of an image."""
    num_classes: int
    train_size: int
    """Number of training images without the validation split."""


TRAIN_SIZES: dict[str, int] = {
    "digits": 1_079,
    "cifar16": 27_000,
    "fashion14": 54_000,
    "cifar_baseline": 45_000,
}
"""Number of training images of the data sets of families; tests compare it with the data."""


@cache
def _ground(data: str) -> _Ground:
    if data not in TRAIN_SIZES:
        raise ConfigError(
            f"Member.data must be one of {', '.join(TRAIN_SIZES)}, got {data!r}; "
            f"name the size of its training split in esper.lab.tasks.member.TRAIN_SIZES first"
        )
    config = get_task(data).config
    assert config.num_classes is not None, "images have classes"
    return _Ground(min(config.input_shape[1:]), config.num_classes, TRAIN_SIZES[data])


class AnyMember(Protocol):
    """A task with a label."""

    @property
    def label(self) -> str:
        """A name of its own."""

    def task(self) -> Task:
        """Return the task."""

    def descriptors(self) -> dict[str, float]:
        """Return figures that are known before training, for arms that choose by them."""


@dataclass(frozen=True)
class GivenMember:
    """A task with a label of the caller's choice."""

    label: str
    given: Task

    def task(self) -> Task:
        """Return the task."""
        return self.given

    def descriptors(self) -> dict[str, float]:
        """Return figures of the task that are known before training."""
        return descriptors(self.given)


def descriptors(task: Task) -> dict[str, float]:
    """Return figures of a task that are known before training, most of them as logarithms."""
    config = task.config
    return {
        "log_parameters": math.log2(task.host_parameters),
        "log_flops": math.log2(max(task.host_flops, 1)),
        "slots": float(len(task.slot_paths)),
        "log_train_size": math.log2(config.train_size or 1 << 20),
        "label_noise": 10.0 * config.label_noise,
        "log_classes": math.log2(config.num_classes or 1),
        "log_horizon": math.log2(config.horizon),
        "log_rate": math.log2(config.learning_rate),
    }
