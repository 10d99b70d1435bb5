"""Operations by hand: names in, a `Command` out, a result back; and a view of one slot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.kin import KIN
from esper.kasmina.blueprints.registry import (
    BLUEPRINTS,
    Blueprint,
    blueprint_names,
    immediate_table,
)
from esper.kasmina.lifecycle import (
    Applied,
    Outcome,
)
from esper.kasmina.slots.placement import Placement
from esper.kasmina.state import GateConfig, SlotState, describe_failure
from esper.leyline.actions import (
    HEAD_NAMES,
    PLACEHOLDERS,
    Actions,
    Command,
    LifecycleOp,
    describe_action,
    head_values,
)
from esper.leyline.errors import SlotError, UsageError, unknown_name
from esper.leyline.records import DecisionRecord, SlotRecord, copy_fields
from esper.leyline.rules import Refusal
from esper.leyline.slots import NOOP, AxesName, Immediate, Symmetry, Topology
from esper.leyline.stages import STYLE_SPECS, AlphaAlgorithm, AlphaCurve, BlendStyle, SeedStage

if TYPE_CHECKING:
    from esper.kasmina.garden import Garden


E = TypeVar("E", bound=IntEnum)


@dataclass(frozen=True, slots=True)
class OperationResult:
    """What became of one operation."""

    op: LifecycleOp
    slot: str
    outcome: Outcome
    reason: str
    """Why it had no effect; empty when it had."""

    @property
    def ok(self) -> bool:
        """Whether the operation took effect."""
        return self.outcome is Outcome.DONE

    def __bool__(self) -> bool:
        return self.ok


def describe_result(
    before: SlotState,
    command: Command,
    applied: Applied,
    places: Sequence[Placement],
    gates: GateConfig,
) -> OperationResult:
    """Put into words what became of a one-row command in the state `before` it."""
    index = min(max(int(command.slot[0]), 0), len(places) - 1)
    op, place = LifecycleOp(int(command.op[0])), places[index]
    slot = place.name
    outcome = Outcome(int(applied.outcome[0]))
    reason = ""
    if outcome is Outcome.ILLEGAL:
        refusal = Refusal(int(applied.refusal[0]))
        reason = f"{op.name} at {slot}: {refusal.text}"
        is_copy = int(command.blueprint[0]) == BLUEPRINTS.get(KIN).id
        if refusal is Refusal.BLUEPRINT_DOES_NOT_FIT and is_copy and place.kin.problem:
            why = f"no copy of {place.path!r} can grow there: {place.kin.problem}"
            reason = f"{op.name} at {slot}: {why}"
    elif outcome is Outcome.GATE_FAILED:
        reason = f"{op.name} at {slot}: {describe_failure(before, index, gates)}"
    return OperationResult(op, slot, outcome, reason)


def describe_decision(
    actions: Actions, result: OperationResult, slot_names: Sequence[str], why: str = ""
) -> DecisionRecord:
    """Return a decision with the arguments its op uses; the others are None.

    Args:
        actions: what was chosen.
        result: what became of it.
        slot_names: names of the slots.
        why: the reason for what took effect.
    """
    chosen: dict[str, Any] = describe_action(
        {head: int(actions[head][0]) for head in HEAD_NAMES},
        head_values(slot_names, blueprint_names()),
    )
    reason = result.reason or why
    return DecisionRecord(**chosen, outcome=result.outcome.name.lower(), reason=reason)


def make_command(
    op: LifecycleOp,
    slot: int,
    *,
    blueprint: int = NOOP,
    style: BlendStyle | None = None,
    tempo: int = 5,
    target: float = 1.0,
    speed: int = 0,
    curve: AlphaCurve = AlphaCurve.LINEAR,
) -> Command:
    """Return a one-row command with these values."""
    spec = STYLE_SPECS[BlendStyle(PLACEHOLDERS["style"]) if style is None else style]

    def whole(value: int) -> torch.Tensor:
        return torch.tensor([int(value)], dtype=torch.int64)

    return Command(
        op=whole(op),
        slot=whole(slot),
        blueprint=whole(blueprint),
        algorithm=whole(spec.algorithm),
        ramp=whole(spec.curve),
        tempo=whole(tempo),
        target=torch.tensor([float(target)], dtype=torch.float64),
        speed=whole(speed),
        curve=whole(curve),
    )


def parse_choice(kind: type[E], value: str | E, what: str) -> E:
    """Return the member of an enum by name (any case) or by itself."""
    if isinstance(value, kind):
        return value
    names = {member.name.lower(): member for member in kind}
    if not isinstance(value, str):
        raise UsageError(f"{what} must be one of {', '.join(names)}, got {value!r}")
    try:
        return names[value.lower()]
    except KeyError:
        raise unknown_name(what, value, names) from None


def check_number(
    name: str, value: float, low: float, high: float | None = None, *, whole: bool = False
) -> None:
    """Refuse a number outside [low, high], or one that should be whole, with one line."""
    kind = int if whole else int | float
    in_range = isinstance(value, kind) and not isinstance(value, bool)
    in_range = in_range and value >= low and (high is None or value <= high)
    if not in_range:
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        allowed = f"a whole number, {allowed}" if whole else allowed
        raise UsageError(f"{name} must be {allowed}, got {value!r}")


def check_target(value: float) -> None:
    """Refuse an amplitude to aim at that is not above 0 and at most 1."""
    check_number("alpha_target", value, 0, 1)
    if value <= 0:
        raise SlotError("alpha_target must be above 0; prune the seed to take it out")


def immediate_seeds(model: nn.Module, slots: Sequence[Placement], rule: Immediate) -> Tensor:
    """Return bool [S, B]: which seeds are at full amplitude from the first step.

    What is frozen may change while a model trains, so this holds for now.
    """

    def is_frozen(slot: Placement) -> bool:
        own = list(model.get_submodule(slot.path).parameters())
        return not any(parameter.requires_grad for parameter in own or model.parameters())

    kinds = [(slot.topology, is_frozen(slot)) for slot in slots]
    return immediate_table(kinds, rule, blueprint_names())


def check_immediate(
    blueprint: Blueprint, topology: Topology, style: BlendStyle, immediate: bool
) -> None:
    """Refuse a seed at full amplitude from the first step that cannot be so."""
    if not immediate:
        return
    if not blueprint.can_be_immediate(topology):
        raise UsageError(
            f"a {blueprint.name!r} seed changes the activation from its first step, so it has to "
            "be blended in; leave immediate=True out, or choose a blueprint that starts as the "
            "identity (`esper blueprints`)"
        )
    if STYLE_SPECS[style].algorithm is not AlphaAlgorithm.ADD:
        raise UsageError(
            f"style {style.name.lower()!r} is a way to blend a seed in, and a {blueprint.name!r} "
            "seed here is at full amplitude from the first step; leave the style out, or write "
            "immediate=False"
        )


class SlotView:
    """What is in a slot now; reads the garden each time it is asked."""

    def __init__(self, garden: Garden, index: int) -> None:
        """Look at slot `index` of this garden."""
        self._garden = garden
        self._index = index

    @property
    def name(self) -> str:
        """Name of the slot."""
        return self._garden.slot_names[self._index]

    @property
    def axes(self) -> AxesName:
        """The axes of the host's activation at the slot."""
        return self._garden.seedbed[self._index].axes

    @property
    def symmetry(self) -> Symmetry:
        """What the host makes of the order of positions at the slot."""
        return self._garden.seedbed[self._index].symmetry

    @property
    def stage(self) -> SeedStage:
        """Stage of the seed, DORMANT when the slot is empty."""
        return SeedStage(int(self._value("stage")))

    @property
    def blueprint(self) -> str | None:
        """Name of the seed's blueprint, None when the slot is empty."""
        index = int(self._value("blueprint"))
        return None if index < 0 else blueprint_names()[index]

    @property
    def alpha(self) -> float:
        """Amplitude of the seed."""
        return self._value("alpha")

    @property
    def alpha_target(self) -> float:
        """Amplitude the seed is aimed at."""
        return self._value("alpha_target")

    @property
    def epochs_in_stage(self) -> int:
        """Epochs recorded since the stage began."""
        return int(self._value("epochs_in_stage"))

    @property
    def age(self) -> int:
        """Epochs recorded since germination."""
        return int(self._value("age"))

    @property
    def parameters(self) -> int:
        """Parameters of the seed and its gate."""
        return int(self._value("params"))

    @property
    def flops(self) -> int:
        """Operations per sample of the seed and its gate."""
        return int(self._garden.table.flops()[0, self._index])

    @property
    def contribution(self) -> float | None:
        """Points the network would lose without the seed, None before it was measured."""
        return self._measured("contribution")

    @property
    def contribution_se(self) -> float | None:
        """Standard error of the contribution, None before it was measured."""
        return self._measured("contribution_se")

    def __repr__(self) -> str:
        seed = f", {self.blueprint}, alpha={self.alpha:.2f}" if self.blueprint else ""
        return f"<slot {self.name}: {self.stage.name}{seed}>"

    def _value(self, field: str) -> float:
        return float(getattr(self._garden.state, field)[0, self._index])

    def _measured(self, field: str) -> float | None:
        value = self._value(field)
        return None if math.isnan(value) else value


def slot_records(slots: Mapping[str, SlotView]) -> tuple[SlotRecord, ...]:
    """Return slots as they are now."""
    return tuple(copy_fields(SlotRecord, view, stage=view.stage.name) for view in slots.values())
