"""SlotTable: the one owner of the state of all slots, and of what may be done to them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esper.kasmina.blueprints.kin import KIN
from esper.kasmina.blueprints.registry import BLUEPRINTS, blueprint_names
from esper.kasmina.contribution import (
    GradientSample,
    Measured,
    record_contributions,
    record_gradients,
)
from esper.kasmina.costs import (
    RowCosts,
    copies_to_double,
    fitting_blueprints,
    slot_flops,
    standing_copies,
)
from esper.kasmina.lifecycle import (
    Applied,
    LifecycleConfig,
    Outcome,
    apply_command,
    record_epoch,
    refuse_disagreement,
    remove_seeds,
    rule_view,
    tick,
)
from esper.kasmina.slots.placement import Placement
from esper.kasmina.state import EMPTY, GateConfig, SlotState, describe_failure, empty_state
from esper.leyline.actions import (
    HEAD_NAMES,
    Actions,
    Command,
    LifecycleOp,
    describe_action,
    head_values,
)
from esper.leyline.config import is_debugging
from esper.leyline.errors import CheckpointError
from esper.leyline.records import DecisionRecord, SlotRecord, copy_fields
from esper.leyline.rules import Masks, Refusal, RuleView, build_masks
from esper.leyline.slots import AxesName, Symmetry
from esper.leyline.stages import SeedStage

if TYPE_CHECKING:
    from esper.kasmina.garden import Garden


class SlotTable:
    """The slots of R rows.

    Args:
        costs: what hosts and seeds cost, and how far each row may grow.
        lifecycle: the constants of a seed's life.
        immediate: bool [S, B], which seeds skip training alone and blending; by default none.
    """

    def __init__(
        self, costs: RowCosts, lifecycle: LifecycleConfig, immediate: Tensor | None = None
    ) -> None:
        """Start with nothing grown."""
        rows, slots = costs.seeds.slot_channels.shape
        device = costs.host_params.device
        self.costs = costs
        self.lifecycle = lifecycle
        nothing = torch.zeros(costs.seeds.seed_params.shape[1:], dtype=torch.bool)
        self.immediate = (nothing if immediate is None else immediate).to(device)
        self.state: SlotState = empty_state(rows, slots, device)
        """State of the slots, tensors [R, S]."""
        self.enabled = torch.ones((rows, slots), dtype=torch.bool, device=device)
        """Bool [R, S], the slots in use."""
        self.affordable: Tensor | None = None
        """Int64 [R], operations per sample that the rest of a budget of compute pays for; None
        where no row has a budget."""

    @property
    def device(self) -> torch.device:
        """Where everything is kept."""
        return self.enabled.device

    def flops(self) -> Tensor:
        """Return int64 [R, S]: operations per sample of every seed and its gate."""
        return slot_flops(self.state, self.costs.seeds)

    def fits(self) -> Tensor:
        """Return bool [R, S, B]: the blueprints that may be germinated now, within the limits."""
        return fitting_blueprints(self.state, self.costs, self.affordable)

    def view(self) -> RuleView:
        """Return what legality depends on."""
        return rule_view(self.state, self.enabled, self.fits())

    def masks(self) -> Masks:
        """Return what is legal now."""
        return build_masks(self.view(), self.lifecycle.effective_rules)

    def apply(self, command: Command, *, immediate: bool | None = None) -> Applied:
        """Carry out one operation per row.

        Args:
            command: the operations.
            immediate: whether germinated seeds have their full amplitude at once; by default as in
                the table.
        """
        slots, blueprints = self.immediate.shape
        at_once = self.immediate[
            command.slot.clamp(0, slots - 1), command.blueprint.clamp(0, blueprints - 1)
        ]
        state, applied = apply_command(
            self.state,
            command,
            enabled=self.enabled,
            fits=self.fits(),
            config=self.lifecycle,
            immediate=at_once if immediate is None else torch.full_like(at_once, immediate),
        )
        if is_debugging():
            refuse_disagreement(self.masks(), command, applied)
        self.state = state
        return applied

    def tick(self) -> None:
        """End the decision: move amplitudes, count cooldowns, forward automatic gates."""
        self.state = tick(self.state, self.lifecycle)

    def record_epoch(self, score: Tensor, gradients: GradientSample, sampled: Tensor) -> None:
        """Count an epoch with its score, float64 [R], and gradients where they were `sampled`."""
        self.state = record_gradients(record_epoch(self.state, score), sampled, gradients)

    def record_contributions(self, measured: Measured, members: Tensor, due: Tensor) -> None:
        """Record what ablations showed.

        Args:
            measured: what was found.
            members: bool [R, S], the seeds that took part.
            due: bool [R], the rows that were measured.
        """
        # Also without members: an old interaction does not stay true.
        interaction = torch.where(due[:, None, None], measured.interaction, self.state.interaction)
        self.state = record_contributions(
            self.state, members, measured.worth, measured.error, interaction
        )

    def remove(self, which: Tensor) -> None:
        """Prune the seeds at `which`, bool [R, S], at once, legal or not."""
        self.state = remove_seeds(self.state, which)

    def resize(self, sizes: Tensor) -> None:
        """Record the number of parameters in every slot, int64 [R, S]."""
        self.state = self.state.where(torch.ones_like(self.enabled), params=sizes)

    @contextmanager
    def undone_by_error(self, build: Callable[[], object]) -> Iterator[None]:
        """Restore the state if the block fails, and call `build` to restore the modules.

        A seed that cannot be built was never germinated.
        """
        before = self.state
        try:
            yield
        except BaseException:
            self.state = before
            build()
            raise


@dataclass(frozen=True, slots=True)
class OperationResult:
    """Result of one operation: true where it took effect."""

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
    """Return the result of a one-row command that was applied in the state `before`."""
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
        elif refusal is Refusal.NOTHING_FITS and is_copy and _is_mixed(before, index):
            why = "these copies were not at full amplitude all the time, so they are not doubled"
            reason = f"{op.name} at {slot}: {why}"
    elif outcome is Outcome.GATE_FAILED:
        reason = f"{op.name} at {slot}: {describe_failure(before, index, gates)}"
    return OperationResult(op, slot, outcome, reason)


def _is_mixed(state: SlotState, index: int) -> bool:
    """Return whether there are copies that cannot be doubled, whatever the limits are."""
    return bool((standing_copies(state) > copies_to_double(state))[0, index])


def describe_decision(
    actions: Actions,
    result: OperationResult,
    slot_names: Sequence[str],
    why: str = "",
    *,
    is_immediate: bool = False,
) -> DecisionRecord:
    """Return the record of a decision; arguments that its op does not use are None.

    Args:
        actions: the chosen heads.
        result: the result of the operation.
        slot_names: names of the slots.
        why: the controller's reason, where the operation took effect.
        is_immediate: whether the seed is at full amplitude from the first step, without style and
            tempo.
    """
    chosen: dict[str, Any] = describe_action(
        {head: int(actions[head][0]) for head in HEAD_NAMES},
        head_values(slot_names, blueprint_names()),
    )
    if is_immediate:
        chosen |= {"style": None, "tempo": 0}
    reason = result.reason or why
    return DecisionRecord(**chosen, outcome=result.outcome.name.lower(), reason=reason)


class SlotView:
    """Live view of one slot: every property reads the garden's present state."""

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
        """Whether the host is causal or equivariant in the order of positions at the slot."""
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
    def copies(self) -> int:
        """Copies of the block in front of the slot that the seed consists of, 0 for others."""
        return self._garden.seedbed[self._index].copies

    @property
    def parameters(self) -> int:
        """Parameters of the seed and its gate."""
        return int(self._value("params"))

    @property
    def flops(self) -> int:
        """Operations per sample of the seed and its gate."""
        return int(self._garden.slot_flops()[0, self._index])

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
    """Return records of the present state of slots."""
    return tuple(copy_fields(SlotRecord, view, stage=view.stage.name) for view in slots.values())


