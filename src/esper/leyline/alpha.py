"""How a seed is mixed into its host: amplitude modes, ramps, algorithms and styles."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class AlphaMode(IntEnum):
    """What the amplitude is doing."""

    HOLD = 0
    UP = 1
    DOWN = 2


class AlphaAlgorithm(IntEnum):
    """How the seed's output meets the host's."""

    ADD = 0
    MULTIPLY = 1
    GATE = 2


class AlphaCurve(IntEnum):
    """Shape of an amplitude ramp; the sigmoids differ in steepness."""

    LINEAR = 0
    COSINE = 1
    SIGMOID_GENTLE = 2
    SIGMOID = 3
    SIGMOID_SHARP = 4


STEEPNESS: tuple[float, ...] = (0.0, 0.0, 6.0, 12.0, 24.0)
"""Steepness k of each curve, 0 where the curve is no sigmoid."""


class BlendStyle(IntEnum):
    """The choice a controller makes: an algorithm together with the first ramp's curve."""

    LINEAR_ADD = 0
    LINEAR_MULTIPLY = 1
    SIGMOID_ADD = 2
    GATED_GATE = 3


@dataclass(frozen=True, slots=True)
class StyleSpec:
    """What a style stands for."""

    algorithm: AlphaAlgorithm
    curve: AlphaCurve


STYLE_SPECS: dict[BlendStyle, StyleSpec] = {
    BlendStyle.LINEAR_ADD: StyleSpec(AlphaAlgorithm.ADD, AlphaCurve.LINEAR),
    BlendStyle.LINEAR_MULTIPLY: StyleSpec(AlphaAlgorithm.MULTIPLY, AlphaCurve.LINEAR),
    BlendStyle.SIGMOID_ADD: StyleSpec(AlphaAlgorithm.ADD, AlphaCurve.SIGMOID),
    BlendStyle.GATED_GATE: StyleSpec(AlphaAlgorithm.GATE, AlphaCurve.LINEAR),
}

STYLE_OF_ALGORITHM: dict[int, BlendStyle] = {
    AlphaAlgorithm.ADD: BlendStyle.SIGMOID_ADD,
    AlphaAlgorithm.MULTIPLY: BlendStyle.LINEAR_MULTIPLY,
    AlphaAlgorithm.GATE: BlendStyle.GATED_GATE,
}
"""The style that goes on mixing a seed in as it is mixed in now."""

TEMPO_EPOCHS: tuple[int, ...] = (3, 5, 8)
"""Epochs of the first blend: fast, standard, slow."""

ALPHA_TARGETS: tuple[float, ...] = (0.5, 0.7, 1.0)
"""Amplitudes a controller can aim for: half, seventy, full."""

SPEED_TICKS: tuple[int, ...] = (0, 3, 5, 8)
"""Ticks of a later ramp: instant, fast, medium, slow."""
