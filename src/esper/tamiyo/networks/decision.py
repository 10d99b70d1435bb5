"""From logits to decisions: the layout of all heads in one tensor, drawing, and result records."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline.actions import HEAD_NAMES, NUM_OPS, PLACEHOLDERS, LifecycleOp, causal_table
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks
from esper.leyline.slots import NOOP
from esper.tamiyo.networks.layers import Hidden
from esper.tamiyo.policy.distribution import (
    FloorKind,
    chosen_log_probs,
    probabilities,
    sample,
    unchecked_log_probs,
)

# ---- HeadTable: all heads in one tensor
#
# There are two layouts. [..., 8, K] has one row per head. [..., R, K] has one row per condition:
# the slot once for every op, the blueprint once for every slot and once for "no slot", and the
# other heads once (or once per slot). K is the largest number of choices. All conditions are drawn
# at once; the op and the slot that come out select the rows that count.


MaskSource = Masks | Mapping[str, Tensor] | Tensor
"""Masks as the rules give them, by head, or in one of the two layouts."""

NUM_HEADS = len(HEAD_NAMES)
SLOT = HEAD_NAMES.index("slot")
BLUEPRINT = HEAD_NAMES.index("blueprint")
OP = HEAD_NAMES.index("op")
OP_ROW = -1
"""The row of the op, the last one in either layout."""

_SINGLE = tuple(head for head in HEAD_NAMES if head not in ("slot", "blueprint"))
"""Heads whose masks do not depend on other heads."""

_SHAPES = tuple(head for head in _SINGLE if head != "op")
"""Those of them that say how the op is carried out."""

assert ("slot", "blueprint", *_SINGLE) == HEAD_NAMES, "rows are built in this order"
assert OP == NUM_HEADS + OP_ROW
assert NOOP == 0, "the placeholder of the blueprint comes first"


class HeadTable(nn.Module):
    """The index tables of both layouts; as a module they move with the network.

    Args:
        sizes: number of choices of every head.
        by_slot: whether there are logits for every condition and the `_SHAPES` heads depend on the
            slot; without it every head has the same logits under all conditions.
    """

    head_cells: Tensor
    row_cells: Tensor
    head_mask_cells: Tensor
    row_mask_cells: Tensor
    row_heads: Tensor
    rows_by_choice: Tensor
    everything: Tensor
    nothing: Tensor
    causal: Tensor
    placeholders: Tensor

    def __init__(self, sizes: Mapping[str, int], *, by_slot: bool = False) -> None:
        super().__init__()
        self.by_slot = by_slot
        self.sizes = {head: int(sizes[head]) for head in HEAD_NAMES}
        self.num_slots = self.sizes["slot"]
        self.num_blueprints = self.sizes["blueprint"]
        self.width = max(self.sizes.values())
        rows = ("slot",) * NUM_OPS + ("blueprint",) * (self.num_slots + 1)
        rows += tuple(head for head in _SHAPES for _ in range(self.num_slots if by_slot else 1))
        rows += ("op",)
        self.num_rows = len(rows)
        self.no_slot_row = NUM_OPS + self.num_slots
        everything = self._existing(rows)
        everything[NUM_OPS : self.no_slot_row + 1, NOOP] = False
        by_head = self._starts(HEAD_NAMES)
        of_heads = dict(zip(HEAD_NAMES, by_head, strict=False))
        by_row = self._starts(rows) if by_slot else [of_heads[head] for head in rows]
        # The masks of independent heads are given once, after all others.
        lone = rows[: self.no_slot_row + 1] + _SINGLE
        by_mask = self._starts(lone)
        of_masks = dict(zip(_SINGLE, by_mask[self.no_slot_row + 1 :], strict=False))
        masks = by_mask[: self.no_slot_row + 1]
        masks += [of_masks[head] for head in rows[len(masks) :]]
        self._keep("head_cells", self._cells(HEAD_NAMES, by_head, absent=0))
        self._keep("row_cells", self._cells(rows, by_row, absent=0))
        self._keep("head_mask_cells", self._cells(HEAD_NAMES, by_head, absent=by_head[-1]))
        self._keep("row_mask_cells", self._cells(rows, masks, absent=by_mask[-1]))
        self._keep("row_heads", torch.tensor([HEAD_NAMES.index(head) for head in rows]))
        self._keep("rows_by_choice", self._rows_by_choice())
        self._keep("everything", everything)
        self._keep("nothing", torch.zeros(1, dtype=torch.bool))
        self._keep("causal", causal_table())
        self._keep("placeholders", torch.tensor([int(PLACEHOLDERS[head]) for head in HEAD_NAMES]))

    # ---------------------------------------------------------------------------------- layouts

    def head_logits(self, logits: Tensor) -> Tensor:
        """Return [..., 8, K] from the logits of all heads side by side, each once."""
        return self._fold(logits, self.head_cells)

    def row_logits(self, logits: Tensor) -> Tensor:
        """Return [..., R, K] from the logits of all heads, or of all conditions, side by side."""
        return self._fold(logits, self.row_cells)

    def op_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of the op, [..., ops], which come last."""
        return logits[..., -self.sizes["op"] :]

    def row_masks(self, masks: MaskSource | None, shape: Sequence[int]) -> Tensor:
        """Return bool [*shape, R, K] from masks in any form; by default everything is legal."""
        if masks is None:
            return self.everything.expand(*shape, -1, -1)
        if isinstance(masks, Tensor):
            if masks.shape[-2:] == (NUM_HEADS, self.width):
                return _checked(self._spread(masks), shape, self.num_rows, self.width)
            return _checked(masks, shape, self.num_rows, self.width)
        by_op, by_slot = (NUM_OPS, self.num_slots), (self.num_slots, self.num_blueprints)
        if isinstance(masks, Masks):
            single: Mapping[str, Tensor] = {head: getattr(masks, head) for head in _SINGLE}
            slots = self._fit(masks.slot_by_op, "slot_by_op", by_op, shape)
            blueprints = self._fit(masks.blueprint_by_slot, "blueprint_by_slot", by_slot, shape)
        else:
            single = masks
            slots = self._head_part(masks, "slot", shape).unsqueeze(-2).expand(*shape, *by_op)
            blueprints = self._head_part(masks, "blueprint", shape).unsqueeze(-2)
            blueprints = blueprints.expand(*shape, *by_slot)
        anywhere = (blueprints & slots[..., LifecycleOp.WAIT, :, None]).any(-2)
        # If nothing fits anywhere, the unused blueprint head allows only its placeholder.
        nothing = ~anywhere.any(-1, keepdim=True)
        cells = [slots.flatten(-2), blueprints.flatten(-2), nothing, anywhere[..., NOOP + 1 :]]
        cells += [self._head_part(single, head, shape) for head in _SINGLE]
        return self._fold(self._end(cells), self.row_mask_cells)

    def head_masks(self, masks: MaskSource | None, actions: Tensor) -> Tensor:
        """Return bool [..., 8, K]: the masks under which actions, int64 [..., 8], were chosen.

        Masks by head are used as given: that of the slot belongs to the op taken, that of the
        blueprint to the slot taken.
        """
        shape = actions.shape[:-1]
        if isinstance(masks, Tensor) and masks.shape[-2] == NUM_HEADS:
            return _checked(masks, shape, NUM_HEADS, self.width)
        if isinstance(masks, Mapping):
            parts = [self._head_part(masks, head, shape) for head in HEAD_NAMES]
            return self._fold(self._end(parts), self.head_mask_cells)
        rows = self.rows_of(actions[..., OP], actions[..., SLOT])
        return self.select(self.row_masks(masks, shape), rows)

    def rows_of(self, op: Tensor, slot: Tensor) -> Tensor:
        """Return int64 [..., 8]: the row [..., R, K] that each head is drawn from."""
        return self.rows_by_choice[op, slot]

    def select(self, rectangle: Tensor, rows: Tensor) -> Tensor:
        """Return [..., 8, K]: these rows of [..., R, K]."""
        return rectangle.gather(-2, rows.unsqueeze(-1).expand(*rows.shape, self.width))

    # ------------------------------------------------------------------------------------ actions

    def pack(self, actions: Mapping[str, Tensor] | Tensor) -> Tensor:
        """Return actions by head as one tensor, int64 [..., 8]."""
        if isinstance(actions, Tensor):
            return actions
        missing = [head for head in HEAD_NAMES if head not in actions]
        if missing:
            raise UsageError(
                f"actions need all heads {', '.join(HEAD_NAMES)}; missing {', '.join(missing)}"
            )
        return torch.stack([actions[head] for head in HEAD_NAMES], dim=-1)

    # ---------------------------------------------------------------------------------- internals

    def _keep(self, name: str, table: Tensor) -> None:
        self.register_buffer(name, table, persistent=False)

    def _fold(self, flat: Tensor, cells: Tensor) -> Tensor:
        """Return [..., rows, K] with the entries of the last axis that `cells` names."""
        filled = flat.index_select(-1, cells)
        return filled.view(*filled.shape[:-1], -1, self.width)

    def _end(self, parts: Sequence[Tensor]) -> Tensor:
        """Return masks side by side, followed by one False."""
        return torch.cat([*parts, self.nothing.expand(*parts[0].shape[:-1], 1)], dim=-1)

    def _rows_by_choice(self) -> Tensor:
        """Return int64 [ops, S, 8]: the row of every head, given op and slot."""
        table = torch.empty(NUM_OPS, self.num_slots, NUM_HEADS, dtype=torch.int64)
        table[..., SLOT] = torch.arange(NUM_OPS)[:, None]
        table[..., BLUEPRINT] = self.no_slot_row
        table[LifecycleOp.GERMINATE, :, BLUEPRINT] = NUM_OPS + torch.arange(self.num_slots)
        table[..., OP] = self.num_rows + OP_ROW
        first = self.no_slot_row + 1
        for place, head in enumerate(_SHAPES):
            own = torch.arange(self.num_slots) + place * self.num_slots if self.by_slot else place
            table[..., HEAD_NAMES.index(head)] = first + own
        return table

    def _existing(self, heads: Sequence[str]) -> Tensor:
        """Return bool [heads, K]: whether a cell is a choice of its head."""
        sizes = torch.tensor([self.sizes[head] for head in heads])
        return torch.arange(self.width) < sizes[:, None]

    def _starts(self, heads: Sequence[str]) -> list[int]:
        """Return the start of each of these heads, side by side, and the end of the last one."""
        return list(accumulate((self.sizes[head] for head in heads), initial=0))

    def _cells(self, heads: Sequence[str], starts: Sequence[int], *, absent: int) -> Tensor:
        """Return the index of the entry that fills each cell.

        Args:
            heads: the head of every row.
            starts: the first entry of every row; further ones are ignored.
            absent: the entry of a cell without a choice. For logits any entry will do, because the
                cell is masked; for masks it is the False after the last entry.
        """
        first = torch.tensor(list(starts[: len(heads)]))
        cells = first[:, None] + torch.arange(self.width)
        return torch.where(self._existing(heads), cells, absent).flatten()

    def _spread(self, masks: Tensor) -> Tensor:
        """Return [..., R, K] from [..., 8, K]: every condition gets the mask of its head."""
        return masks.index_select(-2, self.row_heads)

    def _head_part(self, masks: Mapping[str, Tensor], head: str, shape: Sequence[int]) -> Tensor:
        if head not in masks:
            raise UsageError(f"the masks have no head {head!r}; they have {', '.join(masks)}")
        return self._fit(masks[head], head, (self.sizes[head],), shape)

    def _fit(
        self, mask: Tensor, name: str, wanted: tuple[int, ...], shape: Sequence[int]
    ) -> Tensor:
        """Return a mask padded with False to this policy's slots and blueprints."""
        if tuple(mask.shape) == (*shape, *wanted):
            return mask
        own = mask.shape[len(shape) :]
        may_pad = name in ("slot", "slot_by_op", "blueprint", "blueprint_by_slot")
        fits = len(own) == len(wanted) and mask.shape[: len(shape)] == tuple(shape)
        missing = [most - size for most, size in zip(wanted, own, strict=False)]
        if not fits or min(missing) < 0 or (any(missing) and not may_pad):
            raise UsageError(
                f"the mask of {name!r} must be {[*shape, *wanted]}, got {list(mask.shape)}"
            )
        return F.pad(mask, [side for most in reversed(missing) for side in (0, most)])


