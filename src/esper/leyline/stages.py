"""The stages of a seed, and how it is blended into its host."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class SeedStage(IntEnum):
    """The stage of a seed. The value 5 is retired and must never appear."""

    UNKNOWN = 0
    DORMANT = 1
    GERMINATED = 2
    TRAINING = 3
    BLENDING = 4
    HOLDING = 6
    FOSSILIZED = 7
    PRUNED = 8
    EMBARGOED = 9
    RESETTING = 10


NUM_STAGES = len(SeedStage)

STAGE_INDEX: dict[int, int] = {stage.value: index for index, stage in enumerate(SeedStage)}
"""Position of every stage in the one-hot of the observation (values skip 5)."""

TRANSITIONS: dict[SeedStage, frozenset[SeedStage]] = {
    SeedStage.UNKNOWN: frozenset({SeedStage.DORMANT}),
    SeedStage.DORMANT: frozenset({SeedStage.GERMINATED}),
    SeedStage.GERMINATED: frozenset({SeedStage.TRAINING, SeedStage.PRUNED}),
    SeedStage.TRAINING: frozenset({SeedStage.BLENDING, SeedStage.PRUNED}),
    SeedStage.BLENDING: frozenset({SeedStage.HOLDING, SeedStage.PRUNED}),
    SeedStage.HOLDING: frozenset({SeedStage.FOSSILIZED, SeedStage.BLENDING, SeedStage.PRUNED}),
    SeedStage.FOSSILIZED: frozenset(),
    SeedStage.PRUNED: frozenset({SeedStage.EMBARGOED}),
    SeedStage.EMBARGOED: frozenset({SeedStage.RESETTING}),
    SeedStage.RESETTING: frozenset({SeedStage.DORMANT}),
}
"""Legal changes of stage."""

EMPTY_STAGES = (SeedStage.UNKNOWN, SeedStage.DORMANT)
"""The slot has no record."""

LIVE_STAGES = (
    SeedStage.GERMINATED,
    SeedStage.TRAINING,
    SeedStage.BLENDING,
    SeedStage.HOLDING,
)
"""The seed has a module and is not fossilized; exactly these can be pruned."""

BLENDED_STAGES = (SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED)
"""The seed's output reaches the host's, scaled by alpha."""

MODULE_STAGES = (*LIVE_STAGES, SeedStage.FOSSILIZED)
"""The slot holds a module."""

COOLDOWN_STAGES = (SeedStage.PRUNED, SeedStage.EMBARGOED, SeedStage.RESETTING)
"""The module is gone; the record blocks the slot for a while."""

DEVELOPING_STAGES = (SeedStage.GERMINATED, SeedStage.TRAINING, *COOLDOWN_STAGES)
"""While any slot is in one of these, no new seed may start (sequential development)."""


def parse_stage(value: int) -> SeedStage:
    """Return the stage with this value; raise ValueError for 5 and unknown values."""
    try:
        return SeedStage(value)
    except ValueError:
        known = ", ".join(f"{stage.value} {stage.name}" for stage in SeedStage)
        raise ValueError(f"no stage has the value {value} (5 is retired); known: {known}") from None


# ---- Blending: amplitude modes, ramps, algorithms and styles


class AlphaMode(IntEnum):
    """Whether the amplitude alpha holds, rises or falls."""

    HOLD = 0
    UP = 1
    DOWN = 2


class AlphaAlgorithm(IntEnum):
    """How the seed's output is combined with the host's."""

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
"""Steepness k of each curve, 0 if it is no sigmoid."""


class BlendStyle(IntEnum):
    """The choice of a controller: an algorithm together with the curve of the first ramp."""

    LINEAR_ADD = 0
    LINEAR_MULTIPLY = 1
    SIGMOID_ADD = 2
    GATED_GATE = 3


@dataclass(frozen=True, slots=True)
class StyleSpec:
    """The meaning of a style."""

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
"""The style that keeps the algorithm of a seed."""

TEMPO_EPOCHS: tuple[int, ...] = (3, 5, 8)
"""Epochs of the first blend: fast, standard, slow."""

ALPHA_TARGETS: tuple[float, ...] = (0.5, 0.7, 1.0)
"""Amplitudes a controller can aim for: half, seventy, full."""

SPEED_TICKS: tuple[int, ...] = (0, 3, 5, 8)
"""Ticks of a later ramp: instant, fast, medium, slow."""
