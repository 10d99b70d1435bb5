"""Families: tasks of one kind that differ along axes, split into those to train, select and claim.

No fixed schedule is right for a whole family: a narrow host on clean data should grow early, a wide
host on few or noisy samples should be left alone. A controller trains on *train* members, the best
one is chosen on *select* members, and what is said of it is measured on *claim* members.

    family = get_family("image16_family")
    for members in family.draw(7, architectures=4, conditions=16):
        tasks = [member.task() for member in members]

The shipped families and their splits: `esper.tasks.arena`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal

import torch

from esper.leyline.errors import ConfigError
from esper.leyline.grouping import grouped
from esper.leyline.randomness import generator
from esper.leyline.registry import Registry
from esper.tasks.member import Architecture, HostKind, Member, SlotPlace

FamilySplit = Literal["train", "select", "claim"]

Purpose = Literal["lacks capacity", "neutral", "useless or harmful"]
"""What growth can bring a claim member, as far as its axis values tell beforehand."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The values that each axis of a member may take; a product, less what cannot be."""

    data: tuple[str, ...]
    host: tuple[HostKind, ...] = ("plain",)
    width: tuple[int, ...]
    depth: tuple[int, ...]
    slots: tuple[SlotPlace, ...] = ("blocks",)
    classes: tuple[tuple[int, ...], ...] = ((),)
    train_size: tuple[int, ...]
    label_noise: tuple[float, ...] = (0.0,)
    horizon: tuple[int, ...] = (60,)
    rate_factor: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        """Refuse an axis without values, or with one twice."""
        for name, values in self.items():
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"Axes.{name} must have values, each once, got {values}")

    def items(self) -> list[tuple[str, tuple[object, ...]]]:
        """Return every axis with its values."""
        return [(each.name, getattr(self, each.name)) for each in fields(self)]

    def members(self) -> tuple[Member, ...]:
        """Return every possible member of the product."""
        names = [name for name, _ in self.items()]
        product = itertools.product(*(values for _, values in self.items()))
        made = (Member(**dict(zip(names, each, strict=True))) for each in product)  # type: ignore[arg-type]
        return tuple(member for member in made if member.is_possible)


@dataclass(frozen=True)
class Family:
    """A kind of task with its splits.

    Attributes:
        name: What it is called in configurations.
        summary: One line for people.
        train: What training draws.
        select: What policies are chosen on.
        claims: What is claimed is measured on these members, by what growth can bring there.
    """

    name: str
    summary: str
    train: Axes
    select: Axes
    claims: Mapping[Purpose, tuple[Member, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse splits that share a member."""
        seen: dict[Member, FamilySplit] = {}
        for split in ("train", "select", "claim"):
            for member in self.members(split):
                if member in seen:
                    raise ConfigError(
                        f"family {self.name!r} has {member.label!r} in {seen[member]} and {split}; "
                        f"a member belongs to one split, once"
                    )
                seen[member] = split
        labels = [member.label for member in seen]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"family {self.name!r} has two members called {twice!r}; their values are too close"
            )

    def members(self, split: FamilySplit) -> tuple[Member, ...]:
        """Return every member of a split."""
        return tuple(itertools.chain.from_iterable(self._by_architecture[split].values()))

    def architectures(self, split: FamilySplit) -> tuple[Architecture, ...]:
        """Return every architecture of a split."""
        return tuple(self._by_architecture[split])

    @cached_property
    def max_slots(self) -> int:
        """Slots of the member with the most of them, in any split."""
        return max(each.depth for known in self._by_architecture.values() for each in known)

    def draw(
        self, seed: int, split: FamilySplit = "train", *, architectures: int, conditions: int
    ) -> tuple[tuple[Member, ...], ...]:
        """Return members by architecture; they depend on the arguments alone.

        Architectures are drawn evenly, and of each its conditions. Both are distinct, so there are
        fewer of them where the split has fewer.

        Args:
            seed: seed of the draw.
            split: which members are drawn.
            architectures: how many architectures.
            conditions: how many members of each.
        """
        stream = generator(seed, self.name, split, "members")
        known = list(self._by_architecture[split].values())
        if not known:
            raise ConfigError(f"family {self.name!r} has no members to {split}")
        chosen = torch.randperm(len(known), generator=stream)[:architectures].tolist()
        drawn = []
        for place in chosen:
            members = known[place]
            order = torch.randperm(len(members), generator=stream)[:conditions].tolist()
            drawn.append(tuple(members[number] for number in order))
        return tuple(drawn)

    @cached_property
    def _by_architecture(self) -> dict[FamilySplit, dict[Architecture, list[Member]]]:
        claims = tuple(itertools.chain.from_iterable(self.claims.values()))
        splits: dict[FamilySplit, tuple[Member, ...]] = {
            "train": self.train.members(),
            "select": self.select.members(),
            "claim": claims,
        }
        return {
            split: grouped((member.architecture, member) for member in members)
            for split, members in splits.items()
        }


FAMILIES: Registry[Family] = Registry("task family", "esper.families")


def register_family(family: Family) -> Family:
    """Make a family known under its name, and return it."""
    return FAMILIES.register(family.name, family)


def get_family(name: str) -> Family:
    """Return the family called `name`."""
    return FAMILIES.get(name)
