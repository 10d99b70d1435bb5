"""The layers of the eight heads, and their logits over whole episodes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from esper.tamiyo.networks.dense import run_layers

_BLUEPRINT_NECK = 128


def make_head(width: int, choices: int) -> nn.Sequential:
    """Return the two layers of an ordinary head."""
    return nn.Sequential(nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, choices))


def make_blueprint_head(width: int, choices: int) -> nn.Sequential:
    """Return the three layers of the blueprint head, whose choice weighs most."""
    return nn.Sequential(
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, _BLUEPRINT_NECK),
        nn.ReLU(),
        nn.Linear(_BLUEPRINT_NECK, choices),
    )


def run_heads(heads: Iterable[nn.Sequential], memory: Tensor) -> Tensor:
    """Return the logits of all heads side by side over whole episodes, [..., choices of all]."""
    return torch.cat([run_layers(head, memory) for head in heads], dim=-1)
