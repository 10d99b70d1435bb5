"""Families: tasks of one kind that differ, drawn by seed.

A member differs in the width and depth of its host, in how much training data there is, and in how
many labels are wrong. So no fixed schedule is right everywhere: a narrow host on clean data should
grow early, a wide host on few or noisy samples should be left alone.

    label, task = make_family("digits_family").draw(7)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from esper.kasmina.hosts import CnnConfig
from esper.leyline.config import Config, option
from esper.leyline.errors import UsageError
from esper.leyline.randomness import generator
from esper.leyline.registry import Registry
from esper.tasks.task import Task, get_task

F = TypeVar("F", bound="type[Family]")


@dataclass(frozen=True, kw_only=True)
class FamilyConfig(Config):
    """What members of a family are drawn from, each evenly."""

    widths: tuple[int, ...] = option((2, 4, 8, 16), "Channels of the first block.", minimum=1)
    depths: tuple[int, ...] = option((2, 3), "Blocks of the host, one slot each.", minimum=1)
    train_sizes: tuple[int, ...] = option(
        (0, 600, 200), "Training samples; 0 is all there are.", minimum=0
    )
    label_noises: tuple[float, ...] = option(
        (0.0, 0.0, 0.1, 0.3), "Share of wrong labels.", minimum=0.0, maximum=0.9
    )


class Family(ABC):
    """A kind of task; a subclass says what a member with these properties is."""

    name: ClassVar[str]
    """Set by `register_family`."""

    defaults: ClassVar[FamilyConfig]
    """What members are drawn from when nothing else is said."""

    def __init__(self, config: FamilyConfig | None = None) -> None:
        """Create the family with its defaults, or with a configuration of the caller's."""
        self.config = self.defaults if config is None else config

    @abstractmethod
    def member(self, *, width: int, depth: int, train_size: int, label_noise: float) -> Task:
        """Return the task with these properties; a train_size of 0 is all there is."""

    @property
    def max_slots(self) -> int:
        """Slots of the member with the most of them."""
        return max(self.config.depths)

    def draw(self, seed: int) -> tuple[str, Task]:
        """Return a member and its label; both depend on the seed alone."""
        config, stream = self.config, generator(seed, self.name, "member")

        def pick(count: int) -> int:
            return int(torch.randint(count, (), generator=stream))

        width = config.widths[pick(len(config.widths))]
        depth = config.depths[pick(len(config.depths))]
        size = config.train_sizes[pick(len(config.train_sizes))]
        noise = config.label_noises[pick(len(config.label_noises))]
        label = f"{self.name}[width {width}, depth {depth}, train {size or 'all'}, noise {noise:g}]"
        task = self.member(width=width, depth=depth, train_size=size, label_noise=noise)
        return label, task


FAMILIES: Registry[type[Family]] = Registry("task family")


def register_family(name: str) -> Callable[[F], F]:
    """Register a class as the family called `name`; the class is returned with its name set."""

    def decorate(family: F) -> F:
        if not (isinstance(family, type) and issubclass(family, Family)):
            raise UsageError(f"family {name!r} must be a class that derives from Family")
        if not isinstance(getattr(family, "defaults", None), FamilyConfig):
            raise UsageError(f"family {name!r} needs a class attribute defaults, a FamilyConfig")
        FAMILIES.register(name, family)
        family.name = name
        return family

    return decorate


def make_family(name: str) -> Family:
    """Return the family called `name` with its defaults."""
    return FAMILIES.get(name)()


class _ConvFamily(Family):
    """Conv hosts on the data of one task."""

    base: ClassVar[str]
    """The task whose data and settings members have."""

    def member(self, *, width: int, depth: int, train_size: int, label_noise: float) -> Task:
        """Return the base task with another host and less or worse data."""
        task = get_task(self.base)
        options = task.config.host_options
        assert isinstance(options, CnnConfig), "members of this family are conv hosts"
        # The first block is the narrowest, as in the base task's host.
        channels = tuple(width if block == 0 else 2 * width for block in range(depth))
        config = task.config.replace(
            host_options=CnnConfig(channels=channels, in_channels=options.in_channels),
            train_size=train_size or None,
            label_noise=label_noise,
        )
        return type(task)(config)


@register_family("digits_family")
class DigitsFamily(_ConvFamily):
    """Embedded digits with hosts of 2 to 3 blocks, full or small training sets, wrong labels."""

    base = "digits"
    defaults = FamilyConfig()


@register_family("cifar_family")
class CifarFamily(_ConvFamily):
    """CIFAR-10 with hosts of 2 to 4 blocks, full or small training sets, wrong labels."""

    base = "cifar_baseline"
    defaults = FamilyConfig(widths=(4, 8, 16, 32), depths=(2, 3, 4), train_sizes=(0, 10_000, 2_000))
