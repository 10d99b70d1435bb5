"""Legality written a second time: one slot at a time, in plain Python, to compare with.

This is the table of mask rules read aloud. It shares no code with `esper.leyline.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from esper.leyline.actions import LifecycleOp
from esper.leyline.rules import Refusal, RulesConfig, RuleView
from esper.leyline.stages import AlphaMode, SeedStage

BLUEPRINTS = 4
"""Blueprints in the states drawn here; the first is noop, as everywhere."""


@dataclass(frozen=True)
class Slot:
    """One slot of one row; by default an enabled, empty one where everything but noop fits."""

    stage: SeedStage = SeedStage.DORMANT
    mode: AlphaMode = AlphaMode.HOLD
    age: int = 10
    enabled: bool = True
    copies: int = 0
    fits: tuple[bool, ...] = (False, True, True, True)


Row = list[Slot]


def reason(row: Row, index: int, op: LifecycleOp, config: RulesConfig) -> Refusal:
    """Why `op` is illegal at slot `index` of this row."""
    slot = row[index]
    if not slot.enabled:
        return Refusal.SLOT_DISABLED
    if op == LifecycleOp.WAIT:
        return Refusal.NONE
    if op == LifecycleOp.GERMINATE:
        return germinate_reason(row, slot, config)

    name = slot.stage.name
    if name in ("UNKNOWN", "DORMANT"):
        return Refusal.SLOT_EMPTY
    if name in ("PRUNED", "EMBARGOED", "RESETTING"):
        return Refusal.SLOT_COOLING
    if op == LifecycleOp.ADVANCE and not config.advance_allowed:
        return Refusal.ADVANCE_DISABLED
    if name == "FOSSILIZED":
        return Refusal.FOSSILIZED

    moving = slot.mode.name != "HOLD"
    if op == LifecycleOp.ADVANCE and name not in ("GERMINATED", "TRAINING", "BLENDING"):
        return Refusal.STAGE_HAS_NO_NEXT
    if op == LifecycleOp.SET_ALPHA_TARGET:
        if name not in ("BLENDING", "HOLDING"):
            return Refusal.NOT_BLENDED
        if moving:
            return Refusal.ALPHA_MOVING
    if op == LifecycleOp.PRUNE:
        if slot.age < config.min_prune_age:
            return Refusal.TOO_YOUNG
        if moving:
            return Refusal.ALPHA_MOVING
    if op == LifecycleOp.FOSSILIZE and name != "HOLDING":
        return Refusal.NOT_HOLDING
    return Refusal.NONE


def germinate_reason(row: Row, slot: Slot, config: RulesConfig) -> Refusal:
    if slot.stage.name in ("PRUNED", "EMBARGOED", "RESETTING"):
        return Refusal.SLOT_COOLING
    is_doubled = False
    if slot.stage.name not in ("UNKNOWN", "DORMANT"):
        holds = slot.mode.name == "HOLD" and slot.stage.name in ("BLENDING", "HOLDING")
        is_doubled = slot.copies > 0 and holds
        if not is_doubled:
            return Refusal.SLOT_OCCUPIED
        if slot.copies + slot.copies + 1 > config.max_copies:
            return Refusal.COPY_LIMIT
        if slot.age < config.min_prune_age:
            return Refusal.TOO_YOUNG
    for other in row:
        if other.enabled and other.stage.name in (
            "GERMINATED",
            "TRAINING",
            "PRUNED",
            "EMBARGOED",
            "RESETTING",
        ):
            return Refusal.DEVELOPMENT_RUNNING
    with_seed = ("GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED")
    seeds = sum(other.stage.name in with_seed for other in row)
    if config.max_seeds != 0 and seeds >= config.max_seeds and not is_doubled:
        return Refusal.SEED_LIMIT
    if not any(slot.fits[1:]):
        return Refusal.NOTHING_FITS
    return Refusal.NONE


def view_of(rows: list[Row]) -> RuleView:
    """The tensors that stand for these rows."""
    return RuleView(
        stage=torch.tensor([[int(slot.stage) for slot in row] for row in rows]),
        alpha_mode=torch.tensor([[int(slot.mode) for slot in row] for row in rows]),
        age=torch.tensor([[slot.age for slot in row] for row in rows]),
        enabled=torch.tensor([[slot.enabled for slot in row] for row in rows]),
        copies=torch.tensor([[slot.copies for slot in row] for row in rows]),
        fits=torch.tensor([[slot.fits for slot in row] for row in rows]),
    )


# Mostly what a garden can hold, so that legal operations are drawn as often as illegal ones.
SLOTS = st.builds(
    Slot,
    stage=st.sampled_from([*SeedStage, *[SeedStage.DORMANT, SeedStage.BLENDING] * 3]),
    mode=st.sampled_from([*AlphaMode, AlphaMode.HOLD, AlphaMode.HOLD]),
    age=st.integers(0, 4),
    enabled=st.sampled_from([True, True, True, False]),
    copies=st.sampled_from([0, 0, 1, 3, 7]),
    fits=st.tuples(*[st.booleans()] * BLUEPRINTS),
)
STATES = st.integers(1, 4).flatmap(
    lambda slots: st.lists(st.lists(SLOTS, min_size=slots, max_size=slots), min_size=1, max_size=4)
)
CONFIGS = st.builds(
    RulesConfig,
    max_seeds=st.integers(0, 4),
    min_prune_age=st.integers(0, 3),
    advance_allowed=st.booleans(),
    max_copies=st.sampled_from([1, 3, 7]),
)
