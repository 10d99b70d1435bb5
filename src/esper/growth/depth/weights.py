"""Weights of a finished, smaller network, from which a deeper one is grown on."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from esper.growth.depth.stacks import Stack
from esper.kasmina.snapshots import read_garden
from esper.leyline.errors import UsageError, reason_of

GROWN = "grown"
"""Folder of the finished network in a run."""

_MODEL = "model."


def read_weights(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a state_dict: the one given, or what a file or the folder of a run holds."""
    if not isinstance(source, str):
        return dict(source)
    path = Path(source)
    if os.path.isdir(path):
        place = path / GROWN if os.path.isdir(path / GROWN) else path
        state, _ = read_garden(place)
        own = {name: value for name, value in state.items() if name.startswith(_MODEL)}
        return {name.removeprefix(_MODEL): value for name, value in own.items()}
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load_file(path))
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, safetensors.SafetensorError) as error:
        raise UsageError(
            f"the weights {source} cannot be read ({reason_of(error)}); give a file of "
            "model.state_dict() by torch.save or safetensors, or the folder of a run"
        ) from None
    if not isinstance(found, Mapping) or not any(isinstance(v, Tensor) for v in found.values()):
        raise UsageError(
            f"the weights {source} are no state_dict; save one by torch.save(model.state_dict(), "
            "FILE)"
        )
    return dict(found)


def blocks_within(
    weights: Mapping[str, Any], network: nn.Module, stacks: Mapping[str, Stack]
) -> dict[str, int]:
    """Return how many blocks of every stack these weights have; one that is unclear is left out."""
    containers = [stack.container for stack in stacks.values()]
    found = {}
    for name, stack in stacks.items():
        if containers.count(stack.container) > 1:
            continue
        prefix = f"{stack.container}." if stack.container else ""
        there = {
            key.removeprefix(prefix).partition(".")[0] for key in weights if key.startswith(prefix)
        }
        children = network.get_submodule(stack.container).named_children()
        others = [c for key, c in children if f"{prefix}{key}" not in stack.blocks]
        count = len(there) - sum(bool(child.state_dict()) for child in others)
        if 1 <= count <= len(stack.blocks):
            found[name] = count
    return found


def load_weights(weights: Mapping[str, Any], network: nn.Module, told: str) -> None:
    """Load weights into a network that is as deep as they are; refuse those that do not fit.

    Args:
        weights: a state_dict.
        network: what they are for.
        told: how deep it is, for the message.
    """
    own = network.state_dict()
    for name in {**own, **weights}:
        here, there = (_shape(state.get(name)) for state in (own, weights))
        if here != there:
            raise UsageError(
                f"the weights do not fit the network with {told} awake: {name} is {there} there "
                f"and {here} here; give those of this network with as many blocks as start= says"
            )
    network.load_state_dict(dict(weights))


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else "missing" if value is None else value
