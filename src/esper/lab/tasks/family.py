"""Families of tasks that differ along axes, split into *train*, *select* and *claim* members.

No fixed schedule is right for a whole family: a narrow host on clean data should grow early, a wide
host on few or noisy samples should not grow. Controllers train on *train* members, the best one is
chosen on *select* members, and claims are measured on *claim* members.

    family = get_family("image16_family")
    for members in family.draw(7, architectures=4, conditions=16):
        tasks = [member.task() for member in members]
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Protocol

import torch

from esper.lab.tasks.arena import DepthMember, Draws
from esper.lab.tasks.member import AnyMember, HostKind, Member, SlotPlace
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, UsageError
from esper.leyline.registry import Registry
from esper.utils.process import grouped
from esper.utils.randomness import generator

FamilySplit = Literal["train", "select", "claim"]

Purpose = Literal["lacks capacity", "neutral", "useless or harmful"]
"""The expected benefit of growth on a claim member, by its axis values."""


FamilyMember = Member | DepthMember


class MemberSource(Protocol):
    """Where the members of a split come from: a product of axes, or a generator."""

    def items(self) -> list[tuple[str, tuple[object, ...]]]:
        """Return every axis with its values."""

    def members(self) -> tuple[FamilyMember, ...]:
        """Return the members, always the same ones."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The values of each axis; members are all possible combinations."""

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
        """Raise for an axis without values, or with duplicates."""
        for name, values in self.items():
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"Axes.{name} must have distinct values, got {values}")

    def items(self) -> list[tuple[str, tuple[object, ...]]]:
        """Return every axis with its values."""
        return [(each.name, getattr(self, each.name)) for each in fields(self)]

    def members(self) -> tuple[Member, ...]:
        """Return every possible combination as a member."""
        names = [name for name, _ in self.items()]
        product = itertools.product(*(values for _, values in self.items()))
        made = (Member(**dict(zip(names, each, strict=True))) for each in product)  # type: ignore[arg-type]
        return tuple(member for member in made if member.is_possible)


