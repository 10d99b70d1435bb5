from __future__ import annotations

import torch

from esper.leyline.actions import HEAD_NAMES, PLACEHOLDERS, LifecycleOp
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers.registry import WAIT, pack_choices
from tests.tamiyo.controllers.scenes import Scene, Slot, take_rows


def test_heads_left_out_take_their_placeholder() -> None:
    masks = Scene().masks()
    actions = pack_choices([WAIT], masks)
    assert list(actions) == list(HEAD_NAMES)
    assert {head: int(values) for head, values in actions.items()} == {
        head: int(value) for head, value in PLACEHOLDERS.items()
    }


def test_the_slot_of_a_choice_without_one_is_the_first_its_op_allows() -> None:
    masks = Scene(slots=[Slot(), Slot(stage=SeedStage.HOLDING), Slot()]).masks()
    actions = pack_choices([{"op": LifecycleOp.FOSSILIZE}], masks)
    assert int(actions["slot"]) == 1


def test_heads_the_op_does_not_use_are_ignored() -> None:
    masks = Scene(slots=[Slot(stage=SeedStage.HOLDING)]).masks()
    choice = {"op": LifecycleOp.FOSSILIZE, "slot": 0, "tempo": 2, "blueprint": 3}
    actions = pack_choices([choice], masks)
    assert int(actions["tempo"]) == PLACEHOLDERS["tempo"]
    assert int(actions["blueprint"]) == PLACEHOLDERS["blueprint"]


def test_no_rows() -> None:
    masks = Scene().masks()
    actions = pack_choices([], take_rows(masks, slice(0)))
    assert all(values.shape == (0,) and values.dtype == torch.int64 for values in actions.values())
