"""The layers of the eight heads."""

from __future__ import annotations

from torch import nn

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
