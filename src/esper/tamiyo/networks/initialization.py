"""How the policy network starts: near-uniform heads, an open memory and a sentinel's prior."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

_HIDDEN_GAIN = math.sqrt(2.0)
_FORGET_BIAS = 1.0


def initialize_linear(modules: Iterable[nn.Module]) -> None:
    """Make every linear layer inside orthogonal with gain sqrt(2) and zero bias."""
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, _HIDDEN_GAIN)
                nn.init.zeros_(layer.bias)


def initialize_output(
    head: nn.Sequential, gain: float, bias: Sequence[float] | None = None
) -> None:
    """Give the last layer of a head its gain, and its bias where one is wanted."""
    layer = head[-1]
    assert isinstance(layer, nn.Linear), "a head ends with a linear layer"
    nn.init.orthogonal_(layer.weight, gain)
    if bias is not None:
        with torch.no_grad():
            layer.bias.copy_(torch.tensor(bias, dtype=layer.bias.dtype))


def initialize_lstm(lstm: nn.LSTM) -> None:
    """Make the matrices orthogonal and the effective forget bias exactly 1.

    PyTorch adds two bias vectors; only the first carries the 1, so that their sum is 1 and not 2.
    """
    width = lstm.hidden_size
    for w_input, w_hidden, b_input, b_hidden in lstm.all_weights:
        nn.init.orthogonal_(w_input)
        nn.init.orthogonal_(w_hidden)
        nn.init.zeros_(b_input)
        nn.init.zeros_(b_hidden)
        with torch.no_grad():
            b_input[width : 2 * width].fill_(_FORGET_BIAS)
