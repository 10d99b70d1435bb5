"""The critic: Q(s, op) for the op that was taken, for all ops at once, or V(s)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline.actions import NUM_OPS
from esper.tamiyo.networks.dense import run_layers


def make_value_head(width: int, *, sees_op: bool) -> nn.Sequential:
    """Return the layers; with `sees_op` a one-hot of the op follows the memory in the input."""
    inputs = width + NUM_OPS if sees_op else width
    return nn.Sequential(nn.Linear(inputs, width // 2), nn.ReLU(), nn.Linear(width // 2, 1))


def state_value(value_head: nn.Sequential, memory: Tensor) -> Tensor:
    """Return V(s), [...], for memory [..., width]."""
    return run_layers(value_head, memory).squeeze(-1)


def value_of_op(value_head: nn.Sequential, memory: Tensor, op: Tensor) -> Tensor:
    """Return Q(s, op), [...], for one op per state."""
    one_hot = F.one_hot(op, NUM_OPS).to(memory.dtype)
    return run_layers(value_head, torch.cat([memory, one_hot], dim=-1)).squeeze(-1)


def value_of_every_op(value_head: nn.Sequential, memory: Tensor) -> Tensor:
    """Return Q(s, op), [..., ops], for all ops in one evaluation.

    The op enters the first layer as one added row of weights, so the wide product with the memory
    is shared by all ops.
    """
    base, effects = _first_layer(value_head, memory)
    return _last_layer(value_head, base.unsqueeze(-2) + effects)


def _first_layer(value_head: nn.Sequential, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the memory adds, [..., width / 2], and what each op adds, [ops, width / 2]."""
    layer = value_head[0]
    assert isinstance(layer, nn.Linear), "the value head starts with a linear layer"
    width = memory.shape[-1]
    base = F.linear(memory, layer.weight[:, :width], layer.bias)
    return base, layer.weight[:, width:].t()


def _last_layer(value_head: nn.Sequential, before: Tensor) -> Tensor:
    value: Tensor = value_head[2](torch.relu(before)).squeeze(-1)
    return value
