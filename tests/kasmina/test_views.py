"""What a reader sees of a slot."""

from __future__ import annotations

from esper.leyline.alpha import AlphaAlgorithm, AlphaMode
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import bring, measure, stack_garden


def test_an_empty_slot() -> None:
    view = stack_garden().slots["a"]
    assert (view.name, view.topology, view.channels) == ("a", "vector", 4)
    assert (view.stage, view.blueprint, view.alpha) == (SeedStage.DORMANT, None, 0.0)
    assert (view.parameters, view.age, view.epochs_in_stage) == (0, 0, 0)
    assert view.contribution is None
    assert view.contribution_se is None
    assert repr(view) == "<slot a: DORMANT>"


def test_a_grown_slot() -> None:
    garden = stack_garden()
    view = garden.slots["b"]
    bring(garden, "b", SeedStage.HOLDING, "lora", style="gated_gate")
    measure(garden, "b", 1.5)
    assert (view.stage, view.blueprint) == (SeedStage.HOLDING, "lora")
    assert (view.alpha, view.alpha_target, view.alpha_mode) == (1.0, 1.0, AlphaMode.HOLD)
    assert view.algorithm is AlphaAlgorithm.GATE
    assert view.parameters == sum(p.numel() for p in garden.slot_parameters("b"))
    assert view.contribution == 1.5
    assert view.contribution_se is None
    assert repr(view) == "<slot b: HOLDING, lora, alpha=1.00>"


def test_a_view_follows_its_garden() -> None:
    garden = stack_garden()
    view = garden.slots["a"]
    bring(garden, "a", SeedStage.TRAINING)
    garden.record_epoch(50.0)
    assert (view.stage, view.age, view.epochs_in_stage) == (SeedStage.TRAINING, 1, 1)
