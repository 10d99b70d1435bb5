from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from esper.leyline.actions import HEAD_SIZES, LifecycleOp
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import EmptyMaskError
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers.baselines import RandomController
from esper.testing.controllers import BLUEPRINTS_BY_TOPOLOGY, random_signals
from tests.tamiyo.controllers.scenes import CONTEXT, Scene, Slot, join_rows, take_rows

# Chi-square values that a uniform draw exceeds once in ten thousand, by degrees of freedom.
CRITICAL = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9}

SCENE = Scene(
    slots=[
        Slot(),
        Slot(stage=SeedStage.BLENDING, alpha=1.0, target=1.0),
        Slot(stage=SeedStage.HOLDING, alpha=1.0, target=1.0),
        Slot(),
    ]
)
"""Here every op is legal."""


def repeat(scene: Scene, rows: int) -> tuple[Signals, Masks]:
    return join_rows([scene.signals()] * rows), join_rows([scene.masks()] * rows)


def chi_square(counts: Counter[int], allowed: list[int]) -> float:
    assert set(counts) <= set(allowed)
    expected = counts.total() / len(allowed)
    return sum((counts[value] - expected) ** 2 / expected for value in allowed)


@pytest.fixture(scope="module")
def draws() -> dict[str, torch.Tensor]:
    """Many independent draws in one situation: 400 rows times 20 steps."""
    controller = RandomController.build(None, replace(CONTEXT, seed=3))
    controller.reset(400, "cpu")
    signals, masks = repeat(SCENE, 400)
    steps = [controller.act(signals, masks) for _ in range(20)]
    return {head: torch.cat([step[head] for step in steps]) for head in steps[0]}


def assert_uniform(values: torch.Tensor, allowed: list[int]) -> None:
    counts = Counter(values.tolist())
    if len(allowed) == 1:
        assert set(counts) == set(allowed)
        return
    assert chi_square(counts, allowed) < CRITICAL[len(allowed) - 1]


def test_ops_are_uniform(draws: dict[str, torch.Tensor]) -> None:
    assert bool(SCENE.masks().op.all())
    assert_uniform(draws["op"], [int(op) for op in LifecycleOp])


@pytest.mark.parametrize(
    ("op", "slots"),
    [
        (LifecycleOp.GERMINATE, [0, 3]),
        (LifecycleOp.SET_ALPHA_TARGET, [1, 2]),
        (LifecycleOp.PRUNE, [1, 2]),
        (LifecycleOp.FOSSILIZE, [2]),
        (LifecycleOp.ADVANCE, [1]),
    ],
)
def test_slots_come_uniformly_from_the_row_of_the_op(
    draws: dict[str, torch.Tensor], op: LifecycleOp, slots: list[int]
) -> None:
    assert_uniform(draws["slot"][draws["op"] == int(op)], slots)


def test_the_heads_an_op_uses_are_uniform(draws: dict[str, torch.Tensor]) -> None:
    germinate = draws["op"] == int(LifecycleOp.GERMINATE)
    fitting = SCENE.masks().blueprint_by_slot[0, 0].nonzero().flatten().tolist()
    assert len(fitting) == len(BLUEPRINTS_BY_TOPOLOGY["cnn"])
    assert_uniform(draws["blueprint"][germinate], fitting)
    used = {
        LifecycleOp.GERMINATE: ("style", "tempo", "alpha_target"),
        LifecycleOp.SET_ALPHA_TARGET: ("style", "alpha_target", "alpha_speed", "alpha_curve"),
        LifecycleOp.PRUNE: ("alpha_speed", "alpha_curve"),
    }
    for op, heads in used.items():
        for head in heads:
            chosen = draws[head][draws["op"] == int(op)]
            assert_uniform(chosen, list(range(HEAD_SIZES[head])))


def test_heads_are_drawn_independently(draws: dict[str, torch.Tensor]) -> None:
    germinate = draws["op"] == int(LifecycleOp.GERMINATE)
    style, tempo = draws["style"][germinate], draws["tempo"][germinate]
    counts = torch.zeros(4, 3)
    for pair in zip(style.tolist(), tempo.tolist(), strict=True):
        counts[pair] += 1
    expected = counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / counts.sum()
    assert float(((counts - expected) ** 2 / expected).sum()) < CRITICAL[6]


def test_a_row_acts_the_same_whatever_the_number_of_rows() -> None:
    def run(rows: int) -> list[dict[str, torch.Tensor]]:
        controller = RandomController.build(None, CONTEXT)
        controller.reset(rows, "cpu")
        stream = torch.Generator().manual_seed(5)
        actions = []
        for _ in range(30):
            signals, masks = random_signals(7, 3, stream)
            few = slice(rows)
            actions.append(controller.act(take_rows(signals, few), take_rows(masks, few)))
        return actions

    few, many = run(2), run(7)
    for one, other in zip(few, many, strict=True):
        for head, values in one.items():
            assert torch.equal(values, other[head][:2])


def test_rows_steps_and_seeds_differ() -> None:
    signals, masks = repeat(SCENE, 50)

    def run(seed: int) -> list[list[int]]:
        controller = RandomController.build(None, ControllerContext(slot_names=(), seed=seed))
        controller.reset(50, "cpu")
        return [controller.act(signals, masks)["op"].tolist() for _ in range(2)]

    first, second = run(0)
    assert len(set(first)) > 1
    assert first != second
    assert run(0) == [first, second]
    assert run(1)[0] != first


def test_state_is_the_number_of_steps() -> None:
    controller = RandomController()
    controller.reset(1, "cpu")
    SCENE.act(controller)
    assert controller.state_dict() == {"step": 1}
    controller.reset(1, "cpu")
    assert controller.state_dict() == {"step": 0}


def test_an_empty_mask_is_an_error() -> None:
    signals, masks = SCENE.signals(), SCENE.masks()
    empty = replace(masks, op=torch.zeros_like(masks.op))
    with pytest.raises(EmptyMaskError, match="row 0 allows no choice of 'op'"):
        RandomController().act(signals, empty)
