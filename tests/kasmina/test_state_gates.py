"""Every gate of both kinds, just below and just above each threshold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from esper.kasmina.state import (
    EarnedGates,
    GateConfig,
    blending_gate,
    describe_failure,
    empty_state,
    fossilize_gate,
    germinate_gate,
    holding_gate,
    training_gate,
)
from esper.leyline.errors import ConfigError
from esper.leyline.stages import AlphaMode, SeedStage
from tests.kasmina.gardens import one_slot

PERMISSIVE, STRICT = GateConfig(kind="permissive"), GateConfig(kind="strict")
TRAINED: dict[str, Any] = {
    "epochs_in_stage": 10,
    "grad_health": 0.7,
    "score_stage": 50.0,
    "score_now": 50.5,
    "grad_ratio": 0.10,
}
BLENDED: dict[str, Any] = {
    "epochs_in_stage": 10,
    "alpha": 1.0,
    "alpha_target": 1.0,
    "alpha_mode": int(AlphaMode.HOLD),
}
HELD: dict[str, Any] = {"contribution": 1.0, "grad_health": 0.7}


def test_g0_needs_a_named_blueprint() -> None:
    assert germinate_gate(torch.tensor([-1, 0, 1, 12])).tolist() == [False, False, True, True]


@pytest.mark.parametrize("stage", list(SeedStage))
def test_each_gate_opens_only_in_its_own_stage(stage: SeedStage) -> None:
    state = one_slot(stage, **{**BLENDED, **TRAINED, **HELD})
    assert bool(training_gate(state)) == (stage is SeedStage.GERMINATED)
    for config in (PERMISSIVE, STRICT):
        assert bool(blending_gate(state, config)) == (stage is SeedStage.TRAINING)
        assert bool(holding_gate(state, config)) == (stage is SeedStage.BLENDING)
        assert bool(fossilize_gate(state, config)) == (stage is SeedStage.HOLDING)


@pytest.mark.parametrize(
    ("changes", "permissive", "strict"),
    [
        ({}, True, True),
        ({"epochs_in_stage": 9}, False, False),
        ({"grad_health": 0.699}, False, True),
        ({"exploding": True}, False, True),
        ({"vanishing": True}, True, True),
        ({"score_now": 50.499}, True, False),
        ({"score_now": math.nan}, True, False),
        ({"grad_ratio": 0.099}, True, False),
        ({"grad_ratio": math.nan}, True, False),
    ],
)
def test_g2(changes: dict[str, Any], permissive: bool, strict: bool) -> None:
    state = one_slot(SeedStage.TRAINING, **{**TRAINED, **changes})
    assert bool(blending_gate(state, PERMISSIVE)) is permissive
    assert bool(blending_gate(state, STRICT)) is strict


@pytest.mark.parametrize(
    ("changes", "permissive", "strict"),
    [
        ({}, True, True),
        ({"epochs_in_stage": 9}, True, False),
        ({"epochs_in_stage": 0}, True, False),
        ({"alpha": 1 - 0.9e-6, "alpha_target": 1 - 0.9e-6}, True, True),
        ({"alpha": 1 - 2e-6, "alpha_target": 1 - 2e-6}, False, False),
        ({"alpha": 1 - 2e-6}, False, False),
        ({"alpha": 0.7, "alpha_target": 0.7}, False, False),
        ({"alpha_mode": int(AlphaMode.UP)}, False, False),
        ({"alpha_mode": int(AlphaMode.DOWN)}, False, False),
    ],
)
def test_g3(changes: dict[str, Any], permissive: bool, strict: bool) -> None:
    state = one_slot(SeedStage.BLENDING, **{**BLENDED, **changes})
    assert bool(holding_gate(state, PERMISSIVE)) is permissive
    assert bool(holding_gate(state, STRICT)) is strict


@pytest.mark.parametrize(
    ("changes", "permissive", "strict"),
    [
        ({}, True, True),
        ({"contribution": 0.999}, True, False),
        ({"contribution": -3.0}, True, False),
        ({"contribution": math.nan}, False, False),
        ({"grad_health": 0.699}, False, False),
        ({"exploding": True}, False, False),
    ],
)
def test_g5(changes: dict[str, Any], permissive: bool, strict: bool) -> None:
    state = one_slot(SeedStage.HOLDING, **{**HELD, **changes})
    assert bool(fossilize_gate(state, PERMISSIVE)) is permissive
    assert bool(fossilize_gate(state, STRICT)) is strict


@pytest.mark.parametrize(
    ("option", "gate", "stage", "fields"),
    [
        ("min_training_epochs", blending_gate, SeedStage.TRAINING, TRAINED),
        ("min_blending_epochs", holding_gate, SeedStage.BLENDING, BLENDED),
    ],
)
def test_the_epochs_are_options(
    option: str, gate: Any, stage: SeedStage, fields: dict[str, Any]
) -> None:
    state = one_slot(stage, **fields)
    assert bool(gate(state, STRICT))
    assert not bool(gate(state, STRICT.replace(**{option: 11})))


def test_health_beyond_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_gradient_health must be .* at most 1"):
        GateConfig(min_gradient_health=1.1)


@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({"stage": 3, "epochs_in_stage": 4}, "permissive", "10 epochs in TRAINING, 4 are over"),
        ({"stage": 3, "epochs_in_stage": 10, "grad_health": 0.2}, "permissive", "it is 0.20"),
        ({"stage": 3, "epochs_in_stage": 10}, "strict", "a gain of 0.5 points"),
        ({"stage": 4, "alpha": 0.3, "alpha_target": 0.5}, "permissive", "0.30 on its way to 0.50"),
        ({"stage": 4, "alpha": 1.0, "alpha_target": 1.0}, "strict", "10 epochs in BLENDING"),
        ({"stage": 6}, "permissive", "waits for a measured contribution"),
        ({"stage": 6, "contribution": 0.4}, "strict", "1.0 points, it is 0.40"),
        ({"stage": 6, "contribution": 2.0, "exploding": True}, "permissive", "a health of"),
    ],
)
def test_a_closed_gate_says_what_it_waits_for(
    fields: dict[str, float], kind: str, expected: str
) -> None:
    here = torch.ones((1, 1), dtype=torch.bool)
    state = empty_state(1, 1).where(here, **fields)
    assert expected in describe_failure(state, 0, GateConfig(kind=kind))


def test_g5_keeps_nothing_that_makes_no_difference() -> None:
    idle = one_slot(SeedStage.HOLDING, **{**HELD, "contribution": 0.0, "contribution_se": 0.0})
    assert bool(fossilize_gate(idle, PERMISSIVE)), "the documents' gate asks for a measurement only"
    config = EarnedGates()
    for worth, error, passes in (
        (0.0, 0.0, False),
        (0.0, 0.1, True),
        (0.1, 0.0, True),
        (0.0, math.nan, True),
    ):
        held = {**HELD, "contribution": worth, "contribution_se": error}
        state = one_slot(SeedStage.HOLDING, **held)
        assert bool(fossilize_gate(state, config)) == passes, (worth, error)
        assert ("0 ± 0" in describe_failure(state, 0, config)) == (not passes)
    assert "0 ± 0" in describe_failure(idle, 0, EarnedGates(kind="strict"))


def test_g5_keeps_nothing_that_nobody_trained() -> None:
    for config in (PERMISSIVE, STRICT):
        state = one_slot(SeedStage.HOLDING, **HELD, untrained=True)
        assert not bool(fossilize_gate(state, config))
        assert "nothing has trained" in describe_failure(state, 0, config)
