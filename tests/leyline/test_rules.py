from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import assume, given, settings

from esper.leyline.actions import HEAD_SIZES, LifecycleOp
from esper.leyline.errors import ConfigError, EmptyMaskError
from esper.leyline.rules import (
    Masks,
    Refusal,
    RulesConfig,
    allows,
    build_masks,
    is_in,
    refusals,
    selectable,
)
from esper.leyline.stages import AlphaMode, SeedStage
from tests.leyline.legality import CONFIGS, STATES, Row, Slot, reason, view_of

EMPTY = Slot()
COOLING = Slot(SeedStage.EMBARGOED)
BLENDING = Slot(SeedStage.BLENDING)
HOLDING = Slot(SeedStage.HOLDING)
FOSSIL = Slot(SeedStage.FOSSILIZED)
COPIES = Slot(SeedStage.BLENDING, copies=1)
GERMINATE, ADVANCE = LifecycleOp.GERMINATE, LifecycleOp.ADVANCE
RETARGET, PRUNE = LifecycleOp.SET_ALPHA_TARGET, LifecycleOp.PRUNE
FOSSILIZE, WAIT = LifecycleOp.FOSSILIZE, LifecycleOp.WAIT

OF_ARGUMENTS = {Refusal.BLUEPRINT_DOES_NOT_FIT, Refusal.BAD_ARGUMENT}
"""Reasons about what an operation is given, which whoever carries it out finds."""

# Operation, the row, the constants, and what slot 0 answers.
CASES: list[tuple[LifecycleOp, Row, dict[str, int | bool], Refusal]] = [
    (WAIT, [EMPTY], {}, Refusal.NONE),
    (WAIT, [Slot(enabled=False), EMPTY], {}, Refusal.SLOT_DISABLED),
    (GERMINATE, [EMPTY], {}, Refusal.NONE),
    (GERMINATE, [Slot(SeedStage.UNKNOWN)], {}, Refusal.NONE),
    (GERMINATE, [Slot(enabled=False)], {}, Refusal.SLOT_DISABLED),
    (GERMINATE, [COOLING], {}, Refusal.SLOT_COOLING),
    (GERMINATE, [HOLDING], {}, Refusal.SLOT_OCCUPIED),
    (GERMINATE, [FOSSIL], {}, Refusal.SLOT_OCCUPIED),
    (GERMINATE, [EMPTY, Slot(SeedStage.GERMINATED)], {}, Refusal.DEVELOPMENT_RUNNING),
    (GERMINATE, [EMPTY, Slot(SeedStage.TRAINING)], {}, Refusal.DEVELOPMENT_RUNNING),
    (GERMINATE, [EMPTY, Slot(SeedStage.PRUNED)], {}, Refusal.DEVELOPMENT_RUNNING),
    (GERMINATE, [EMPTY, COOLING], {}, Refusal.DEVELOPMENT_RUNNING),
    (GERMINATE, [EMPTY, Slot(SeedStage.RESETTING)], {}, Refusal.DEVELOPMENT_RUNNING),
    (GERMINATE, [EMPTY, Slot(SeedStage.TRAINING, enabled=False)], {}, Refusal.NONE),
    (GERMINATE, [EMPTY, BLENDING, HOLDING, FOSSIL], {}, Refusal.NONE),
    (GERMINATE, [EMPTY, BLENDING, FOSSIL], {"max_seeds": 2}, Refusal.SEED_LIMIT),
    (GERMINATE, [EMPTY, BLENDING, FOSSIL], {"max_seeds": 3}, Refusal.NONE),
    (GERMINATE, [Slot(fits=(False,) * 4)], {}, Refusal.NOTHING_FITS),
    (GERMINATE, [Slot(fits=(True, False, False, False))], {}, Refusal.NOTHING_FITS),
    (GERMINATE, [Slot(SeedStage.HOLDING, copies=3), COPIES, FOSSIL], {}, Refusal.NONE),
    (GERMINATE, [COPIES, FOSSIL], {"max_seeds": 1}, Refusal.NONE),
    (GERMINATE, [COPIES], {"max_copies": 2}, Refusal.COPY_LIMIT),
    (GERMINATE, [COPIES], {"max_copies": 3}, Refusal.NONE),
    (GERMINATE, [COPIES], {"min_prune_age": 11}, Refusal.TOO_YOUNG),
    (GERMINATE, [COPIES, COOLING], {}, Refusal.DEVELOPMENT_RUNNING),
    (GERMINATE, [Slot(SeedStage.FOSSILIZED, copies=1)], {}, Refusal.SLOT_OCCUPIED),
    (GERMINATE, [Slot(SeedStage.TRAINING, copies=1)], {}, Refusal.SLOT_OCCUPIED),
    (GERMINATE, [Slot(SeedStage.BLENDING, AlphaMode.DOWN, copies=1)], {}, Refusal.SLOT_OCCUPIED),
    (ADVANCE, [Slot(SeedStage.GERMINATED)], {}, Refusal.NONE),
    (ADVANCE, [Slot(SeedStage.TRAINING)], {}, Refusal.NONE),
    (ADVANCE, [Slot(SeedStage.BLENDING, AlphaMode.UP)], {}, Refusal.NONE),
    (ADVANCE, [EMPTY], {}, Refusal.SLOT_EMPTY),
    (ADVANCE, [HOLDING], {}, Refusal.STAGE_HAS_NO_NEXT),
    (ADVANCE, [FOSSIL], {}, Refusal.FOSSILIZED),
    (ADVANCE, [COOLING], {}, Refusal.SLOT_COOLING),
    (ADVANCE, [BLENDING], {"advance_allowed": False}, Refusal.ADVANCE_DISABLED),
    (RETARGET, [BLENDING], {}, Refusal.NONE),
    (RETARGET, [HOLDING], {}, Refusal.NONE),
    (RETARGET, [Slot(SeedStage.BLENDING, AlphaMode.DOWN)], {}, Refusal.ALPHA_MOVING),
    (RETARGET, [Slot(SeedStage.TRAINING)], {}, Refusal.NOT_BLENDED),
    (RETARGET, [FOSSIL], {}, Refusal.FOSSILIZED),
    (PRUNE, [Slot(SeedStage.GERMINATED, age=1)], {}, Refusal.NONE),
    (PRUNE, [Slot(SeedStage.GERMINATED, age=0)], {}, Refusal.TOO_YOUNG),
    (PRUNE, [Slot(SeedStage.TRAINING, age=4)], {"min_prune_age": 5}, Refusal.TOO_YOUNG),
    (PRUNE, [Slot(SeedStage.TRAINING, age=5)], {"min_prune_age": 5}, Refusal.NONE),
    (PRUNE, [Slot(SeedStage.BLENDING, AlphaMode.UP)], {}, Refusal.ALPHA_MOVING),
    (PRUNE, [HOLDING], {}, Refusal.NONE),
    (PRUNE, [FOSSIL], {}, Refusal.FOSSILIZED),
    (PRUNE, [Slot(SeedStage.PRUNED)], {}, Refusal.SLOT_COOLING),
    (FOSSILIZE, [HOLDING], {}, Refusal.NONE),
    (FOSSILIZE, [BLENDING], {}, Refusal.NOT_HOLDING),
    (FOSSILIZE, [FOSSIL], {}, Refusal.FOSSILIZED),
    (FOSSILIZE, [EMPTY], {}, Refusal.SLOT_EMPTY),
]


