from __future__ import annotations

import pytest

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import UnknownNameError
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers.baselines import PlateauConfig, PlateauController
from tests.tamiyo.controllers.scenes import CONTEXT, Scene, Slot, blueprint_id

WAIT, GERMINATE = LifecycleOp.WAIT, LifecycleOp.GERMINATE
ADVANCE, PRUNE, FOSSILIZE = LifecycleOp.ADVANCE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE


def rule(**options: object) -> PlateauController:
    controller = PlateauController(CONTEXT, PlateauConfig(**options))
    controller.reset(1, "cpu")
    return controller


def test_it_waits_while_the_score_rises_and_adds_at_the_deepest_slot_on_a_plateau() -> None:
    controller = rule(patience=4)
    assert Scene(plateau=3).op(controller) == WAIT
    action = Scene(plateau=4).act(controller)
    assert (action["op"], action["slot"]) == (GERMINATE, 2)
    assert action["blueprint"] == blueprint_id("conv_heavy")


def test_the_first_blueprint_that_fits_is_added() -> None:
    action = Scene(plateau=9, topology="vector").act(rule())
    assert action["blueprint"] == blueprint_id("mlp")
    assert Scene(plateau=9, fitting=("norm",)).op(rule()) == WAIT


@pytest.mark.parametrize(("best", "op"), [(49.0, PRUNE), (50.0, PRUNE), (50.1, FOSSILIZE)])
def test_a_seed_is_kept_if_the_best_score_rose(best: float, op: LifecycleOp) -> None:
    controller = rule(trial=2)
    assert Scene(plateau=9, score=48.0, best=50.0).op(controller) == GERMINATE
    holding = Slot(stage=SeedStage.HOLDING, alpha=1.0, target=1.0, in_stage=1)
    scene = Scene(slots=[Slot(), Slot(), holding], best=best)
    assert scene.op(controller) == WAIT
    holding.in_stage = 2
    assert scene.op(controller) == op


def test_after_some_failures_nothing_is_added() -> None:
    controller = rule(trial=0)
    holding = Slot(stage=SeedStage.HOLDING, alpha=1.0, target=1.0)
    for _ in range(2):
        assert Scene(plateau=9).op(controller) == GERMINATE
        assert Scene(slots=[holding]).op(controller) == PRUNE
    assert Scene(plateau=30).op(controller) == WAIT


def test_a_rollback_is_forgotten() -> None:
    controller = rule(trial=0)
    for _ in range(2):
        Scene(plateau=9).op(controller)
        Scene(slots=[Slot(stage=SeedStage.HOLDING, alpha=1.0, target=1.0)]).op(controller)
    assert Scene(plateau=9, rolled_back=True).op(controller) == GERMINATE


def test_an_unknown_blueprint_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'conv_heavy'"):
        rule(blueprints=("conv_hevy",))


class TestCopies:
    """`plateau:blueprints=[kin]`; a built-in blueprint stands for copies here."""

    def test_are_doubled_on_the_next_plateau_if_they_helped(self) -> None:
        controller = rule(trial=0, blueprints=("conv_light",))
        assert Scene(plateau=9).act(controller)["slot"] == 2
        held = Slot(stage=SeedStage.HOLDING, alpha=1.0, target=1.0, copies=1)
        slots = [Slot(), Slot(), held]
        assert Scene(plateau=0, best=60.0, slots=slots).op(controller) == WAIT
        full = Slot(stage=SeedStage.FOSSILIZED, alpha=1.0, target=1.0, copies=1)
        action = Scene(plateau=9, best=60.0, slots=[full, full, held]).act(controller)
        assert (action["op"], action["slot"]) == (GERMINATE, 2)

    def test_come_to_the_shallowest_stage_first(self) -> None:
        controller = rule(trial=0, blueprints=("conv_light",))
        Scene(plateau=9).op(controller)
        held = Slot(stage=SeedStage.HOLDING, alpha=1.0, target=1.0, copies=1)
        slots = [Slot(), Slot(), held]
        Scene(plateau=0, best=60.0, slots=slots).op(controller)
        assert Scene(plateau=9, best=60.0, slots=slots).act(controller)["slot"] == 1

    def test_that_helped_before_their_last_doubling_are_not_pruned(self) -> None:
        for copies, op in ((1, PRUNE), (3, FOSSILIZE)):
            controller = rule(trial=0, blueprints=("conv_light",))
            held = Slot(stage=SeedStage.HOLDING, alpha=1.0, target=1.0, copies=copies)
            Scene(plateau=9, best=50.0).op(controller)
            assert Scene(best=50.0, slots=[Slot(), Slot(), held]).op(controller) == op
