"""What arms are played on: members of a family, and what is known of them beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from esper.lab.tasks.family import FamilySplit, get_family
from esper.lab.tasks.member import Member as FamilyMember
from esper.lab.tasks.task import Task
from esper.leyline.config import Config, option
from esper.leyline.errors import UsageError
from esper.utils.randomness import generator

LAST_OPENING = 2
"""How often the claim members may be looked at."""


@dataclass(frozen=True)
class GivenMember:
    """A task under a label of the caller's choice."""

    label: str
    given: Task

    def task(self) -> Task:
        """Return the task."""
        return self.given


Member = FamilyMember | GivenMember
"""A task with a label of its own that says how it differs from others."""


@dataclass(frozen=True, kw_only=True)
class MemberChoice(Config):
    """Which members of which family."""

    family: str = option("digits_family", "Name of the family.")
    split: FamilySplit = option("select", "Members to train on, to choose by, or to claim on.")
    labels: tuple[str, ...] = option(
        (), "Labels, or parts of labels that many share; members with any of them, all if empty."
    )
    count: int = option(0, "How many, drawn by the seed; 0 for all.", minimum=0)
    seed: int = option(0, "Names the draw.", minimum=0)

    def find(self, opening: int = 0) -> tuple[Member, ...]:
        """Return the members.

        Args:
            opening: which opening of the claim this is; the claim is not opened by accident.
        """
        if self.split == "claim" and not 1 <= opening <= LAST_OPENING:
            raise UsageError(
                "the claim members are opened at most twice, for the result that is published; "
                "say so with --open-claim 1 or --open-claim 2, or use --split select"
            )
        if self.split != "claim" and opening:
            raise UsageError(f"--open-claim is for --split claim, not for {self.split!r}")
        known: Sequence[Member] = get_family(self.family).members(self.split)
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

    def purposes(self) -> dict[str, str]:
        """Return what growth can bring the claim members, by label."""
        claims = get_family(self.family).claims
        return {member.label: purpose for purpose, members in claims.items() for member in members}


def descriptors(task: Task) -> dict[str, float]:
    """Return what is known of a task before it is trained, in units that compare."""
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
