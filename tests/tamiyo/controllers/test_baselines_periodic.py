from __future__ import annotations

from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import AlphaMode, SeedStage
from esper.tamiyo.controllers.baselines import PeriodicConfig, PeriodicController
from tests.tamiyo.controllers.scenes import Scene, Slot

WAIT, GERMINATE = LifecycleOp.WAIT, LifecycleOp.GERMINATE
ADVANCE, FOSSILIZE = LifecycleOp.ADVANCE, LifecycleOp.FOSSILIZE


def clock(every: int = 5, seed: int = 0) -> PeriodicController:
    controller = PeriodicController(seed, PeriodicConfig(every=every))
    controller.reset(1, "cpu")
    return controller


def test_it_germinates_at_every_so_many_epochs() -> None:
    controller = clock()
    ops = [Scene(epoch=epoch).op(controller) for epoch in range(1, 12)]
    assert [index + 1 for index, op in enumerate(ops) if op == GERMINATE] == [5, 10]
    assert set(ops) == {WAIT, GERMINATE}


def test_draws_depend_on_seed_and_epoch_alone() -> None:
    def draws(seed: int) -> list[dict[str, int]]:
        return [Scene(epoch=epoch).act(clock(1, seed)) for epoch in range(1, 20)]

    assert draws(3) == draws(3) != draws(4)
    assert len({action["blueprint"] for action in draws(3)}) > 2
    assert len({action["slot"] for action in draws(3)}) == 3


def test_seeds_are_brought_up_unjudged() -> None:
    controller = clock()
    slot = Slot(stage=SeedStage.GERMINATED, contribution=-9.0)
    scene = Scene(slots=[slot], epoch=5)
    assert scene.op(controller) == ADVANCE
    slot.stage, slot.mode = SeedStage.BLENDING, AlphaMode.UP
    assert scene.op(controller) == WAIT
    slot.stage, slot.mode, slot.alpha, slot.target = SeedStage.HOLDING, AlphaMode.HOLD, 1.0, 1.0
    assert scene.op(controller) == FOSSILIZE


def test_what_has_just_failed_comes_last() -> None:
    controller = clock()
    slots = [Slot(stage=SeedStage.HOLDING, alpha=1.0, target=1.0), Slot()]
    scene = Scene(slots=slots, epoch=10)
    assert scene.op(controller) == FOSSILIZE
    scene.last_op, scene.last_success = FOSSILIZE, False
    assert scene.op(controller) == GERMINATE
