import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings

from esper.leyline.actions import HEAD_SIZES, LifecycleOp
from esper.leyline.errors import EmptyMaskError
from esper.leyline.masks import Masks, build_masks
from esper.leyline.rules import Refusal, RulesConfig
from esper.leyline.stages import SeedStage
from tests.leyline.legality import CONFIGS, STATES, Row, Slot, reason, view_of

SIGMOID_ADD, FULL = 2, 2


@settings(max_examples=300)
@given(STATES, CONFIGS)
def test_masks_are_the_plain_reading_of_the_rules(rows: list[Row], config: RulesConfig) -> None:
    assume(all(any(slot.enabled for slot in row) for row in rows))
    masks = build_masks(view_of(rows), config)
    assert masks.rows == len(rows)
    for r, row in enumerate(rows):
        for op in LifecycleOp:
            legal = [reason(row, s, op, config) is Refusal.NONE for s in range(len(row))]
            assert masks.slot_by_op[r, op].tolist() == legal
            assert bool(masks.op[r, op]) == any(legal)
        fits = [[False, *slot.fits[1:]] for slot in row]
        assert masks.blueprint_by_slot[r].tolist() == fits

        shaping = bool(
            masks.op[r, LifecycleOp.GERMINATE] or masks.op[r, LifecycleOp.SET_ALPHA_TARGET]
        )
        assert masks.style[r].tolist() == [shaping or i == SIGMOID_ADD for i in range(4)]
        assert masks.alpha_target[r].tolist() == [shaping or i == FULL for i in range(3)]


@given(STATES, CONFIGS)
def test_every_row_can_always_do_something(rows: list[Row], config: RulesConfig) -> None:
    assume(all(any(slot.enabled for slot in row) for row in rows))
    masks = build_masks(view_of(rows), config)
    assert bool(masks.op[:, LifecycleOp.WAIT].all())
    for head in ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve", "op"):
        mask = getattr(masks, head)
        assert mask.dtype == torch.bool
        assert mask.shape == (len(rows), HEAD_SIZES[head])
        assert bool(mask.any(-1).all())
    # A slot where a seed may start has a seed to start.
    germinable = masks.slot_by_op[:, LifecycleOp.GERMINATE]
    assert bool(masks.blueprint_by_slot.any(-1)[germinable].all())


def test_tempo_speed_and_curve_are_always_free() -> None:
    masks = build_masks(view_of([[Slot(SeedStage.FOSSILIZED)]]), RulesConfig())
    assert bool(masks.tempo.all() & masks.alpha_speed.all() & masks.alpha_curve.all())


def test_rows_do_not_influence_each_other() -> None:
    shaping, idle = [Slot()], [Slot(SeedStage.FOSSILIZED)]
    together = build_masks(view_of([shaping, idle]), RulesConfig())
    for index, row in enumerate((shaping, idle)):
        alone = build_masks(view_of([row]), RulesConfig())
        for field in dataclasses.fields(Masks):
            mask = getattr(together, field.name)[index]
            assert torch.equal(mask, getattr(alone, field.name)[0])


def test_a_row_without_an_enabled_slot_is_refused_by_number() -> None:
    rows = [[Slot(), Slot()], [Slot(enabled=False), Slot(enabled=False)]]
    with pytest.raises(EmptyMaskError, match="row 1 has no enabled slot"):
        build_masks(view_of(rows), RulesConfig())
