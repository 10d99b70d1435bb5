"""Constants of the learned controller that the design documents fix by name."""

from __future__ import annotations

DEFAULT_EPISODE_LENGTH = 150
DEFAULT_LSTM_HIDDEN_DIM = 512
DEFAULT_FEATURE_DIM = 512
DEFAULT_GAMMA = 0.995

ENTROPY_COEF_PER_HEAD: dict[str, float] = {
    "slot": 1.0,
    "blueprint": 1.3,
    "style": 1.2,
    "tempo": 1.3,
    "alpha_target": 1.2,
    "alpha_speed": 1.2,
    "alpha_curve": 1.2,
    "op": 1.0,
}
"""Multiplier of each head's entropy in the bonus."""

ENTROPY_FLOOR_PER_HEAD: dict[str, float] = {
    "slot": 0.20,
    "blueprint": 0.40,
    "style": 0.30,
    "tempo": 0.40,
    "alpha_target": 0.25,
    "alpha_speed": 0.20,
    "alpha_curve": 0.20,
    "op": 0.15,
}
"""Normalised entropy below which a head is penalised."""

ENTROPY_FLOOR_PENALTY_COEF: dict[str, float] = {
    "slot": 0.15,
    "blueprint": 0.50,
    "style": 0.20,
    "tempo": 0.50,
    "alpha_target": 0.15,
    "alpha_speed": 0.12,
    "alpha_curve": 0.12,
    "op": 0.05,
}
"""Weight of that penalty."""

PROBABILITY_FLOOR_PER_HEAD: dict[str, float] = {
    "slot": 0.03,
    "blueprint": 0.10,
    "style": 0.05,
    "tempo": 0.10,
    "alpha_target": 0.05,
    "alpha_speed": 0.05,
    "alpha_curve": 0.05,
    "op": 0.02,
}
"""Least probability of a valid choice while exploring."""