@pytest.mark.parametrize(("op", "row", "constants", "expected"), CASES)
def test_every_rule_by_example(
    op: LifecycleOp, row: Row, constants: dict[str, int | bool], expected: Refusal
) -> None:
    config = RulesConfig.from_mapping(constants)
    code = refusals(view_of([row]), config)[0, op, 0]
    assert Refusal(int(code)) is expected
    assert reason(row, 0, op, config) is expected


def test_the_examples_show_every_reason() -> None:
    assert {expected for *_, expected in CASES} == set(Refusal) - OF_ARGUMENTS


@pytest.mark.parametrize(
    ("op", "row", "expected"),
    [
        (GERMINATE, [Slot(SeedStage.PRUNED, enabled=False)], Refusal.SLOT_DISABLED),
        (GERMINATE, [Slot(SeedStage.TRAINING)], Refusal.SLOT_OCCUPIED),
        (GERMINATE, [Slot(SeedStage.RESETTING)], Refusal.SLOT_COOLING),
        (GERMINATE, [EMPTY, Slot(SeedStage.TRAINING)], Refusal.DEVELOPMENT_RUNNING),
        (GERMINATE, [Slot(fits=(False,) * 4), FOSSIL], Refusal.SEED_LIMIT),
        (GERMINATE, [Slot(SeedStage.HOLDING, age=0, copies=7)], Refusal.COPY_LIMIT),
        (GERMINATE, [Slot(SeedStage.HOLDING, age=0, copies=1), COOLING], Refusal.TOO_YOUNG),
        (PRUNE, [Slot(SeedStage.BLENDING, AlphaMode.UP, age=0)], Refusal.TOO_YOUNG),
        (PRUNE, [Slot(SeedStage.FOSSILIZED, AlphaMode.UP, age=0)], Refusal.FOSSILIZED),
        (RETARGET, [Slot(SeedStage.TRAINING, AlphaMode.UP)], Refusal.NOT_BLENDED),
        (ADVANCE, [FOSSIL], Refusal.ADVANCE_DISABLED),
        (ADVANCE, [EMPTY], Refusal.SLOT_EMPTY),
    ],
)
def test_the_earlier_of_two_reasons_wins(op: LifecycleOp, row: Row, expected: Refusal) -> None:
    config = RulesConfig(max_seeds=1, advance_allowed=False)
    assert Refusal(int(refusals(view_of([row]), config)[0, op, 0])) is expected