def _checked(masks: Tensor, shape: Sequence[int], rows: int, width: int) -> Tensor:
    if tuple(masks.shape) != (*shape, rows, width):
        raise UsageError(
            f"the masks must be {[*shape, rows, width]} (rows and choices last), "
            f"got {list(masks.shape)}"
        )
    return masks


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """The decisions for N rows; without the axis N if a single state was given."""

    actions: Tensor
    """int64 [N, 8], in the order of `HEAD_NAMES`."""
    log_probs: Tensor
    """float32 [N, 8]; exactly 0 for heads that the op does not use."""
    value: Tensor
    """float32 [N], the baseline."""
    op_values: Tensor
    """float32 [N, ops], Q(s, op); V(s) in every column if the critic does not see the op."""
    masks: Tensor
    """bool [N, 8, K], the masks of every head; an update needs the same ones."""
    choice_log_probs: Tensor
    """float32 [N, 8, K], log-probability of every choice, given the op and the slot taken."""
    hidden: Hidden
    """The LSTM state after the step."""

    @property
    def op(self) -> Tensor:
        """int64 [N], a `LifecycleOp`."""
        return self["op"]

    @property
    def slot(self) -> Tensor:
        """int64 [N], index of the slot."""
        return self["slot"]

    @property
    def blueprint_idx(self) -> Tensor:
        """int64 [N], id of the blueprint; noop unless the op is GERMINATE."""
        return self["blueprint"]

    @property
    def op_chances(self) -> Tensor:
        """float32 [N, ops], the probability of every op."""
        return probabilities(self.choice_log_probs[..., OP, : self.op_values.shape[-1]])

    def with_op_of(self, other: PolicyStep) -> PolicyStep:
        """Return this decision with the masks and log-probabilities of the op from `other`."""
        choices, masks = self.choice_log_probs.clone(), self.masks.clone()
        log_probs = self.log_probs.clone()
        choices[..., OP, :] = other.choice_log_probs[..., OP, :]
        masks[..., OP, :] = other.masks[..., OP, :]
        log_probs[..., OP] = choices[..., OP, :].gather(-1, self.op.unsqueeze(-1)).squeeze(-1)
        return replace(
            self, choice_log_probs=choices, masks=masks, log_probs=log_probs, value=other.value
        )

    def __getitem__(self, head: str) -> Tensor:
        return self.actions[..., HEAD_NAMES.index(head)]

    def by_head(self) -> dict[str, Tensor]:
        """Return the actions as {head: int64[N]}."""
        return dict(zip(HEAD_NAMES, self.actions.unbind(-1), strict=True))

    def items(self) -> ItemsView[str, Tensor]:
        """Return the pairs of head and action."""
        return self.by_head().items()

    def clone(self) -> PolicyStep:
        """Return a copy."""
        state, cell = self.hidden
        return self._map(Tensor.clone, (state.clone(), cell.clone()))

    def row(self, row: int) -> PolicyStep:
        """Return one row without its axis; its LSTM state stays [layers, 1, width]."""
        state, cell = self.hidden
        return self._map(
            lambda tensor: tensor[row], (state[:, row : row + 1], cell[:, row : row + 1])
        )

    def _map(self, change: Callable[[Tensor], Tensor], hidden: Hidden) -> PolicyStep:
        names = [field.name for field in fields(self) if field.name != "hidden"]
        return PolicyStep(**{name: change(getattr(self, name)) for name in names}, hidden=hidden)


