from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES, HEAD_SIZES, NUM_OPS, LifecycleOp
from esper.leyline.errors import UsageError
from esper.leyline.slots import NOOP, NUM_BLUEPRINTS
from esper.tamiyo.controllers.registry import head_mask
from esper.tamiyo.networks.decision import NUM_HEADS, HeadTable
from tests.tamiyo.networks.situations import random_masks


@pytest.fixture
def table() -> HeadTable:
    return HeadTable(HEAD_SIZES)


def test_logits_lie_where_their_head_is(table: HeadTable) -> None:
    total = sum(HEAD_SIZES.values())
    logits = torch.arange(float(total)).expand(2, total)
    parts = dict(zip(HEAD_NAMES, logits.split(list(HEAD_SIZES.values()), -1), strict=True))
    rectangle = table.head_logits(logits)
    assert rectangle.shape == (2, NUM_HEADS, NUM_BLUEPRINTS)
    for index, head in enumerate(HEAD_NAMES):
        assert torch.equal(rectangle[:, index, : HEAD_SIZES[head]], parts[head])
    rows = table.row_logits(logits)
    assert rows.shape == (2, NUM_OPS + 3 + 1 + 6, NUM_BLUEPRINTS)
    for row, index in enumerate(table.row_heads.tolist()):
        head = HEAD_NAMES[index]
        assert torch.equal(rows[:, row, : HEAD_SIZES[head]], parts[head])


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_logits_of_every_condition_lie_side_by_side(slots: int) -> None:
    sizes = {**HEAD_SIZES, "slot": slots}
    table = HeadTable(sizes, by_slot=True)
    shapes = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
    counts = [(head, slots) for head in shapes]
    parts = [("slot", NUM_OPS), ("blueprint", slots + 1), *counts, ("op", 1)]
    total = sum(sizes[head] * count for head, count in parts)
    logits = torch.arange(float(total)).expand(2, total)
    rows = table.row_logits(logits)
    assert rows.shape == (2, table.num_rows, table.width)
    start, row = 0, 0
    for head, count in parts:
        for condition in range(count):
            own = logits[:, start : start + sizes[head]]
            assert torch.equal(rows[:, row, : sizes[head]], own)
            if head in shapes:
                taken = torch.tensor([int(LifecycleOp.GERMINATE)]), torch.tensor([condition])
                assert int(table.rows_of(*taken)[0, HEAD_NAMES.index(head)]) == row
            start, row = start + sizes[head], row + 1
    assert torch.equal(table.op_logits(logits), logits[:, -NUM_OPS:])


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("slots", [1, 3, 8, 17])
def test_every_choice_selects_the_mask_the_rules_give(slots: int, by_slot: bool) -> None:
    sizes = {**HEAD_SIZES, "slot": slots}
    table = HeadTable(sizes, by_slot=by_slot)
    masks = random_masks(12, slots, seed=slots)
    rows = table.row_masks(masks, (12,))
    for op in LifecycleOp:
        for slot in range(slots):
            index = table.rows_of(torch.full((12,), int(op)), torch.full((12,), slot))
            chosen = table.select(rows, index)
            for row in range(12):
                for at, head in enumerate(HEAD_NAMES):
                    if head == "blueprint" and op != LifecycleOp.GERMINATE:
                        continue
                    wanted = head_mask(masks, row, head, op, slot)
                    assert torch.equal(chosen[row, at, : sizes[head]], wanted)
                    assert not chosen[row, at, sizes[head] :].any()


def test_idle_heads_have_their_base_mask(table: HeadTable) -> None:
    masks = random_masks(60)
    actions = torch.zeros(60, NUM_HEADS, dtype=torch.int64)
    waiting = table.head_masks(masks, actions)
    for row in range(60):
        enabled = masks.slot_by_op[row, LifecycleOp.WAIT]
        fitting = masks.blueprint_by_slot[row, enabled].any(0)
        idle = {"slot": enabled, "blueprint": fitting}
        for at, head in enumerate(HEAD_NAMES):
            wanted = idle[head] if head in idle else getattr(masks, head)[row]
            expected = wanted.nonzero().flatten().tolist() or [NOOP]
            assert waiting[row, at].nonzero().flatten().tolist() == expected, head


