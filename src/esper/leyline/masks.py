"""Which choices are legal, as tensors over rows: what a controller may pick from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_SIZES, PLACEHOLDERS, LifecycleOp
from esper.leyline.errors import EmptyMaskError
from esper.leyline.rules import RulesConfig, RuleView, refusals, selectable


@dataclass(frozen=True, slots=True)
class Masks:
    """Legal choices per row; True is allowed, and every row allows at least WAIT."""

    op: Tensor
    """bool [R, ops]."""
    slot_by_op: Tensor
    """bool [R, ops, S]: the slots each op may address; the row of the chosen op is the mask."""
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
    """Return the masks of every row in this state."""
    rows, device = view.stage.shape[0], view.stage.device
    slot_by_op = refusals(view, config) == 0
    op = slot_by_op.any(-1)
    if not bool(op[:, LifecycleOp.WAIT].all()):
        row = int((~op[:, LifecycleOp.WAIT]).nonzero()[0])
        raise EmptyMaskError(f"row {row} has no enabled slot, so no action is legal; enable one")
    shaping = op[:, LifecycleOp.GERMINATE] | op[:, LifecycleOp.SET_ALPHA_TARGET]

    def everything(head: str) -> Tensor:
        return torch.ones(rows, HEAD_SIZES[head], dtype=torch.bool, device=device)

    def when_shaping(head: str) -> Tensor:
        """All choices where they can matter, else the placeholder alone."""
        choice = torch.arange(HEAD_SIZES[head], device=device)
        return shaping[:, None] | (choice == int(PLACEHOLDERS[head]))

    return Masks(
        op=op,
        slot_by_op=slot_by_op,
        blueprint_by_slot=selectable(view.fits),
        style=when_shaping("style"),
        tempo=everything("tempo"),
        alpha_target=when_shaping("alpha_target"),
        alpha_speed=everything("alpha_speed"),
        alpha_curve=everything("alpha_curve"),
    )
