"""The rules of legality: one pure function over [rows, slots] tensors, and the masks made of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_SIZES, NUM_OPS, LifecycleOp, TensorRecord
from esper.leyline.config import Config, option
from esper.leyline.errors import EmptyMaskError
from esper.leyline.slots import NOOP
from esper.leyline.stages import (
    COOLDOWN_STAGES,
    DEVELOPING_STAGES,
    EMPTY_STAGES,
    LIVE_STAGES,
    MODULE_STAGES,
    AlphaMode,
    SeedStage,
)

FREE_HEADS = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
"""Heads whose masks depend on no other choice."""

_ADVANCEABLE_STAGES = (SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING)


@dataclass(frozen=True, kw_only=True)
class RulesConfig(Config):
    """The constants of legality."""

    max_seeds: int = option(
        0, "Most seeds alive or fossilized at once in one host; 0 is no limit.", minimum=0
    )
    min_prune_age: int = option(
        1, "Epochs a seed must have lived before it can be pruned, or a copy doubled.", minimum=0
    )
    max_copies: int = option(
        7,
        "Most copies of a block in one slot: 7 are three germinations of kin, 1 to 2 to 4 to 8 "
        "blocks.",
        minimum=1,
        maximum=127,
    )
    advance_allowed: bool = option(
        True, "Whether ADVANCE is an operation (off when every gate forwards itself)."
    )


class CodeWithText(IntEnum):
    """Numeric codes whose members carry a message, `text`."""

    text: str

    def __new__(cls, value: int, text: str = "") -> Self:
        """Create a member; its value is the number alone."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member


class Refusal(CodeWithText):
    """Why an operation is illegal at a slot; 0 means it is legal."""

    NONE = 0, "legal"
    SLOT_DISABLED = 1, "the slot is not enabled for this host; use another slot"
    SLOT_OCCUPIED = 2, "the slot already holds a seed; prune it first or use another slot"
    SLOT_COOLING = 3, "the slot is cooling down after a prune; wait until it is empty"
    SLOT_EMPTY = 4, "the slot holds no seed; germinate one first"
    DEVELOPMENT_RUNNING = (
        5,
        "another seed is germinated, training or cooling down; "
        "wait until it is blending or its slot is free",
    )
    SEED_LIMIT = 6, "the limit of seeds is reached; raise max_seeds"
    NOTHING_FITS = (
        7,
        "no blueprint fits within the limits; raise max_growth, max_parameters or max_added_flops",
    )
    STAGE_HAS_NO_NEXT = 8, "only a germinated, training or blending seed can advance"
    ADVANCE_DISABLED = 9, "the gates forward seeds by themselves; write auto_advance=False"
    NOT_BLENDED = 10, "only a blending or holding seed can get another target; advance it first"
    ALPHA_MOVING = 11, "alpha is still moving; wait until it holds"
    FOSSILIZED = 12, "the seed is fossilized and stays; use another slot"
    TOO_YOUNG = 13, "the seed is younger than min_prune_age; wait, or lower that"
    NOT_HOLDING = 14, "only a holding seed can be fossilized; advance it first"
    BLUEPRINT_DOES_NOT_FIT = (
        15,
        "this blueprint does not fit this slot, because of its kind of activation, the host's "
        "symmetry or the limits; esper.check_slots names those that fit",
    )
    BAD_ARGUMENT = (
        16,
        "an argument is out of range: tempo is 1 or more, a target above 0 and at most 1, a speed "
        "0 or more",
    )
    COPY_LIMIT = 17, "the slot holds as many copies of its block as it may; raise max_copies"


@dataclass(frozen=True, slots=True)
class RuleView(TensorRecord):
    """Everything that legality depends on."""

    stage: Tensor
    """int64 [R, S], a `SeedStage`; DORMANT where the slot is empty."""
    alpha_mode: Tensor
    """int64 [R, S], an `AlphaMode`."""
    age: Tensor
    """int64 [R, S], epochs since germination."""
    enabled: Tensor
    """bool [R, S], slot in use for this row."""
    copies: Tensor
    """int64 [R, S], copies of the block in front of the slot that the seed consists of, else 0."""
    fits: Tensor
    """bool [R, S, B], whether a blueprint may be germinated in a slot (topology and limits)."""


def is_in(stage: Tensor, stages: tuple[SeedStage, ...]) -> Tensor:
    """Return whether each stage is one of `stages`, bool of the same shape."""
    result = torch.zeros_like(stage, dtype=torch.bool)
    for member in stages:
        result = result | (stage == int(member))
    return result


def why_full(view: RuleView, config: RulesConfig) -> str:
    """Return why no seed can start in the only row.

    The text is empty where a seed can start, or where one is alive or cooling down.
    """
    if bool(is_in(view.stage, (*LIVE_STAGES, *COOLDOWN_STAGES)).any()):
        return ""
    codes = refusals(view, config)[0, LifecycleOp.GERMINATE].tolist()
    if not all(codes):
        return ""
    # Limits have the higher codes, and tell the user more than "the slot is taken" does.
    return Refusal(max(codes)).text


def selectable(fits: Tensor) -> Tensor:
    """Return `fits` with noop masked out: noop can never be chosen."""
    return fits & (torch.arange(fits.shape[-1], device=fits.device) != NOOP)


