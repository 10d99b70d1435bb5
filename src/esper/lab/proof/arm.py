"""Arms: what is compared on every member: a controller, a schedule, or a static network.

An arm defines the task of its rows and their controller. All schedules are carried out by one
controller, so that hundreds of plans cost little more than one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.lab.proof.plans import PlainSchedule
from esper.lab.proof.static import Architecture, deepened, from_scratch, widened, with_share
from esper.lab.tasks.member import AnyMember
from esper.lab.tasks.task import Task
from esper.leyline.actions import placeholder_actions
from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.errors import UsageError, nearest
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.tamiyo.controllers import CONTROLLERS, find_controller, find_policy, make_controller
from esper.tamiyo.controllers.ablated import ShuffledCurves
from esper.utils.process import grouped
from esper.utils.randomness import derive_seed

# ---- Several controllers for the rows of one population


class RowControllers:
    """Controls every row of a population by one of several controllers.

    Args:
        parts: controllers with their rows; every row belongs to one of them.
    """

    def __init__(self, parts: Sequence[tuple[Controller, Sequence[int]]]) -> None:
        """Keep the controllers; `reset` starts them."""
        self._controllers = [controller for controller, _ in parts]
        self._rows = [torch.tensor(rows, dtype=torch.int64) for _, rows in parts]

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Reset every controller for its rows."""
        everyone = torch.cat(self._rows).sort().values
        assert torch.equal(everyone, torch.arange(rows)), "every row needs one controller"
        self._rows = [part.to(device) for part in self._rows]
        for controller, part in zip(self._controllers, self._rows, strict=True):
            controller.reset(len(part), device)

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return the actions of every controller for its rows."""
        actions = placeholder_actions(signals.rows, masks.op.device)
        for controller, part in zip(self._controllers, self._rows, strict=True):
            own = part.to(masks.op.device)
            chosen = controller.act(
                signals.select(part.to(signals.stage.device)), masks.select(own)
            )
            for head, values in chosen.items():
                actions[head][own] = values.to(own.device)
        return actions

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every controller."""
        return {"parts": [controller.state_dict() for controller in self._controllers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of every controller."""
        for controller, own in zip(self._controllers, state["parts"], strict=True):
            controller.load_state_dict(own)


WAIT = "wait"
STATIC = "static"
DEPTH = "depth"
SCRATCH = "scratch"
SHUFFLED = ShuffledCurves.name
HALVING = "halving"

DRAWS_NOTHING = (
    *(WAIT, "plateau", "heuristic", "trial", "slope", "schedule", "greedy", "tamiyo"),
    *("frozen", "without_curves", "only_curves"),
)
"""Controllers whose actions in a row depend on that row's signals alone: one instance serves all
members. Others, such as third-party ones, may depend on the row's number: each member has its
own."""


@dataclass(frozen=True)
class ScheduleArm:
    """Carries out a schedule, the same on every member or one for each."""

    name: str
    schedule: Callable[[AnyMember], PlainSchedule]

    def task(self, member: AnyMember) -> Task:
        """Return the member's own task."""
        return member.task()


@dataclass(frozen=True)
class ControllerArm:
    """A controller by the name it has on the command line."""

    name: str
    spec: str

    def task(self, member: AnyMember) -> Task:
        """Return the member's own task."""
        return member.task()

    @property
    def is_drawing(self) -> bool:
        """Whether its actions may depend on the number of a row."""
        return self.spec.partition(":")[0] not in DRAWS_NOTHING

    def controller(self, context: ControllerContext) -> Controller:
        """Return the controller for some rows."""
        return make_controller(self.spec, context)


@dataclass(frozen=True)
class ShuffledArm:
    """A learned policy that sees the curves of other members.

    Its rows are played together on all members of a proof, because each is shown what another of
    them measures at the same step (`find_donors`).
    """

    name: str
    folder: str

    def task(self, member: AnyMember) -> Task:
        """Return the member's own task."""
        return member.task()

    def controller(self, context: ControllerContext, donors: Sequence[int]) -> Controller:
        """Return the controller for all rows; `donors` are the rows whose curves they see."""
        return ShuffledCurves.build(self.folder, context, donors)


def find_donors(members: Sequence[AnyMember]) -> dict[str, str]:
    """Return for every member the one whose curves it is shown, by label.

    Members with the same kind of host and number of slots are put into a circle, in an order drawn
    by their labels, and each is shown the curves of the next. A member that is the only one of its
    kind is shown those of the next in the circle of all members. The order of the members does not
    matter.

    Raises:
        UsageError: There is one member.
    """
    if len(members) < 2:
        raise UsageError(
            f"arm {SHUFFLED!r} shows every member the curves of another one, and there is only "
            f"{members[0].label!r}; choose more members"
        )
    drawn = sorted(members, key=lambda member: derive_seed(0, member.label, "donors"))
    everyone = [member.label for member in drawn]
    kinds = grouped((_kind_of(member), member.label) for member in drawn)
    found: dict[str, str] = {}
    for alike in kinds.values():
        circle = alike if len(alike) > 1 else everyone
        for label in alike:
            found[label] = circle[(circle.index(label) + 1) % len(circle)]
    return found


def _kind_of(member: AnyMember) -> tuple[str, int]:
    """Return the kind of a member's host and its number of slots."""
    task = member.task()
    return task.config.host, len(task.slot_paths)


@dataclass(frozen=True)
class StaticArm:
    """A wider host without growth, with its own learning rate on every member."""

    name: str
    factor: float
    rates: Mapping[str, float]
    """Learning rate by member."""

    def task(self, member: AnyMember) -> Task:
        """Return the member's task with a wider host."""
        return widened(member.task(), self.factor, self.rates[member.label])


@dataclass(frozen=True)
class DepthArm:
    """A deeper host without growth, of the same depth on every member or one for each."""

    name: str
    depth: Callable[[AnyMember], int]
    """Blocks where the member's host has one."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rate by member; the member's own where there is none."""
    share: float = 1.0
    """Share of the member's budget that it has."""

    def task(self, member: AnyMember) -> Task:
        """Return the member's task with a deeper host."""
        task = deepened(with_share(member.task(), self.share), self.depth(member))
        rate = self.rates.get(member.label, task.config.learning_rate)
        return type(task)(task.config.replace(learning_rate=rate))


@dataclass(frozen=True)
class ScratchArm:
    """The architecture that another arm grew on a member, trained from scratch."""

    name: str
    architectures: Mapping[str, Architecture]
    """By member."""

    def task(self, member: AnyMember) -> Task:
        """Return the member's task with a host that has the seeds from the beginning."""
        return from_scratch(member.task(), self.architectures[member.label])


Arm = ScheduleArm | ControllerArm | ShuffledArm | StaticArm | DepthArm | ScratchArm
"""Something to compare; `task` returns the task of its rows on a member."""


def heuristic_arm(name: str, settings: Mapping[str, Any]) -> ControllerArm:
    """Return the heuristic with some of its settings changed."""
    text = ",".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    return ControllerArm(name, f"heuristic:{text}" if text else "heuristic")


def waiting() -> ScheduleArm:
    """Return the arm that never acts."""
    return ScheduleArm(WAIT, lambda member: ())


def group_of(arm: Arm, member: AnyMember) -> tuple[str, ...]:
    """Return the key of cells that share one controller."""
    if isinstance(arm, ControllerArm):
        return (arm.name, member.label) if arm.is_drawing else (arm.name,)
    return (arm.name,) if isinstance(arm, ShuffledArm) else ()


def seed_of(arm: Arm, member: AnyMember) -> int:
    """Return the seed of an arm's draws on a member."""
    return derive_seed(arm.name, member.label, "arm")


_NAMED = re.compile(r"([\w .×-]+)=(.*)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An arm as given on the command line: 'SPEC' or 'NAME=SPEC'."""

    name: str
    kind: str
    """A registered controller, or one of those that only proofs have, such as contextual."""
    argument: str | None

    @property
    def controller(self) -> str:
        """The controller's name with its argument."""
        return self.kind if self.argument is None else f"{self.kind}:{self.argument}"

    @property
    def is_derived(self) -> bool:
        """Whether it follows from results of other rows: rates, networks that grew, or curves."""
        return self.is_tuned or self.kind in (SCRATCH, HALVING)

    @property
    def depth(self) -> int:
        """Depth of a depth arm."""
        return int((self.argument or "").partition(",")[0])

    @property
    def is_tuned(self) -> bool:
        """Whether its learning rate is chosen on every member, on separate seeds."""
        return self.kind == STATIC or (
            self.kind == DEPTH and (self.argument or "").endswith(_TUNED)
        )


_FILES = ("contextual", "privileged")
_TUNED = ",tuned"
_DEPTH = re.compile(rf"[1-9]\d*({_TUNED})?\Z")
KINDS = {
    "wait": "nothing grows",
    "random": "a random legal operation at every decision",
    "periodic": "a random legal seed every few epochs, kept without a test (periodic:every=10)",
    "plateau": "a seed when the score has stopped rising, kept if it rose (plateau:patience=5)",
    "heuristic": "the hand-written rules, with settings or a file of them (heuristic:FILE)",
    "trial": "one seed at a time from the middle slot, kept if it contributes (trial:seeds=1)",
    "slope": "doubles the depth of a stage when that pays per FLOP (slope:windows=4)",
    "schedule": "one schedule on every member (schedule:FILE)",
    "contextual": "what a rule of a search chooses by the task's descriptors (contextual:FILE)",
    "privileged": "what a search found best on the member itself (privileged:FILE)",
    "greedy": "a learned policy, its likeliest actions (greedy:FOLDER, or just the FOLDER)",
    "learned": "a learned policy that samples its actions (learned:FOLDER)",
    "frozen": "a learned policy whose curves stay at their first values (frozen:FOLDER)",
    "without_curves": "a learned policy that sees no curves (without_curves:FOLDER)",
    "only_curves": "a learned policy that sees nothing but curves (only_curves:FOLDER)",
    "shuffled": "a learned policy that sees the curves of another member (shuffled:FOLDER)",
    "tamiyo": "the learned controller of Esper, or one in a folder (tamiyo:FOLDER)",
    "static": "hosts of 1, 1.5, 2 and 3 times the width, each at its own tuned learning rate",
    "depth": "4 blocks for each one of the host, from the start (depth:4, or depth:4,tuned)",
    "halving": "depths 1, 2 and 4; the worst is stopped, twice; one budget in total",
    "scratch": "the architecture that another arm grew, trained from scratch (scratch:ARM)",
}
"""The kinds of arms, for help texts."""


def parse_arm(text: str) -> ArmSpec:
    """Parse an arm of the command line."""
    spec, name = text, None
    match = _NAMED.match(text)
    if match and ":" not in match[1] and "/" not in match[1]:
        name, spec = match[1].strip(), match[2]
    kind, colon, argument = spec.partition(":")
    if kind in (*_FILES, SCRATCH, SHUFFLED) and not argument:
        wanted = {SCRATCH: "ARM", SHUFFLED: "FOLDER"}.get(kind, "FILE")
        raise UsageError(f"arm {kind!r} needs an argument; write {kind}:{wanted}")
    if kind in (STATIC, HALVING) and colon:
        raise UsageError(f"arm {kind!r} takes no argument, got {argument!r}")
    if kind == DEPTH:
        if not _DEPTH.match(argument):
            raise UsageError(
                f"arm 'depth' needs a number of blocks, 1 or more, got {argument!r}; write "
                f"depth:4, or depth:4{_TUNED} to tune its learning rate"
            )
        return ArmSpec(name or f"depth {argument.replace(',', ', ')}", kind, argument)
    known = (*_FILES, STATIC, SCRATCH, SHUFFLED, HALVING)
    if kind not in known and kind not in CONTROLLERS:
        if not find_policy(spec).exists():
            raise UsageError(
                f"there is no arm {spec!r}{nearest(spec, list(KINDS)) or ';'} it is one of "
                f"{', '.join(KINDS)}, the folder of a policy or of the run that trained it, or a "
                "controller of your own, after --import FILE"
            )
        return ArmSpec(name or spec.rstrip("/").rpartition("/")[2], "greedy", spec)
    return ArmSpec(name or kind, kind, argument if colon else None)


def weights_digest(spec: ArmSpec) -> str:
    """Return the SHA-256 of the weights of a learned arm, which draws claim members."""
    folder = None
    if spec.kind == "tamiyo":
        folder = find_controller(spec.argument or spec.kind)
    elif spec.kind in ("greedy", "learned") and spec.argument:
        folder = find_policy(spec.argument)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"arm {spec.name!r} has no weights, and the claim members follow from the SHA-256 of "
            "those of the first arm; put a learned policy first, or write "
            "--set members.claim_key=SHA256"
        )
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def check_names(specs: Sequence[ArmSpec]) -> None:
    """Raise for arms that share a name, and for scratch arms of an arm that is not played."""
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two arms are called {name!r}; name them: NAME=SPEC")
    for spec in specs:
        if spec.kind == SCRATCH and spec.argument not in names:
            raise UsageError(
                f"arm {spec.name!r} needs the arm {spec.argument!r}, which is not among "
                f"{', '.join(names)}; add it"
            )