# ---- The lifecycle in a state_dict: plain data in a byte tensor


def encode_lifecycle(names: tuple[str, ...], state: SlotState, germinations: int) -> Tensor:
    """Return the lifecycle as a byte tensor, so that a state_dict holds tensors alone."""
    record = {
        "slots": list(names),
        "blueprints": list(blueprint_names()),
        "germinations": germinations,
        "state": {name: value.tolist() for name, value in state.state_dict().items()},
    }
    return torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)


def decode_lifecycle(encoded: Tensor, names: tuple[str, ...]) -> tuple[SlotState, int]:
    """Return (state, germinations) from `encode_lifecycle`, for a garden with these slots.

    Blueprints are matched by name: ids of registered ones may differ between programs.
    """
    record = json.loads(bytes(encoded.tolist()).decode())
    if tuple(record["slots"]) != names:
        raise CheckpointError(
            f"the saved garden has slots {', '.join(record['slots'])}, this one has "
            f"{', '.join(names)}; wrap the model with the saved slots"
        )
    like = empty_state(1, len(names)).state_dict()
    fields = {
        name: torch.tensor(record["state"][name], dtype=like[name].dtype)
        for name in (*EMPTY, "interaction")
    }
    fields["blueprint"] = _translate(fields["blueprint"], record["blueprints"])
    return SlotState(**fields), int(record["germinations"])


def _translate(ids: Tensor, saved_names: list[str]) -> Tensor:
    known = blueprint_names()
    result = ids.clone()
    for position, saved in enumerate(ids.flatten().tolist()):
        if saved < 0:
            continue
        name = saved_names[saved]
        if name not in known:
            raise CheckpointError(
                f"the saved garden has grown a {name!r}, which is not registered here; "
                "import the module that registers this blueprint first"
            )
        result.view(-1)[position] = known.index(name)
    return result