class Evaluation(NamedTuple):
    """Values, log-probabilities and entropies of whole episodes, by head."""

    values: Tensor
    """[B, T], Q(s, op taken)."""
    log_probs: dict[str, Tensor]
    """[B, T] per head; exactly 0 where the op does not use the head."""
    entropies: dict[str, Tensor]
    """[B, T] per head, from 0 to 1, over the masks as given and without floors."""
    hidden: Hidden
    """The LSTM state after the last step."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Values, log-probabilities and entropies of whole episodes, all heads in one tensor."""

    values: Tensor
    """[B, T], Q(s, op taken)."""
    baseline: Tensor
    """[B, T], the value to compare returns with; no gradient reaches the policy through it."""
    log_probs: Tensor
    """[B, T, 8]; exactly 0 where the op does not use the head."""
    entropies: Tensor
    """[B, T, 8], from 0 to 1, over the masks as given and without floors."""
    logits: Tensor
    """[B, T, 8, K], for `exploration_kl` and for telemetry."""
    masks: Tensor
    """bool [B, T, 8, K]."""
    hidden: Hidden
    """The LSTM state after the last step."""


def choose(
    table: HeadTable,
    logits: Tensor,
    op_values: Tensor,
    hidden: Hidden,
    masks: Tensor,
    uniforms: Tensor | None,
    floors: Tensor,
    *,
    floor_kind: FloorKind,
    expect: Callable[[Tensor, Tensor], Tensor],
) -> PolicyStep:
    """Return the decision of every row, without checks.

    All conditions are drawn at once (see `HeadTable`), then the op and the slot that came out
    select the rows that count. Heads that the op does not use get their placeholder and a
    log-probability of exactly 0.

    Args:
        table: the layout of the heads.
        logits: logits of all heads side by side, [N, choices].
        op_values: Q(s, op), [N, ops].
        hidden: the LSTM state after this step, passed on.
        masks: bool [N, R, K].
        uniforms: [N, 8] from [0, 1); None takes the likeliest choices.
        floors: minimum probability by row, [R].
        floor_kind: how floors are enforced.
        expect: returns the baseline for the log-probabilities of the ops [N, ops] and the op drawn.
    """
    log_probs = unchecked_log_probs(table.row_logits(logits), masks, floors, floor_kind)
    if uniforms is None:
        drawn = sample(log_probs, deterministic=True)
    else:
        drawn = sample(log_probs, uniforms=uniforms.index_select(1, table.row_heads))
    op = drawn[:, OP_ROW]
    slot = drawn.gather(1, op.unsqueeze(1)).squeeze(1)
    rows = table.rows_of(op, slot)
    legal, choice_log_probs = table.select(masks, rows), table.select(log_probs, rows)
    causal = table.causal[op]
    actions = torch.where(causal, drawn.gather(1, rows), table.placeholders)
    # The placeholder of the slot is the first one allowed.
    first = legal[:, SLOT].to(torch.uint8).argmax(-1)
    actions[:, SLOT] = torch.where(causal[:, SLOT], slot, first)
    own = chosen_log_probs(choice_log_probs, actions)
    return PolicyStep(
        actions=actions,
        log_probs=torch.where(causal, own, 0.0),
        value=expect(choice_log_probs[:, OP, : table.sizes["op"]], op),
        op_values=op_values,
        masks=legal,
        choice_log_probs=choice_log_probs,
        hidden=hidden,
    )
