"""The critic: what a state is worth under an op, under all of them, or under a mixture.

The op is the last part of the critic's input: a one-hot, or what an encoder makes of it. It enters
the first layer as an added row, so the wide product with the memory is shared by all ops.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline.actions import NUM_OPS
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.layers import run_layers

_OP_CODE = 32
"""Numbers that an encoder makes of an op."""


def make_op_encoder(config: PolicyConfig) -> nn.Sequential | None:
    """Return the layers between the op and the critic; None where it sees the bare op, or none."""
    if not config.op_encoder:
        return None
    return nn.Sequential(nn.Linear(NUM_OPS, _OP_CODE), nn.ReLU(), nn.Linear(_OP_CODE, _OP_CODE))


def make_value_head(config: PolicyConfig) -> nn.Sequential:
    """Return the critic's layers; its input is the memory and, unless it is blind to it, the op."""
    width, code = config.lstm_hidden_dim, _OP_CODE if config.op_encoder else NUM_OPS
    inputs = width if config.critic == "state" else width + code
    return nn.Sequential(nn.Linear(inputs, width // 2), nn.ReLU(), nn.Linear(width // 2, 1))


def encode_ops(encoder: nn.Sequential | None, shares: Tensor) -> Tensor:
    """Return what the critic is told of ops, given as shares [..., ops] that sum to 1."""
    return shares if encoder is None else run_layers(encoder, shares)


def value_of_op(
    value_head: nn.Sequential, encoder: nn.Sequential | None, memory: Tensor, op: Tensor
) -> Tensor:
    """Return Q(s, op), [...], for memory [..., width] and one op per state."""
    told = encode_ops(encoder, F.one_hot(op, NUM_OPS).to(memory.dtype))
    return run_layers(value_head, torch.cat([memory, told], dim=-1)).squeeze(-1)


def state_value(value_head: nn.Sequential, memory: Tensor) -> Tensor:
    """Return V(s), [...], for memory [..., width]."""
    return run_layers(value_head, memory).squeeze(-1)


def memory_part(value_head: nn.Sequential, memory: Tensor) -> Tensor:
    """Return what the memory adds to the critic's first layer, [..., width / 2]."""
    layer = first_layer(value_head)
    return F.linear(memory, layer.weight[:, : memory.shape[-1]], layer.bias)


def op_part(value_head: nn.Sequential, told: Tensor) -> Tensor:
    """Return what is told of ops, [..., code], adds to the critic's first layer."""
    weight = first_layer(value_head).weight
    return F.linear(told, weight[:, weight.shape[1] - told.shape[-1] :])


def finish(value_head: nn.Sequential, before: Tensor) -> Tensor:
    """Return values [...] from the sum of both parts."""
    value: Tensor = value_head[2](torch.relu(before)).squeeze(-1)
    return value


def first_layer(value_head: nn.Sequential) -> nn.Linear:
    """Return the layer that memory and op meet in."""
    layer = value_head[0]
    assert isinstance(layer, nn.Linear), "the value head starts with a linear layer"
    return layer
