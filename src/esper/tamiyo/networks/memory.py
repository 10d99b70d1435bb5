"""The policy's memory: one step, or whole sequences in one call with episode boundaries inside.

A single step goes through the cell itself, which costs a third of a call of `nn.LSTM` on a CPU,
compiles without a graph break and can be captured in a CUDA graph. Sequences go through `nn.LSTM`,
which is one fused kernel per layer. Both use the same weights and agree to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from esper.leyline.errors import UsageError

Hidden = tuple[Tensor, Tensor]
"""The state and the cell, float32 [layers, rows, width] each."""


def empty_hidden(lstm: nn.LSTM, rows: int) -> Hidden:
    """Return the memory of rows that have seen nothing."""
    weight = lstm.all_weights[0][0]
    shape = (lstm.num_layers, rows, lstm.hidden_size)
    return weight.new_zeros(shape), weight.new_zeros(shape)


def clear_rows(hidden: Hidden, rows: Tensor) -> Hidden:
    """Return the memory with some rows, bool [rows], forgotten."""
    keep = ~rows[:, None]
    return hidden[0] * keep, hidden[1] * keep


def check_hidden(hidden: Hidden, lstm: nn.LSTM, rows: int) -> None:
    """Raise unless a memory belongs to this many rows."""
    shape = (lstm.num_layers, rows, lstm.hidden_size)
    for part in hidden:
        if tuple(part.shape) != shape:
            raise UsageError(
                f"hidden must be two tensors {list(shape)} (layers, rows, width), "
                f"got {list(part.shape)}"
            )


def run_step(lstm: nn.LSTM, features: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
    """Return the output [rows, width] and the memory after one step of features [rows, width]."""
    states, cells = [], []
    for layer, (w_input, w_hidden, b_input, b_hidden) in enumerate(lstm.all_weights):
        before = (hidden[0][layer], hidden[1][layer])
        features, cell = torch.lstm_cell(features, before, w_input, w_hidden, b_input, b_hidden)
        states.append(features)
        cells.append(cell)
    if lstm.num_layers == 1:
        return features, (features.unsqueeze(0), cells[0].unsqueeze(0))
    return features, (torch.stack(states), torch.stack(cells))


def run_sequence(
    lstm: nn.LSTM, features: Tensor, hidden: Hidden | None, episode_starts: Tensor | None = None
) -> tuple[Tensor, Hidden]:
    """Return outputs [rows, steps, width] and the memory after the last step.

    Where `episode_starts`, bool [rows, steps], is True the memory is empty before that step. The
    pieces between boundaries become rows of one packed call: nothing loops over time.
    """
    if episode_starts is None:
        outputs, hidden = lstm(features, hidden)
        assert hidden is not None
        return outputs, hidden
    rows, steps, width = features.shape
    if tuple(episode_starts.shape) != (rows, steps):
        raise UsageError(
            f"episode_starts must be bool [{rows}, {steps}], got {list(episode_starts.shape)}"
        )
    if hidden is None:
        hidden = empty_hidden(lstm, rows)
    hidden = clear_rows(hidden, episode_starts[:, 0])
    opens = episode_starts.clone()
    opens[:, 0] = True
    # Every step belongs to the piece opened last, counted over all rows in order.
    piece = opens.flatten().cumsum(0).sub_(1).view(rows, steps)
    time = torch.arange(steps, device=features.device).expand(rows, steps)
    position = time - torch.where(opens, time, 0).cummax(1).values
    lengths = torch.bincount(piece.flatten())
    count, longest = len(lengths), int(lengths.max())

    pieces = features.new_zeros(count, longest, width).index_put((piece, position), features)
    start = [part.new_zeros(lstm.num_layers, count, part.shape[-1]) for part in hidden]
    carried = (
        start[0].index_copy(1, piece[:, 0], hidden[0]),
        start[1].index_copy(1, piece[:, 0], hidden[1]),
    )
    packed = pack_padded_sequence(pieces, lengths.cpu(), batch_first=True, enforce_sorted=False)
    outputs, last = lstm(packed, carried)
    padded, _ = pad_packed_sequence(outputs, batch_first=True)
    final = piece[:, -1]
    return padded[piece, position], (last[0][:, final], last[1][:, final])
