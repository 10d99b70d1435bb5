"""The parts of policy networks: layers, heads, LSTM, critic, and their initialisation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from esper.leyline.actions import NUM_OPS, apply_function
from esper.leyline.errors import UsageError
from esper.leyline.slots import NUM_BLUEPRINTS
from esper.tamiyo.networks.config import PolicyConfig


def has_onednn() -> bool:
    """Return whether this build of PyTorch has oneDNN's linear layers."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def run_layers(layers: nn.Sequential, x: Tensor) -> Tensor:
    """Apply linear layers with ReLUs between them to [..., inputs], by oneDNN on a CPU."""
    is_plain = x.device.type == "cpu" and x.dtype == torch.float32 and has_onednn()
    if not is_plain or torch.compiler.is_compiling():
        result: Tensor = layers(x)
        return result
    weights = [
        weight
        for layer in layers
        if isinstance(layer, nn.Linear)
        for weight in (layer.weight, layer.bias)
    ]
    # oneDNN is a hundred times slower on tensors that are not contiguous.
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    flat = apply_function(_Layers, rows, *weights)
    return flat.view(*x.shape[:-1], flat.shape[-1])


class _Layers(torch.autograd.Function):
    """Linear layers given as weight, bias, weight, bias, …, with a ReLU after all but the last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        inputs, last = [], len(weights) - 2
        for at in range(0, len(weights), 2):
            inputs.append(x)
            x = _multiply(x, weights[at], weights[at + 1])
            if at < last:
                # Not oneDNN's ReLU: it turns NaN into 0, which would hide a diverged policy.
                x.relu_()
        ctx.save_for_backward(*inputs, *weights[::2])
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.saved_tensors) // 2
        inputs, weights = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        grads: list[Tensor | None] = []
        grad = grad.contiguous()
        for at in reversed(range(count)):
            grads = [grad.t() @ inputs[at], grad.sum(0), *grads]
            if at == 0 and not ctx.needs_input_grad[0]:
                return None, *grads
            grad = _multiply(grad, weights[at].t())
            if at > 0:
                # In place, because this function owns the buffer.
                torch.ops.aten.threshold_backward.grad_input(grad, inputs[at], 0, grad_input=grad)
        return grad, *grads


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias by oneDNN."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return result


_INITIAL_STD = 0.02


class BlueprintEmbedding(nn.Module):
    """Embeds blueprint ids; an empty slot, -1, has the last row."""

    null_idx: Tensor

    def __init__(self, num_blueprints: int = NUM_BLUEPRINTS, embed_dim: int = 4) -> None:
        super().__init__()
        self.num_blueprints = num_blueprints
        self.embedding = nn.Embedding(num_blueprints + 1, embed_dim)
        nn.init.normal_(self.embedding.weight, std=_INITIAL_STD)
        # A buffer moves with the module, so that `where` needs no copy from the CPU.
        null_idx = torch.tensor(num_blueprints, dtype=torch.int64)
        self.register_buffer("null_idx", null_idx, persistent=False)

    def forward(self, indices: Tensor) -> Tensor:
        """Return [..., S, embed_dim] for int64 [..., S]."""
        rows: Tensor = self.embedding(torch.where(indices < 0, self.null_idx, indices))
        return rows


_BLUEPRINT_NECK = 128


def make_head(width: int, choices: int) -> nn.Sequential:
    """Return the two layers of an ordinary head."""
    return nn.Sequential(nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, choices))


def make_blueprint_head(width: int, choices: int) -> nn.Sequential:
    """Return the three layers of the blueprint head, the most important choice."""
    return nn.Sequential(
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, _BLUEPRINT_NECK),
        nn.ReLU(),
        nn.Linear(_BLUEPRINT_NECK, choices),
    )


def run_heads(heads: Iterable[nn.Sequential], memory: Tensor) -> Tensor:
    """Return the logits of all heads side by side, [..., choices of all heads]."""
    return torch.cat([run_layers(head, memory) for head in heads], dim=-1)


_HIDDEN_GAIN = math.sqrt(2.0)
_FORGET_BIAS = 1.0


def initialize_linear(modules: Iterable[nn.Module]) -> None:
    """Initialise all linear layers: orthogonal with gain sqrt(2), zero bias."""
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, _HIDDEN_GAIN)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)


def initialize_output(
    head: nn.Sequential, gain: float, bias: Sequence[float] | None = None
) -> None:
    """Initialise the last layer of a head with a gain, and a bias if one is given."""
    layer = head[-1]
    assert isinstance(layer, nn.Linear), "a head ends with a linear layer"
    nn.init.orthogonal_(layer.weight, gain)
    if bias is not None:
        with torch.no_grad():
            layer.bias.copy_(torch.tensor(bias, dtype=layer.bias.dtype))


def initialize_lstm(lstm: nn.LSTM) -> None:
    """Initialise an LSTM: orthogonal matrices, and an effective forget bias of exactly 1.

    PyTorch adds two bias vectors; only the first one is set to 1.
    """
    width = lstm.hidden_size
    for w_input, w_hidden, b_input, b_hidden in lstm.all_weights:
        nn.init.orthogonal_(w_input)
        nn.init.orthogonal_(w_hidden)
        nn.init.zeros_(b_input)
        nn.init.zeros_(b_hidden)
        with torch.no_grad():
            b_input[width : 2 * width].fill_(_FORGET_BIAS)


Hidden = tuple[Tensor, Tensor]
"""The state and the cell of the LSTM, float32 [layers, rows, width] each."""


def empty_hidden(lstm: nn.LSTM, rows: int) -> Hidden:
    """Return the LSTM state at the start of an episode: zeros."""
    weight = lstm.all_weights[0][0]
    shape = (lstm.num_layers, rows, lstm.hidden_size)
    return weight.new_zeros(shape), weight.new_zeros(shape)


def clear_rows(hidden: Hidden, rows: Tensor) -> Hidden:
    """Return the LSTM state with some rows, bool [rows], reset to zeros."""
    keep = ~rows[:, None]
    return hidden[0] * keep, hidden[1] * keep


def check_hidden(hidden: Hidden, lstm: nn.LSTM, rows: int) -> None:
    """Raise unless an LSTM state has the shape for this many rows."""
    shape = (lstm.num_layers, rows, lstm.hidden_size)
    for part in hidden:
        if tuple(part.shape) != shape:
            raise UsageError(
                f"hidden must be two tensors {list(shape)} (layers, rows, width), "
                f"got {list(part.shape)}"
            )


def run_step(lstm: nn.LSTM, features: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
    """Return the output [rows, width] and the state after one step of features [rows, width]."""
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
    """Return outputs [rows, steps, width] and the LSTM state after the last step.

    The state is reset before the steps where `episode_starts`, bool [rows, steps], is True. The
    pieces between resets become rows of one packed call, so that nothing loops over time.
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
    # Pieces are numbered over all rows in order; every step belongs to the piece opened last.
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


