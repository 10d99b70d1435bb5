"""One row's choice as a small mapping, and its way into the tensors of the controller protocol.

Controllers that think row by row say only what they mean ({"op": ADVANCE, "slot": 1});
`pack_choices` fills every other head with its placeholder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from esper.leyline.actions import CAUSAL_HEADS, HEAD_NAMES, PLACEHOLDERS, LifecycleOp
from esper.leyline.rules import Masks

Choice: TypeAlias = Mapping[str, int]
"""What one row does: {head: index}, with at least 'op'; heads left out take their placeholder."""

WAIT: Choice = {"op": LifecycleOp.WAIT}


def head_mask(masks: Masks, row: int, head: str, op: int, slot: int) -> Tensor:
    """Return bool [choices]: what this head may take in a row once op and slot are chosen."""
    if head == "slot":
        return masks.slot_by_op[row, op]
    if head == "blueprint":
        return masks.blueprint_by_slot[row, slot]
    mask: Tensor = getattr(masks, head)
    return mask[row]


def pack_choices(choices: Sequence[Choice], masks: Masks) -> dict[str, Tensor]:
    """Return the actions {head: int64[R]} for one choice per row, on the masks' device."""
    first_slots = masks.slot_by_op.to(torch.uint8).argmax(-1).tolist()
    table = [
        [_value(choice, head, first_slots[row]) for head in HEAD_NAMES]
        for row, choice in enumerate(choices)
    ]
    packed = torch.tensor(table, dtype=torch.int64, device=masks.op.device)
    packed = packed.reshape(len(choices), len(HEAD_NAMES))
    return {head: packed[:, index].clone() for index, head in enumerate(HEAD_NAMES)}


def _value(choice: Choice, head: str, first_slot_by_op: list[int]) -> int:
    op = LifecycleOp(choice["op"])
    if head in CAUSAL_HEADS[op] and head in choice:
        return int(choice[head])
    return first_slot_by_op[op] if head == "slot" else int(PLACEHOLDERS[head])
