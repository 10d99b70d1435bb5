"""A garden as plain data: tensors alone, blueprints by name, slots that must agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.garden import Garden
from esper.kasmina.saving import decode_lifecycle, encode_lifecycle
from esper.kasmina.state import empty_state
from esper.leyline.errors import CheckpointError
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import Stack, bring, quick_config, stack_garden

X = torch.randn(5, 4)


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
