"""Leyline: the contracts between all parts of Esper, from stages and rules to records.

The names that the design documents use can be imported from here, all others from their module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.leyline.registry import find_in

if TYPE_CHECKING:
    from esper.leyline.actions import HEAD_NAMES, HEAD_SIZES, NUM_OPS, LifecycleOp
    from esper.leyline.controller import (
        DEFAULT_FEATURE_DIM,
        DEFAULT_GAMMA,
        DEFAULT_LSTM_HIDDEN_DIM,
        ENTROPY_COEF_PER_HEAD,
        ENTROPY_FLOOR_PENALTY_COEF,
        ENTROPY_FLOOR_PER_HEAD,
        PROBABILITY_FLOOR_PER_HEAD,
    )
    from esper.leyline.signals import Signals
    from esper.leyline.slots import NUM_BLUEPRINTS, SlotConfig
    from esper.leyline.stages import NUM_STAGES, SeedStage


__all__ = [
    "DEFAULT_FEATURE_DIM",
    "DEFAULT_GAMMA",
    "DEFAULT_LSTM_HIDDEN_DIM",
    "ENTROPY_COEF_PER_HEAD",
    "ENTROPY_FLOOR_PENALTY_COEF",
    "ENTROPY_FLOOR_PER_HEAD",
    "HEAD_NAMES",
    "HEAD_SIZES",
    "NUM_BLUEPRINTS",
    "NUM_OPS",
    "NUM_STAGES",
    "PROBABILITY_FLOOR_PER_HEAD",
    "LifecycleOp",
    "SeedStage",
    "Signals",
    "SlotConfig",
]

_HOMES = {
    "esper.leyline.actions": ("HEAD_NAMES", "HEAD_SIZES", "LifecycleOp", "NUM_OPS"),
    "esper.leyline.slots": ("NUM_BLUEPRINTS", "SlotConfig"),
    "esper.leyline.controller": (
        "DEFAULT_FEATURE_DIM",
        "DEFAULT_GAMMA",
        "DEFAULT_LSTM_HIDDEN_DIM",
        "ENTROPY_COEF_PER_HEAD",
        "ENTROPY_FLOOR_PENALTY_COEF",
        "ENTROPY_FLOOR_PER_HEAD",
        "PROBABILITY_FLOOR_PER_HEAD",
    ),
    "esper.leyline.signals": ("Signals",),
    "esper.leyline.stages": ("NUM_STAGES", "SeedStage"),
}

__getattr__ = find_in(__name__, _HOMES)
