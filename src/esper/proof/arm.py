"""Arms: what is played on every member, be it a controller, a schedule or a network that waits.

An arm says what its rows are networks for and who decides for them. Arms that carry out schedules
are joined into one controller, so that hundreds of plans cost little more than one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.errors import UsageError, nearest
from esper.leyline.randomness import derive_seed
from esper.proof.member import Member
from esper.proof.plans import PlainSchedule
from esper.proof.static import Architecture, from_scratch, widened
from esper.tamiyo.controllers import CONTROLLERS, find_policy, make_controller
from esper.tasks.task import Task

WAIT = "wait"
STATIC = "static"
SCRATCH = "scratch"

DRAWS_NOTHING = (WAIT, "plateau", "heuristic", "schedule", "greedy", "tamiyo")
"""Controllers that decide by what they see of a row alone: one serves all members. Draws of any
other, a third party's among them, may depend on the number of a row: each member has its own."""


@dataclass(frozen=True)
class ScheduleArm:
    """Carries out a schedule, the same on every member or one for each."""

    name: str
    schedule: Callable[[Member], PlainSchedule]

    def task(self, member: Member) -> Task:
        """Return the member's own task."""
        return member.task()


@dataclass(frozen=True)
class ControllerArm:
    """A controller by the name it has on the command line."""

    name: str
    spec: str

    def task(self, member: Member) -> Task:
        """Return the member's own task."""
        return member.task()

    @property
    def is_drawing(self) -> bool:
        """Whether its decisions may depend on the number of a row."""
        return self.spec.partition(":")[0] not in DRAWS_NOTHING

    def controller(self, context: ControllerContext) -> Controller:
        """Return the controller for some rows."""
        return make_controller(self.spec, context)


@dataclass(frozen=True)
class StaticArm:
    """A wider host that only waits, at a learning rate of its own for every member."""

    name: str
    factor: float
    rates: Mapping[str, float]
    """Learning rate by member."""

    def task(self, member: Member) -> Task:
        """Return the member's task with a wider host."""
        return widened(member.task(), self.factor, self.rates[member.label])


@dataclass(frozen=True)
class ScratchArm:
    """What another arm grew on a member, trained from scratch."""

    name: str
    architectures: Mapping[str, Architecture]
    """By member."""

    def task(self, member: Member) -> Task:
        """Return the member's task with a host that has the seeds from the beginning."""
        return from_scratch(member.task(), self.architectures[member.label])


Arm = ScheduleArm | ControllerArm | StaticArm | ScratchArm
"""Something to play; `task` is what its rows on a member are networks for."""


def heuristic_arm(name: str, settings: Mapping[str, Any]) -> ControllerArm:
    """Return the heuristic with some of its constants set."""
    told = ",".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    return ControllerArm(name, f"heuristic:{told}" if told else "heuristic")


def waiting() -> ScheduleArm:
    """Return the arm that never acts."""
    return ScheduleArm(WAIT, lambda member: ())


def group_of(arm: Arm, member: Member) -> tuple[str, ...]:
    """Return what cells must share to have one controller."""
    if isinstance(arm, ControllerArm):
        return (arm.name, member.label) if arm.is_drawing else (arm.name,)
    return ()


def seed_of(arm: Arm, member: Member) -> int:
    """Return the seed of an arm's draws on a member."""
    return derive_seed(arm.name, member.label, "arm")


_NAMED = re.compile(r"([\w .×-]+)=(.*)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An arm as it is asked for on the command line: 'SPEC' or 'NAME=SPEC'."""

    name: str
    kind: str
    """A registered controller, or contextual, privileged, static, scratch."""
    argument: str | None

    @property
    def controller(self) -> str:
        """The controller as it is asked for."""
        return self.kind if self.argument is None else f"{self.kind}:{self.argument}"


_FILES = ("contextual", "privileged")
KINDS = {
    "wait": "nothing grows",
    "random": "a random legal operation at every decision",
    "periodic": "a random legal seed every few epochs, brought up unjudged (periodic:every=10)",
    "plateau": "a seed when the score has stopped rising, kept if it rose (plateau:patience=5)",
    "heuristic": "the hand-written rules, with settings or a file of them (heuristic:FILE)",
    "schedule": "one schedule on every member (schedule:FILE)",
    "contextual": "a schedule by the task's descriptors, without feedback (contextual:FILE)",
    "privileged": "the schedule searched on the member itself (privileged:FILE)",
    "greedy": "a learned policy, its likeliest actions (greedy:FOLDER, or just the FOLDER)",
    "learned": "a learned policy that draws (learned:FOLDER)",
    "tamiyo": "the learned controller that comes along, or one in a folder (tamiyo:FOLDER)",
    "static": "hosts of 1, 1.5, 2 and 3 times the width, each at its own tuned learning rate",
    "scratch": "what another arm grew, trained from scratch (scratch:ARM)",
}
"""What can be played, for help texts."""


def parse_arm(text: str) -> ArmSpec:
    """Return what an arm of the command line asks for."""
    spec, name = text, None
    match = _NAMED.match(text)
    if match and ":" not in match[1] and "/" not in match[1]:
        name, spec = match[1].strip(), match[2]
    kind, colon, argument = spec.partition(":")
    if kind in (*_FILES, SCRATCH) and not argument:
        wanted = "ARM" if kind == SCRATCH else "FILE"
        raise UsageError(f"arm {kind!r} needs an argument; write {kind}:{wanted}")
    if kind == STATIC and colon:
        raise UsageError(f"arm 'static' takes no argument, got {argument!r}")
    known = (*_FILES, STATIC, SCRATCH)
    if kind not in known and kind not in CONTROLLERS:
        if not find_policy(spec).exists():
            raise UsageError(
                f"there is no arm {spec!r}{nearest(spec, list(KINDS)) or ';'} it is one of "
                f"{', '.join(KINDS)}, the folder of a policy or of the run that trained it, or a "
                "controller of your own, after --import FILE"
            )
        return ArmSpec(name or spec.rstrip("/").rpartition("/")[2], "greedy", spec)
    return ArmSpec(name or kind, kind, argument if colon else None)


def check_names(specs: Sequence[ArmSpec]) -> None:
    """Refuse arms that share a name, and scratch arms of something that is not played."""
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two arms are called {name!r}; name them: NAME=SPEC")
    for spec in specs:
        if spec.kind == SCRATCH and spec.argument not in names:
            raise UsageError(
                f"arm {spec.name!r} is of {spec.argument!r}, which is not played; "
                f"played are {', '.join(names)}"
            )
