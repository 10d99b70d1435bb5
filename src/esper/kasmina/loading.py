"""A saved garden, rebuilt around a fresh model of the same architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper.kasmina.garden import Garden, GardenConfig
from esper.kasmina.snapshots import read_garden
from esper.leyline.errors import CheckpointError


def load_garden(folder: str | Path, *, model: nn.Module, example_input: Any = None) -> Garden:
    """Rebuild a saved garden around a fresh model of the same architecture.

    The example input is needed only where the model takes anything but one float tensor.
    """
    state, meta = read_garden(folder)
    if example_input is None:
        if meta["example_shape"] is None:
            raise CheckpointError(
                f"{folder}: this garden's model does not take one float tensor; "
                "pass example_input as when it was made"
            )
        like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        example_input = torch.zeros(meta["example_shape"], dtype=like.dtype, device=like.device)
    config = GardenConfig.from_mapping(meta["config"])
    garden = Garden(model, meta["slot_paths"], example_input, config=config)
    try:
        garden.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}: the model does not match the saved one: {reason}"
        ) from None
    return garden
