"""What a slot table says of its slots: results in words, views, and the lifecycle as plain data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import Applied, Outcome
from esper.kasmina.operations import make_command
from esper.kasmina.slot_table import (
    OperationResult,
    decode_lifecycle,
    describe_result,
    encode_lifecycle,
)
from esper.kasmina.slots.placement import Placement
from esper.kasmina.state import GateConfig, describe_failure, empty_state
from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import CheckpointError
from esper.leyline.rules import Refusal
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import Stack, bring, measure, quick_config, stack_garden
from tests.plots import record_epoch

X = torch.randn(5, 4)


def applied(outcome: Outcome, refusal: Refusal = Refusal.NONE) -> Applied:
    return Applied(torch.tensor([int(outcome)]), torch.tensor([int(refusal)]))


def describe(op: LifecycleOp, outcome: Outcome, refusal: Refusal = Refusal.NONE) -> OperationResult:
    return describe_result(
        empty_state(1, 2),
        make_command(op, 1),
        applied(outcome, refusal),
        [Placement(name, name, "BC", (2, 4), "bidirectional") for name in ("head", "stem")],
        GateConfig(),
    )


def test_what_took_effect_is_true_and_has_no_reason() -> None:
    result = describe(LifecycleOp.PRUNE, Outcome.DONE)
    assert result
    assert result.ok
    assert (result.op, result.slot, result.reason) == (LifecycleOp.PRUNE, "stem", "")


@pytest.mark.parametrize("refusal", [refusal for refusal in Refusal if refusal])
def test_every_refusal_is_said_in_words(refusal: Refusal) -> None:
    result = describe(LifecycleOp.ADVANCE, Outcome.ILLEGAL, refusal)
    assert not result
    assert result.reason == f"ADVANCE at stem: {refusal.text}"
    assert "\n" not in result.reason


@pytest.mark.parametrize("op", [LifecycleOp.GERMINATE, LifecycleOp.ADVANCE, LifecycleOp.FOSSILIZE])
def test_a_closed_gate_is_said_in_words(op: LifecycleOp) -> None:
    result = describe(op, Outcome.GATE_FAILED)
    assert not result.ok
    assert (
        result.reason
        == f"{op.name} at stem: {describe_failure(empty_state(1, 2), 1, GateConfig())}"
    )


def test_an_empty_slot() -> None:
    view = stack_garden().slots["a"]
    assert (view.name, view.axes) == ("a", "BC")
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
    assert (view.alpha, view.alpha_target) == (1.0, 1.0)
    assert view.parameters == sum(p.numel() for p in garden.slot_parameters("b"))
    assert view.contribution == 1.5
    assert view.contribution_se is None
    assert repr(view) == "<slot b: HOLDING, lora, alpha=1.00>"


def test_a_view_follows_its_garden() -> None:
    garden = stack_garden()
    view = garden.slots["a"]
    bring(garden, "a", SeedStage.TRAINING)
    record_epoch(garden, 50.0)
    assert (view.stage, view.age, view.epochs_in_stage) == (SeedStage.TRAINING, 1, 1)


def test_a_state_dict_holds_tensors_alone_and_loads_safely(tmp_path: Path) -> None:
    garden = stack_garden()
    bring(garden, "c", SeedStage.HOLDING)
    assert all(isinstance(value, Tensor) for value in garden.state_dict().values())
    torch.save(garden.state_dict(), tmp_path / "state.pt")
    fresh = stack_garden()
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(fresh(X), garden(X))


def test_blueprints_are_matched_by_name_whatever_their_ids() -> None:
    state = empty_state(1, 2).where(torch.tensor([[True, False]]), stage=4, blueprint=2)
    record = json.loads(bytes(encode_lifecycle(("a", "b"), state, 5).tolist()))
    record["blueprints"] = ["noop", "norm", "lora"]
    encoded = torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)
    decoded, germinations = decode_lifecycle(encoded, ("a", "b"))
    assert decoded.blueprint.tolist() == [[BLUEPRINTS.get("lora").id, -1]]
    assert germinations == 5


def test_other_slots_are_refused() -> None:
    garden = stack_garden()
    other = Garden(Stack(), ["a", "b"], X, config=quick_config())
    with pytest.raises(CheckpointError, match="has slots a, b, c, this one has a, b"):
        other.load_state_dict(garden.state_dict())
