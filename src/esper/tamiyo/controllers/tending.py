"""Bringing up seeds without judging them: advance as soon as a gate may open, then fossilize.

What a gate waits for is not the controller's to know: it is asked once per epoch. A row has one
operation per epoch, so an operation that has just failed goes to the end of the queue and does not
keep another seed of the row waiting.
"""

from __future__ import annotations

from collections.abc import Iterable

from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers.choices import Choice
from esper.tamiyo.controllers.row_view import RowView


def tend(row: RowView, slots: Iterable[int]) -> list[Choice]:
    """Return the operations that bring the seeds in these slots further, most urgent first.

    A seed whose amplitude aims below 1 can neither hold nor fossilize; it is left as it is.
    """
    advances: list[Choice] = []
    fossilizes: list[Choice] = []
    for slot in slots:
        stage = row.stage[slot]
        is_blended = stage == SeedStage.BLENDING and row.is_fully_blended(slot)
        if stage in (SeedStage.GERMINATED, SeedStage.TRAINING) or is_blended:
            if row.legal[LifecycleOp.ADVANCE][slot]:
                advances.append({"op": int(LifecycleOp.ADVANCE), "slot": slot})
        elif stage == SeedStage.HOLDING and row.legal[LifecycleOp.FOSSILIZE][slot]:
            fossilizes.append({"op": int(LifecycleOp.FOSSILIZE), "slot": slot})
    return [*advances, *fossilizes]


def first_untried(wishes: list[Choice], failed: Choice | None) -> Choice | None:
    """Return the first wish, one that has just failed only if there is no other."""
    return min(wishes, key=lambda wish: wish == failed, default=None)
