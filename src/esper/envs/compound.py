"""Legal actions as one number: every op with every choice of the heads that it uses.

A table of actions is made once; which of its rows are legal is then one look-up per step. Heads may
be pinned to keep it small: with all of `SHAPES` pinned a host of three slots has 46 actions instead
of 2,083, and what is pinned is how, how far and how fast a seed blends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from esper.leyline.actions import CAUSAL_HEADS, HEAD_NAMES, PLACEHOLDERS, LifecycleOp
from esper.leyline.blueprints import NOOP
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks

_OP, _SLOT, _BLUEPRINT = (HEAD_NAMES.index(head) for head in ("op", "slot", "blueprint"))

SHAPES = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
"""The heads that say how an op is done."""

assert set(SHAPES) < set(HEAD_NAMES)


class CompoundActions:
    """A numbered table of whole actions.

    Args:
        sizes: number of choices of every head, in the order of `HEAD_NAMES`.
        pinned: heads that keep their placeholder; `SHAPES` or some of them.
    """

    def __init__(self, sizes: Sequence[int], pinned: Sequence[str] = ()) -> None:
        """Number the actions: WAIT is 0."""
        unknown = [head for head in pinned if head not in SHAPES]
        if unknown:
            raise UsageError(
                f"only {', '.join(SHAPES)} can be pinned, got {', '.join(map(repr, unknown))}"
            )
        by_head = dict(zip(HEAD_NAMES, sizes, strict=True))
        rows: list[tuple[int, ...]] = []
        for op, causal in CAUSAL_HEADS.items():
            free = set(causal) - set(pinned) - {"op"}
            if op == LifecycleOp.SET_ALPHA_TARGET and "alpha_target" in pinned:
                # It would aim for what the seed aims for already.
                continue
            rows += product(*(_choices(head, op, free, by_head) for head in HEAD_NAMES))
        self.table = torch.tensor(rows, dtype=torch.int64)
        """int64 [A, 8], one index per head."""

    def __len__(self) -> int:
        return len(self.table)

    def decode(self, chosen: Tensor) -> Tensor:
        """Return int64 [R, 8] of numbers [R]."""
        return self.table[chosen]

    def legal(self, masks: Masks) -> Tensor:
        """Return bool [R, A]: exactly the actions that would not be refused."""
        masks = masks.to("cpu")
        op, slot, blueprint = (self.table[:, head] for head in (_OP, _SLOT, _BLUEPRINT))
        placed = masks.slot_by_op[:, op, slot] | (op == int(LifecycleOp.WAIT))
        plants = op == int(LifecycleOp.GERMINATE)
        return placed & (masks.blueprint_by_slot[:, slot, blueprint] | ~plants)


def _choices(head: str, op: LifecycleOp, free: set[str], sizes: Mapping[str, int]) -> Sequence[int]:
    """Return what a head takes under an op: everything where it is free, else one choice."""
    if head == "op":
        return [int(op)]
    if head not in free:
        return [int(PLACEHOLDERS[head])]
    choices = range(sizes[head])
    return [choice for choice in choices if choice != NOOP] if head == "blueprint" else choices