@dataclass(frozen=True)
class Family:
    """A family of tasks with its splits.

    Attributes:
        name: Name in configurations.
        summary: One line for people.
        train: Members that controllers train on.
        select: Members that policies are chosen on.
        claims: Members that claims are measured on, by the expected benefit of growth.
        claim_draws: Generator of claim members, for families whose claim nobody chooses: its key
            is the SHA-256 of the weights that are judged.
        settings: Settings of searches, clones and proofs on this family, by name.
        search_settings: More settings of searches.
        clone_settings: More settings of clones.
        proof_settings: More settings of proofs.
    """

    name: str
    summary: str
    train: MemberSource
    select: MemberSource
    claims: Mapping[Purpose, tuple[Member, ...]] = field(default_factory=dict)
    claim_draws: Draws | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    search_settings: Mapping[str, Any] = field(default_factory=dict)
    clone_settings: Mapping[str, Any] = field(default_factory=dict)
    proof_settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise if splits share a member."""
        seen: dict[FamilyMember, FamilySplit] = {}
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

    def members(self, split: FamilySplit) -> tuple[FamilyMember, ...]:
        """Return every member of a split."""
        return tuple(itertools.chain.from_iterable(self._by_architecture[split].values()))

    def drawn_claim(self, digest: str) -> tuple[DepthMember, ...]:
        """Return the claim members that follow from the SHA-256 of some weights."""
        assert self.claim_draws is not None, "its claim members are listed"
        return self.claim_draws.with_key(digest).members()

    def architectures(self, split: FamilySplit) -> tuple[Hashable, ...]:
        """Return every architecture of a split."""
        return tuple(self._by_architecture[split])

    @cached_property
    def max_slots(self) -> int:
        """Most slots of any member in any split."""
        return max(
            member.num_slots
            for known in self._by_architecture.values()
            for members in known.values()
            for member in members
        )

    def draw(
        self, seed: int, split: FamilySplit = "train", *, architectures: int, conditions: int
    ) -> tuple[tuple[FamilyMember, ...], ...]:
        """Draw members, grouped by architecture; they depend on the arguments alone.

        Architectures are drawn uniformly without replacement, then members of each. There are
        fewer of them if the split has fewer.

        Args:
            seed: seed of the draw.
            split: the split to draw from.
            architectures: number of architectures.
            conditions: number of members of each.
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
    def _by_architecture(self) -> dict[FamilySplit, dict[Hashable, list[FamilyMember]]]:
        claims = tuple(itertools.chain.from_iterable(self.claims.values()))
        splits: dict[FamilySplit, tuple[FamilyMember, ...]] = {
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
    """Register a family under its name, and return it."""
    return FAMILIES.register(family.name, family)


def get_family(name: str) -> Family:
    """Return the family called `name`."""
    return FAMILIES.get(name)


# ---- Which members a proof, a search or a clone plays


LAST_OPENING = 2
"""How often the claim members may be used."""


@dataclass(frozen=True, kw_only=True)
class MemberChoice(Config):
    """A choice of members of a family."""

    family: str = option("digits_family", "Name of the family.")
    split: FamilySplit = option("select", "Split of the family: train, select or claim.")
    labels: tuple[str, ...] = option(
        (), "Members with any of these labels, or parts of labels; all if empty."
    )
    count: int = option(0, "Number of members, drawn at random; 0 for all.", minimum=0)
    seed: int = option(0, "Seed of the draw.", minimum=0)
    claim_key: str = option(
        "",
        "SHA-256 of the weights that are judged, for families whose claim members are drawn; "
        "`esper prove` takes it from its first arm.",
    )

    def find(self, opening: int = 0) -> tuple[AnyMember, ...]:
        """Return the members.

        Args:
            opening: 1 or 2 for claim members, which are not used by accident; 0 for others.
        """
        if self.split == "claim" and not 1 <= opening <= LAST_OPENING:
            raise UsageError(
                "the claim members are used at most twice, for published results; "
                "confirm with --open-claim 1 or --open-claim 2, or use --split select"
            )
        if self.split != "claim" and opening:
            raise UsageError(f"--open-claim is for --split claim, not for {self.split!r}")
        known = self._members()
        if not known:
            raise UsageError(f"family {self.family!r} has no members to {self.split}")
        whole = {member.label for member in known}
        found = [
            member
            for member in known
            if not self.labels
            or any(p == member.label or (p not in whole and p in member.label) for p in self.labels)
        ]
        if not found:
            raise UsageError(
                f"no member has {' or '.join(map(repr, self.labels))} in its label; "
                "--list shows them all"
            )
        if not self.count or self.count >= len(found):
            return tuple(found)
        stream = generator(self.seed, self.family, self.split, "members of a proof")
        chosen = torch.randperm(len(found), generator=stream)[: self.count].tolist()
        return tuple(found[place] for place in sorted(chosen))

    @property
    def needs_claim_key(self) -> bool:
        """Whether its members follow from weights that are not named yet."""
        is_drawn = get_family(self.family).claim_draws is not None
        return self.split == "claim" and is_drawn and not self.claim_key

    def _members(self) -> Sequence[AnyMember]:
        family = get_family(self.family)
        if self.needs_claim_key:
            raise UsageError(
                f"the claim members of {self.family!r} follow from the weights that are judged; "
                "put a learned policy first, as in `esper prove FOLDER wait ...`, or write "
                "--set members.claim_key=SHA256"
            )
        if self.split == "claim" and self.claim_key:
            return family.drawn_claim(self.claim_key)
        return family.members(self.split)

    def purposes(self) -> dict[str, str]:
        """Return the expected benefit of growth on the claim members, by label."""
        claims = get_family(self.family).claims
        return {member.label: purpose for purpose, members in claims.items() for member in members}