@settings(max_examples=400)
@given(STATES, CONFIGS)
def test_agrees_with_the_plain_reading_in_every_state(rows: list[Row], config: RulesConfig) -> None:
    codes = refusals(view_of(rows), config)
    assert codes.dtype == torch.int64
    assert codes.shape == (len(rows), len(LifecycleOp), len(rows[0]))
    expected = [
        [[reason(row, s, op, config) for s in range(len(row))] for op in LifecycleOp]
        for row in rows
    ]
    assert codes.tolist() == expected


@given(STATES, CONFIGS)
def test_asking_changes_nothing(rows: list[Row], config: RulesConfig) -> None:
    view, untouched = view_of(rows), view_of(rows)
    refusals(view, config)
    for name in ("stage", "alpha_mode", "age", "enabled", "fits"):
        assert torch.equal(getattr(view, name), getattr(untouched, name))


@pytest.mark.parametrize("stranger", [5, -1, 11])
def test_nothing_is_legal_in_a_stage_that_does_not_exist(stranger: int) -> None:
    view = view_of([[HOLDING]])
    view.stage[:] = stranger
    legal = refusals(view, RulesConfig())[0, :, 0] == 0
    assert legal.nonzero().flatten().tolist() == [LifecycleOp.WAIT]


def test_no_rows_are_no_trouble() -> None:
    view = view_of([[EMPTY, EMPTY]])
    none = type(view)(
        **{field.name: getattr(view, field.name)[:0] for field in dataclasses.fields(view)},
    )
    assert refusals(none, RulesConfig(max_seeds=1)).shape == (0, 6, 2)


def test_every_code_has_a_text_of_its_own() -> None:
    texts = [refusal.text for refusal in Refusal]
    assert len(set(texts)) == len(Refusal)
    assert all(text and "\n" not in text for text in texts)


def test_codes_are_fixed_because_runs_store_them() -> None:
    assert Refusal.NONE == 0
    assert [int(refusal) for refusal in Refusal] == list(range(18))


def test_is_in() -> None:
    stage = torch.tensor([[1, 4], [6, 10]])
    found = is_in(stage, (SeedStage.BLENDING, SeedStage.RESETTING))
    assert found.tolist() == [[False, True], [False, True]]
    assert not is_in(stage, ()).any()


def test_selectable_removes_noop_from_a_copy() -> None:
    fits = torch.ones(1, 2, 3, dtype=torch.bool)
    assert selectable(fits).tolist() == [[[False, True, True]] * 2]
    assert bool(fits.all())


def test_defaults_are_the_documents() -> None:
    documents = RulesConfig(max_seeds=0, min_prune_age=1, advance_allowed=True)
    assert RulesConfig() == documents.replace(max_copies=7)


def test_negative_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"RulesConfig\.max_seeds must be at least 0"):
        RulesConfig(max_seeds=-1)


@settings(max_examples=300)
@given(STATES, CONFIGS)
def test_masks_are_the_plain_reading_of_the_rules(rows: list[Row], config: RulesConfig) -> None:
    assume(all(any(slot.enabled for slot in row) for row in rows))
    masks = build_masks(view_of(rows), config)
    assert masks.rows == len(rows)
    legal = [
        [
            [reason(row, s, op, config) is Refusal.NONE for s in range(len(row))]
            for op in LifecycleOp
        ]
        for row in rows
    ]
    assert masks.slot_by_op.tolist() == legal
    assert masks.op.tolist() == [[any(slots) for slots in ops] for ops in legal]
    fits = [[[False, *slot.fits[1:]] for slot in row] for row in rows]
    assert masks.blueprint_by_slot.tolist() == fits
    # What no legal op uses is masked once the op is chosen, not before: entropy needs every step.
    for head in ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve"):
        assert bool(getattr(masks, head).all()), head


@settings(max_examples=100)
@given(STATES, CONFIGS)
def test_an_action_is_allowed_exactly_where_no_reason_forbids_it(
    rows: list[Row], config: RulesConfig
) -> None:
    assume(all(any(slot.enabled for slot in row) for row in rows))
    asked = list(itertools.product(LifecycleOp, range(-1, len(rows[0]) + 1), (-1, 0, 1, 3, 4)))
    # Every row is asked everything at once.
    masks = build_masks(view_of([row for row in rows for _ in asked]), config)
    found = allows(masks, *torch.tensor(asked).repeat(len(rows), 1).unbind(1)).tolist()
    expected = []
    for row in rows:
        for op, slot, blueprint in asked:
            legal = 0 <= slot < len(row) and reason(row, slot, op, config) is Refusal.NONE
            if op is GERMINATE:
                legal = legal and blueprint in (1, 3) and row[slot].fits[blueprint]
            expected.append(legal or op is LifecycleOp.WAIT)
    assert found == expected


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
