"""Putting slots and decisions into records that people and reports read."""

from __future__ import annotations

from esper.kasmina.blueprints.registry import blueprint_names
from esper.kasmina.garden import Garden
from esper.kasmina.operations import OperationResult
from esper.leyline.actions import CAUSAL_HEADS, Actions, LifecycleOp
from esper.leyline.alpha import ALPHA_TARGETS, SPEED_TICKS, TEMPO_EPOCHS, AlphaCurve, BlendStyle
from esper.leyline.history import DecisionRecord, SlotRecord


def slot_records(garden: Garden) -> tuple[SlotRecord, ...]:
    """Return every slot of a garden as it is now."""
    return tuple(
        SlotRecord(
            name=view.name,
            stage=view.stage.name,
            blueprint=view.blueprint,
            alpha=view.alpha,
            alpha_target=view.alpha_target,
            parameters=view.parameters,
            epochs_in_stage=view.epochs_in_stage,
            age=view.age,
            contribution=view.contribution,
            contribution_se=view.contribution_se,
        )
        for view in garden.slots.values()
    )


def describe_decision(actions: Actions, result: OperationResult) -> DecisionRecord:
    """Return a decision with the arguments its op uses; the others are None."""
    op = LifecycleOp(int(actions["op"][0]))
    used = CAUSAL_HEADS[op]

    def choice(head: str) -> int | None:
        return int(actions[head][0]) if head in used else None

    blueprint, style, tempo = choice("blueprint"), choice("style"), choice("tempo")
    target, speed, curve = choice("alpha_target"), choice("alpha_speed"), choice("alpha_curve")
    return DecisionRecord(
        op=op.name,
        slot=result.slot if "slot" in used else None,
        blueprint=None if blueprint is None else blueprint_names()[blueprint],
        style=None if style is None else BlendStyle(style).name,
        tempo=None if tempo is None else TEMPO_EPOCHS[tempo],
        alpha_target=None if target is None else ALPHA_TARGETS[target],
        alpha_speed=None if speed is None else SPEED_TICKS[speed],
        alpha_curve=None if curve is None else AlphaCurve(curve).name,
        outcome=result.outcome.name.lower(),
        reason=result.reason,
    )
