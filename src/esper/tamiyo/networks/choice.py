"""From logits to one decision per row: the op, the slot under that op, then what the op uses."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.tamiyo.networks.config import CriticKind
from esper.tamiyo.networks.head_table import OP, OP_ROW, SLOT, HeadTable
from esper.tamiyo.networks.memory import Hidden
from esper.tamiyo.networks.records import PolicyStep
from esper.tamiyo.policy.distribution import (
    FloorKind,
    chosen_log_probs,
    probabilities,
    sample,
    unchecked_log_probs,
)


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
    critic: CriticKind,
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
        critic: what the baseline is.
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
        value=baseline(critic, op_values, choice_log_probs[:, OP, : table.sizes["op"]], op),
        op_values=op_values,
        masks=legal,
        choice_log_probs=choice_log_probs,
        hidden=hidden,
    )


def baseline(critic: CriticKind, op_values: Tensor, log_probs: Tensor, op: Tensor) -> Tensor:
    """Return the value that returns are compared with; the policy gets no gradient from it.

    Args:
        critic: its kind.
        op_values: Q(s, op), [..., ops].
        log_probs: of the ops in the distribution that is sampled from, [..., ops].
        op: the op that was sampled from it, int64 [...].
    """
    if critic == "op_marginal":
        return (probabilities(log_probs.detach()) * op_values).sum(-1)
    if critic == "op_sampled":
        return op_values.gather(-1, op.unsqueeze(-1)).squeeze(-1)
    return op_values[..., 0]
