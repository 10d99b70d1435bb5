"""From logits to one decision per row, and what the policy returns about it."""

from __future__ import annotations

from collections.abc import Callable, ItemsView
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES
from esper.tamiyo.networks.head_table import OP, OP_ROW, SLOT, HeadTable
from esper.tamiyo.networks.layers import Hidden
from esper.tamiyo.policy.distribution import (
    FloorKind,
    chosen_log_probs,
    probabilities,
    sample,
    unchecked_log_probs,
)


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """What was decided for N rows; without the N where a single state was given."""

    actions: Tensor
    """int64 [N, 8], in the order of `HEAD_NAMES`."""
    log_probs: Tensor
    """float32 [N, 8]; exactly 0 in heads the op does not use."""
    value: Tensor
    """float32 [N], the baseline."""
    op_values: Tensor
    """float32 [N, ops], Q(s, op); V(s) in every column where the critic does not see the op."""
    masks: Tensor
    """bool [N, 8, K], by which each head was drawn; an update is given the same."""
    choice_log_probs: Tensor
    """float32 [N, 8, K], of every choice of every head under the op and the slot taken."""
    hidden: Hidden
    """The memory after the step."""

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
        """Return this decision, its op chosen from what `other` chose from."""
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
        """Return a copy that nothing else can change."""
        state, cell = self.hidden
        return self._map(Tensor.clone, (state.clone(), cell.clone()))

    def row(self, row: int) -> PolicyStep:
        """Return one row without its axis; its memory stays [layers, 1, width]."""
        state, cell = self.hidden
        return self._map(
            lambda tensor: tensor[row], (state[:, row : row + 1], cell[:, row : row + 1])
        )

    def _map(self, change: Callable[[Tensor], Tensor], hidden: Hidden) -> PolicyStep:
        names = [field.name for field in fields(self) if field.name != "hidden"]
        return PolicyStep(**{name: change(getattr(self, name)) for name in names}, hidden=hidden)


class Evaluation(NamedTuple):
    """What an update needs of whole episodes, by head."""

    values: Tensor
    """[B, T], Q(s, op taken)."""
    log_probs: dict[str, Tensor]
    """[B, T] per head; exactly 0 where the op does not use the head."""
    entropies: dict[str, Tensor]
    """[B, T] per head, from 0 to 1, over the masks as given and without floors."""
    hidden: Hidden
    """The memory after the last step."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What an update needs of whole episodes, all heads in one tensor."""

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
    """The memory after the last step."""


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
    """Return the decision of every row; tensors in, tensors out, and nothing is checked.

    All conditions are drawn at once (see `HeadTable`), then the op and the slot that came out
    select what counts. Heads the op does not use hold their placeholder and score exactly 0.

    Args:
        table: where heads and conditions lie.
        logits: of all heads side by side, [N, choices].
        op_values: Q(s, op), [N, ops].
        hidden: the memory after this step, passed on.
        masks: bool [N, R, K].
        uniforms: [N, 8] from [0, 1); None takes the likeliest choices.
        floors: least probability by row, [R].
        floor_kind: how floors are kept.
        expect: from the log-probabilities of the ops [N, ops] and the op drawn to the baseline.
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