# ---- The critic


_OP_CODE = 32
"""Width of an encoded op."""


def make_op_encoder(config: PolicyConfig) -> nn.Sequential | None:
    """Return the layers between the op and the critic, None if there are none."""
    if not config.op_encoder:
        return None
    return nn.Sequential(nn.Linear(NUM_OPS, _OP_CODE), nn.ReLU(), nn.Linear(_OP_CODE, _OP_CODE))


def make_value_head(config: PolicyConfig) -> nn.Sequential:
    """Return the critic's layers; it reads the LSTM's output and, unless it is 'state', the op."""
    width, code = config.lstm_hidden_dim, _OP_CODE if config.op_encoder else NUM_OPS
    inputs = width if config.critic == "state" else width + code
    return nn.Sequential(nn.Linear(inputs, width // 2), nn.ReLU(), nn.Linear(width // 2, 1))


def encode_ops(encoder: nn.Sequential | None, shares: Tensor) -> Tensor:
    """Return the critic's input for ops, given as probabilities [..., ops]."""
    return shares if encoder is None else run_layers(encoder, shares)


def value_of_op(
    value_head: nn.Sequential, encoder: nn.Sequential | None, memory: Tensor, op: Tensor
) -> Tensor:
    """Return Q(s, op), [...], for memory [..., width] and one op per state."""
    encoded = encode_ops(encoder, F.one_hot(op, NUM_OPS).to(memory.dtype))
    return run_layers(value_head, torch.cat([memory, encoded], dim=-1)).squeeze(-1)


def state_value(value_head: nn.Sequential, memory: Tensor) -> Tensor:
    """Return V(s), [...], for memory [..., width]."""
    return run_layers(value_head, memory).squeeze(-1)


def memory_part(value_head: nn.Sequential, memory: Tensor) -> Tensor:
    """Return what the LSTM's output adds to the critic's first layer, [..., width / 2]."""
    layer = first_layer(value_head)
    return F.linear(memory, layer.weight[:, : memory.shape[-1]], layer.bias)


def op_part(value_head: nn.Sequential, encoded: Tensor) -> Tensor:
    """Return what encoded ops, [..., code], add to the critic's first layer."""
    weight = first_layer(value_head).weight
    return F.linear(encoded, weight[:, weight.shape[1] - encoded.shape[-1] :])


def finish(value_head: nn.Sequential, before: Tensor) -> Tensor:
    """Return values [...] from the sum of both parts."""
    value: Tensor = value_head[2](torch.relu(before)).squeeze(-1)
    return value


def first_layer(value_head: nn.Sequential) -> nn.Linear:
    """Return the critic's first layer, which joins the LSTM's output and the op."""
    layer = value_head[0]
    assert isinstance(layer, nn.Linear), "the value head starts with a linear layer"
    return layer
