"""A garden on disk: its lifecycle as plain data, its weights as tensors, never any code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import blueprint_names
from esper.kasmina.state import EMPTY, SlotState, empty_state
from esper.leyline.errors import CheckpointError
from esper.leyline.manifest import restoring
from esper.leyline.storage import load_tree, save_tree

KIND = "garden"
VERSION = 4


def encode_lifecycle(names: tuple[str, ...], state: SlotState, germinations: int) -> Tensor:
    """Return the lifecycle as a byte tensor, so that a state_dict holds tensors alone."""
    record = {
        "slots": list(names),
        "blueprints": list(blueprint_names()),
        "germinations": germinations,
        "state": {name: value.tolist() for name, value in state.state_dict().items()},
    }
    return torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)


def decode_lifecycle(encoded: Tensor, names: tuple[str, ...]) -> tuple[SlotState, int]:
    """Return what `encode_lifecycle` was given, for a garden with these slots.

    Blueprints are matched by name: ids of registered ones may differ between programs.
    """
    record = json.loads(bytes(encoded.tolist()).decode())
    if tuple(record["slots"]) != names:
        raise CheckpointError(
            f"the saved garden has slots {', '.join(record['slots'])}, this one has "
            f"{', '.join(names)}; wrap the model with the saved slots"
        )
    like = empty_state(1, len(names)).state_dict()
    fields = {
        name: torch.tensor(record["state"][name], dtype=like[name].dtype)
        for name in (*EMPTY, "interaction")
    }
    fields["blueprint"] = _translate(fields["blueprint"], record["blueprints"])
    return SlotState(**fields), int(record["germinations"])


def save_garden(state: Mapping[str, Any], folder: str | Path, meta: Mapping[str, Any]) -> None:
    """Write a garden's weights and lifecycle, its `state_dict`, into a folder."""
    save_tree(Path(folder), {"garden": dict(state)}, kind=KIND, version=VERSION, meta=meta)


def read_garden(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (state_dict, meta) of a saved garden after checking it."""
    tree, meta = load_tree(Path(folder), kind=KIND, version=VERSION)
    with restoring(Path(folder)):
        return dict(tree["garden"]), meta


def _translate(ids: Tensor, saved_names: list[str]) -> Tensor:
    known = blueprint_names()
    result = ids.clone()
    for position, saved in enumerate(ids.flatten().tolist()):
        if saved < 0:
            continue
        name = saved_names[saved]
        if name not in known:
            raise CheckpointError(
                f"the saved garden has grown a {name!r}, which is not registered here; "
                "import the module that registers this blueprint first"
            )
        result.view(-1)[position] = known.index(name)
    return result
