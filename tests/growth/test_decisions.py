from __future__ import annotations

import torch

from esper.growth.decisions import describe_decision, slot_records
from esper.kasmina.lifecycle import Outcome
from esper.kasmina.operations import OperationResult
from esper.leyline.actions import CAUSAL_HEADS, LifecycleOp, placeholder_actions
from tests.plots import make_garden, raise_seed


def test_a_decision_shows_the_arguments_its_op_uses_and_no_others() -> None:
    fields = {
        "slot": "slot",
        "blueprint": "blueprint",
        "style": "style",
        "tempo": "tempo",
        "alpha_target": "alpha_target",
        "alpha_speed": "alpha_speed",
        "alpha_curve": "alpha_curve",
    }
    for op in LifecycleOp:
        actions = {**placeholder_actions(1), "op": torch.tensor([int(op)])}
        result = OperationResult(op, "body", Outcome.DONE, "")
        record = describe_decision(actions, result)
        assert record.op == op.name
        assert record.outcome == "done"
        for head, field in fields.items():
            assert (getattr(record, field) is not None) == (head in CAUSAL_HEADS[op]), (op, head)


def test_indices_become_names_and_values() -> None:
    actions = {
        **placeholder_actions(1),
        "op": torch.tensor([int(LifecycleOp.GERMINATE)]),
        "blueprint": torch.tensor([1]),
        "style": torch.tensor([3]),
        "tempo": torch.tensor([2]),
        "alpha_target": torch.tensor([0]),
    }
    result = OperationResult(LifecycleOp.GERMINATE, "stem", Outcome.ILLEGAL, "because")
    record = describe_decision(actions, result)
    assert (record.slot, record.blueprint, record.style) == ("stem", "conv_light", "GATED_GATE")
    assert (record.tempo, record.alpha_target) == (8, 0.5)
    assert (record.outcome, record.reason) == ("illegal", "because")


def test_slots_are_recorded_as_they_are() -> None:
    garden = make_garden()
    raise_seed(garden, "body", "BLENDING", ticks=1, style="linear_add")
    garden.record_epoch(50.0)
    empty, grown, _ = slot_records(garden)
    assert (empty.name, empty.stage, empty.blueprint, empty.parameters) == (
        "stem",
        "DORMANT",
        None,
        0,
    )
    assert (empty.contribution, empty.contribution_se) == (None, None)
    assert (grown.stage, grown.blueprint, grown.age) == ("BLENDING", "mlp_small", 1)
    assert abs(grown.alpha - 1 / 3) < 1e-9
    assert grown.alpha_target == 1.0
    assert grown.parameters == sum(p.numel() for p in garden.slot_parameters("body"))
