"""Rebuilding a saved garden around a fresh model; where its slots are was saved with it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from esper.kasmina.garden import Garden
from esper.kasmina.operations import GardenConfig
from esper.kasmina.saving import read_garden
from esper.kasmina.slots.placement import Placed
from esper.leyline.errors import CheckpointError, SlotError, reason_of
from esper.utils.manifest import restoring


def load_garden(folder: str | Path, *, model: nn.Module) -> Garden:
    """Rebuild a saved garden around a fresh model of the same architecture.

    The model is not run: where its slots are and what flows there was saved, whatever its inputs.
    """
    state, meta = read_garden(folder)
    with restoring(Path(folder)):
        placed = Placed.from_mapping(meta["placed"])
        config = GardenConfig.from_mapping(meta["config"])
    try:
        garden = Garden(model, placed, config=config)
        garden.load_state_dict(state)
    except SlotError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = reason_of(error)
        raise CheckpointError(
            f"{folder}: the model does not match the saved one: {reason}"
        ) from None
    return garden
