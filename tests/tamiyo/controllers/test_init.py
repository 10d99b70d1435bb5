"""Every controller passes the battery, and the battery notices what is broken."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.tamiyo.controllers import CONTROLLERS, WaitController, make_controller
from esper.testing.controllers import check_actions, check_controller, random_signals

PLAN = """
- {epoch: 1, op: germinate, slot: r0c0, blueprint: norm, style: gated_gate, tempo: 3}
- {epoch: 1, op: advance, slot: 0}
- {epoch: 5, op: set_alpha_target, slot: 0, alpha_target: 0.7, alpha_speed: 3, alpha_curve: cosine}
- {epoch: 9, op: prune, slot: 0, alpha_speed: 8}
- {epoch: 10%, op: grow, slot: 50%, blueprint: [lora, norm]}
- {epoch: 9, op: fossilize, slot: r0c1}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


@pytest.mark.parametrize(
    "name", ["wait", "random", "periodic", "plateau", "heuristic", "trial", "schedule"]
)
def test_battery(name: str, plan: Path) -> None:
    spec = f"schedule:{plan}" if name == "schedule" else name
    check_controller(spec)


def test_battery_of_the_rule_that_grows_copies_alone() -> None:
    def make(context: ControllerContext) -> Controller:
        context = dataclasses.replace(context, copies=("conv_light",))
        return make_controller("slope:windows=1,latest=0.9", context)

    check_controller(make)


def test_battery_with_one_slot_and_many() -> None:
    for slots in (1, 8):
        check_controller(lambda context: make_controller("heuristic", context), slots=slots)


class Broken(WaitController):
    """A WAIT controller whose tests break one thing each."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def reset(self, rows: int, device: torch.device | str) -> None:
        self.steps = 0

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        self.steps += 1
        return super().act(signals, masks)


class Illegal(Broken):
    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        return {**super().act(signals, masks), "op": torch.full((masks.rows,), 4)}


class WrongSlot(Broken):
    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        return {**super().act(signals, masks), "slot": torch.full((masks.rows,), 7)}


class NoPlaceholder(Broken):
    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        return {**super().act(signals, masks), "tempo": torch.zeros(masks.rows, dtype=torch.int64)}


class WrongType(Broken):
    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        return {head: values.int() for head, values in super().act(signals, masks).items()}


class MissingHead(Broken):
    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        return {"op": super().act(signals, masks)["op"]}


class Meddling(Broken):
    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        signals.val_score.zero_()
        return super().act(signals, masks)


class NotPlain(Broken):
    def state_dict(self) -> dict[str, Any]:
        return {"steps": {self.steps}}


class IntegerKeys(Broken):
    def state_dict(self) -> dict[str, Any]:
        return {"rows": {0: self.steps}}


class Aliasing(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"steps": 0}

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        self.state["steps"] += 1
        return super().act(signals, masks)

    def state_dict(self) -> dict[str, Any]:
        return self.state


class LosesState(Broken):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = 0


class Stuck(Broken):
    """Advances where it can on every third step it has ever taken, whatever its state says."""

    def __init__(self) -> None:
        super().__init__()
        self.ever = 0

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        actions = super().act(signals, masks)
        self.ever += 1
        if self.ever % 3 == 0 and bool(masks.op[0, LifecycleOp.ADVANCE]):
            actions["op"][0] = int(LifecycleOp.ADVANCE)
            actions["slot"][0] = masks.slot_by_op[0, LifecycleOp.ADVANCE].nonzero()[0, 0]
        return actions


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Illegal, "op 4 is not legal"),
        (WrongSlot, "illegal slot"),
        (NoPlaceholder, "does not use 'tempo'"),
        (WrongType, "must be int64"),
        (MissingHead, "must have the heads"),
        (Meddling, r"changed Signals\.val_score"),
        (NotPlain, "is a set"),
        (IntegerKeys, "keys must be text"),
        (Aliasing, "return copies"),
        (LosesState, "is not the state"),
        (Stuck, "gave another result"),
    ],
)
def test_battery_notices(broken: type[Broken], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_controller(lambda context: broken())


def test_a_negative_index_is_illegal_though_python_counts_from_the_end() -> None:
    signals, masks = random_signals(2, 3, torch.Generator().manual_seed(0))
    masks = dataclasses.replace(masks, slot_by_op=torch.ones_like(masks.slot_by_op))
    actions = Broken().act(signals, masks)
    check_actions(actions, masks)
    with pytest.raises(AssertionError, match="illegal slot"):
        check_actions({**actions, "slot": torch.full((2,), -1)}, masks)


def test_battery_wants_an_object_with_the_protocol() -> None:
    for wrong in (object(), WaitController):
        with pytest.raises(AssertionError, match="must be an object with reset"):
            check_controller(lambda context, wrong=wrong: wrong)


def test_how_to_add_a_controller_works() -> None:
    """The guide's code blocks run in order, as a reader would type them."""
    guide = Path(__file__).parents[3] / "docs/how-to/add-a-controller.md"
    blocks = re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    namespace: dict[str, Any] = {}
    try:
        for block in blocks:
            exec(compile(block, str(guide), "exec"), namespace)
        context = ControllerContext(slot_names=("a", "b"))
        assert isinstance(make_controller("every_nth:4", context), Controller)
    finally:
        if "every_nth" in CONTROLLERS:
            CONTROLLERS.unregister("every_nth")
