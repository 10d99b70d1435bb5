"""Constants of the learned controller that the design documents fix by name."""

from __future__ import annotations

DEFAULT_EPISODE_LENGTH = 150
DEFAULT_LSTM_HIDDEN_DIM = 512
DEFAULT_FEATURE_DIM = 512
DEFAULT_GAMMA = 0.995

_PER_HEAD: dict[str, tuple[float, float, float, float]] = {
    # Head: multiplier of its entropy, least entropy, penalty below that, least probability.
    "slot": (1.0, 0.20, 0.15, 0.03),
    "blueprint": (1.3, 0.40, 0.50, 0.10),
    "style": (1.2, 0.30, 0.20, 0.05),
    "tempo": (1.3, 0.40, 0.50, 0.10),
    "alpha_target": (1.2, 0.25, 0.15, 0.05),
    "alpha_speed": (1.2, 0.20, 0.12, 0.05),
    "alpha_curve": (1.2, 0.20, 0.12, 0.05),
    "op": (1.0, 0.15, 0.05, 0.02),
}

ENTROPY_COEF_PER_HEAD = {head: constants[0] for head, constants in _PER_HEAD.items()}
"""Multiplier of each head's entropy in the bonus."""

ENTROPY_FLOOR_PER_HEAD = {head: constants[1] for head, constants in _PER_HEAD.items()}
"""Normalised entropy below which a head is penalised."""

ENTROPY_FLOOR_PENALTY_COEF = {head: constants[2] for head, constants in _PER_HEAD.items()}
"""Weight of that penalty."""

PROBABILITY_FLOOR_PER_HEAD = {head: constants[3] for head, constants in _PER_HEAD.items()}
"""Least probability of a valid choice while exploring."""