def test_where_nothing_fits_the_idle_blueprint_is_noop(table: HeadTable) -> None:
    masks = random_masks(5)
    masks.blueprint_by_slot.fill_(False)
    waiting = table.head_masks(masks, torch.zeros(5, NUM_HEADS, dtype=torch.int64))
    blueprint = HEAD_NAMES.index("blueprint")
    assert waiting[:, blueprint].nonzero()[:, 1].tolist() == [NOOP] * 5


def test_without_masks_everything_but_noop_is_legal(table: HeadTable) -> None:
    rows = table.row_masks(None, (4,))
    counts = rows[0].sum(-1)
    for row, index in enumerate(table.row_heads.tolist()):
        head = HEAD_NAMES[index]
        assert counts[row] == HEAD_SIZES[head] - (head == "blueprint")


def test_fewer_slots_and_blueprints_are_padded() -> None:
    table = HeadTable({**HEAD_SIZES, "slot": 8, "blueprint": 16})
    masks = random_masks(6, 2)
    rows = table.row_masks(masks, (6,))
    assert torch.equal(rows[:, :NUM_OPS, :2], masks.slot_by_op)
    assert not rows[:, :NUM_OPS, 2:].any()
    assert torch.equal(rows[:, NUM_OPS : NUM_OPS + 2, :NUM_BLUEPRINTS], masks.blueprint_by_slot)
    assert not rows[:, NUM_OPS : NUM_OPS + 8, NUM_BLUEPRINTS:].any()


def test_masks_by_head_spread_to_every_condition(table: HeadTable) -> None:
    by_head: dict[str, Tensor] = {
        head: torch.rand(4, size) < 0.7 for head, size in HEAD_SIZES.items()
    }
    rows = table.row_masks(by_head, (4,))
    for op in range(NUM_OPS):
        assert torch.equal(rows[:, op, :3], by_head["slot"])
    for slot in range(3):
        assert torch.equal(rows[:, NUM_OPS + slot], by_head["blueprint"])
    rectangle = table.head_masks(by_head, torch.zeros(4, NUM_HEADS, dtype=torch.int64))
    spread = table.row_masks(rectangle, (4,))
    assert torch.equal(spread[:, :NUM_OPS], rows[:, :NUM_OPS])


def test_mistakes_are_named(table: HeadTable) -> None:
    masks = random_masks(4)
    with pytest.raises(UsageError, match=r"must be \[5, 6, 3\]"):
        table.row_masks(masks, (5,))
    with pytest.raises(UsageError, match="'slot_by_op' must be"):
        table.row_masks(random_masks(4, 5), (4,))
    mapping = {head: torch.ones(4, size, dtype=torch.bool) for head, size in HEAD_SIZES.items()}
    with pytest.raises(UsageError, match=r"mask of 'tempo' must be \[4, 3\], got \[4, 2\]"):
        table.row_masks({**mapping, "tempo": mapping["tempo"][:, :2]}, (4,))
    del mapping["style"]
    with pytest.raises(UsageError, match="the masks have no head 'style'"):
        table.row_masks(mapping, (4,))
    with pytest.raises(UsageError, match="rows and choices last"):
        table.row_masks(torch.ones(4, 5, 6, dtype=torch.bool), (4,))


def test_actions_are_packed_in_order(table: HeadTable) -> None:
    actions = {head: torch.full((2, 3), index) for index, head in enumerate(HEAD_NAMES)}
    packed = table.pack(actions)
    assert packed.shape == (2, 3, 8)
    assert packed[0, 0].tolist() == list(range(8))
    assert table.pack(packed) is packed