def refusals(view: RuleView, config: RulesConfig) -> Tensor:
    """Return int64 [R, ops, S]: why each op is illegal at each slot, 0 where it is legal."""
    stage = view.stage
    empty, cooling = is_in(stage, EMPTY_STAGES), is_in(stage, COOLDOWN_STAGES)
    live = is_in(stage, LIVE_STAGES)
    moving = view.alpha_mode != int(AlphaMode.HOLD)
    developing = (is_in(stage, DEVELOPING_STAGES) & view.enabled).any(1, keepdim=True)
    seeds = is_in(stage, MODULE_STAGES).sum(1, keepdim=True)
    full = (seeds >= config.max_seeds) if config.max_seeds else torch.zeros_like(developing)
    no_advance = torch.full_like(empty, not config.advance_allowed)
    too_young = (view.age < config.min_prune_age, Refusal.TOO_YOUNG)
    blended = (stage == int(SeedStage.BLENDING)) | (stage == int(SeedStage.HOLDING))
    # Copies are doubled by germinating another: the seed stays one seed.
    doubled = (view.copies > 0) & blended & ~moving
    most = doubled & (2 * view.copies + 1 > config.max_copies)

    codes = torch.zeros(
        (stage.shape[0], NUM_OPS, stage.shape[1]), dtype=torch.int64, device=stage.device
    )

    def refuse(op: LifecycleOp, *reasons: tuple[Tensor, Refusal]) -> None:
        """Write the reasons for one op; an earlier reason wins over a later one."""
        for condition, reason in reversed(reasons):
            codes[:, op].masked_fill_(condition, int(reason))

    off = (~view.enabled, Refusal.SLOT_DISABLED)
    gone = (cooling, Refusal.SLOT_COOLING)
    no_seed = (off, (empty, Refusal.SLOT_EMPTY), gone)
    fossil = (stage == int(SeedStage.FOSSILIZED), Refusal.FOSSILIZED)
    refuse(LifecycleOp.WAIT, off)
    refuse(
        LifecycleOp.GERMINATE,
        off,
        gone,
        (~empty & ~doubled, Refusal.SLOT_OCCUPIED),
        (most, Refusal.COPY_LIMIT),
        (doubled & too_young[0], Refusal.TOO_YOUNG),
        (developing, Refusal.DEVELOPMENT_RUNNING),
        (full & ~doubled, Refusal.SEED_LIMIT),
        (~selectable(view.fits).any(-1), Refusal.NOTHING_FITS),
    )
    refuse(
        LifecycleOp.ADVANCE,
        *no_seed,
        (no_advance, Refusal.ADVANCE_DISABLED),
        fossil,
        (~is_in(stage, _ADVANCEABLE_STAGES), Refusal.STAGE_HAS_NO_NEXT),
    )
    refuse(
        LifecycleOp.SET_ALPHA_TARGET,
        *no_seed,
        fossil,
        (~blended, Refusal.NOT_BLENDED),
        (moving, Refusal.ALPHA_MOVING),
    )
    refuse(
        LifecycleOp.PRUNE,
        *no_seed,
        fossil,
        # Only a value that is no stage gets this far without being alive.
        (~live, Refusal.SLOT_EMPTY),
        too_young,
        (moving, Refusal.ALPHA_MOVING),
    )
    unready = (stage != int(SeedStage.HOLDING), Refusal.NOT_HOLDING)
    refuse(LifecycleOp.FOSSILIZE, *no_seed, fossil, unready)
    return codes


@dataclass(frozen=True, slots=True)
class Masks(TensorRecord):
    """Legal choices per row: True is allowed. Every row allows at least WAIT."""

    op: Tensor
    """bool [R, ops]."""
    slot_by_op: Tensor
    """bool [R, ops, S]: the slots that each op may address."""
    blueprint_by_slot: Tensor
    """bool [R, S, B]: the blueprints that fit each slot; never noop."""
    style: Tensor
    """bool [R, styles]."""
    tempo: Tensor
    """bool [R, tempos]."""
    alpha_target: Tensor
    """bool [R, targets]."""
    alpha_speed: Tensor
    """bool [R, speeds]."""
    alpha_curve: Tensor
    """bool [R, curves]."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.op.shape[0]


def build_masks(view: RuleView, config: RulesConfig) -> Masks:
    """Return the masks of every row.

    Raises:
        EmptyMaskError: A row has no enabled slot.
    """
    rows, device = view.stage.shape[0], view.stage.device
    slot_by_op = refusals(view, config) == 0
    op = slot_by_op.any(-1)
    if not bool(op[:, LifecycleOp.WAIT].all()):
        row = int((~op[:, LifecycleOp.WAIT]).nonzero()[0])
        raise EmptyMaskError(f"row {row} has no enabled slot, so no action is legal; enable one")

    # Free heads allow every choice at every step: they keep their entropy while no op uses them.
    free = {
        head: torch.ones(rows, HEAD_SIZES[head], dtype=torch.bool, device=device)
        for head in FREE_HEADS
    }
    return Masks(op=op, slot_by_op=slot_by_op, blueprint_by_slot=selectable(view.fits), **free)


def allows(masks: Masks, op: Tensor, slot: Tensor, blueprint: Tensor) -> Tensor:
    """Return bool [R]: whether the masks allow these actions.

    Args:
        masks: what is legal.
        op: int64 [R].
        slot: int64 [R]; ignored for WAIT, and not allowed where it is out of range.
        blueprint: int64 [R]; only checked for GERMINATE.
    """
    rows = torch.arange(masks.rows, device=op.device)
    slots, blueprints = masks.blueprint_by_slot.shape[1:]
    known = (slot >= 0) & (slot < slots)
    at = slot.clamp(0, slots - 1)
    fits = masks.blueprint_by_slot[rows, at, blueprint.clamp(0, blueprints - 1)]
    fits = fits & (blueprint >= 0) & (blueprint < blueprints)
    legal = known & masks.slot_by_op[rows, op, at]
    legal = legal & (fits | (op != int(LifecycleOp.GERMINATE)))
    return torch.where(op == int(LifecycleOp.WAIT), masks.op[:, LifecycleOp.WAIT], legal)
