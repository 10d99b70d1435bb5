"""`check_host`: the contract of a host as a function anyone can run on a host of their own."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.hosts.registry import HOSTS, build_host, host_slots
from esper.kasmina.probe import hooked
from esper.leyline.blueprints import TOPOLOGY_BY_RANK
from esper.leyline.config import Config
from esper.leyline.errors import SlotError, UsageError
from esper.leyline.randomness import seeded


def check_host(name: str, options: Mapping[str, Any] | Config | None, example: Tensor) -> None:
    """Raise with one line if a registered host breaks the contract.

    Args:
        name: The name it is registered under.
        options: Its configuration, or plain options.
        example: A batch of two or more inputs.
    """
    with seeded(0, "check_host"):
        host = build_host(name, options)
    with seeded(0, "check_host"):
        again = build_host(name, options)
    for (path, first), second in zip(host.named_parameters(), again.parameters(), strict=True):
        if not torch.equal(first, second):
            raise UsageError(f"host {name!r}: {path} differs between two builds from one seed")
    for path, module in host.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UsageError(
                f"host {name!r}: {path} is a BatchNorm, whose statistics bias every ablation; "
                f"use GroupNorm or LayerNorm"
            )
    outputs = _check_slots(name, host, example)
    _check_gradients(name, host, outputs)
    host.eval()
    copied = copy.deepcopy(host)
    loaded = again.eval()
    loaded.load_state_dict(host.state_dict())
    with torch.no_grad():
        expected = host(example)
        for what, other in (("deepcopy", copied), ("state_dict", loaded)):
            if not torch.equal(other(example), expected):
                raise UsageError(f"host {name!r}: outputs differ after a round trip by {what}")


def _check_slots(name: str, host: nn.Module, example: Tensor) -> Tensor:
    """Run the host once and check what passes through its slots."""
    calls: Counter[str] = Counter()
    results: dict[str, object] = {}
    paths = host_slots(host)

    def watch(slot: str, module: nn.Module, inputs: Any, output: object) -> None:
        calls[slot] += 1
        results[slot] = output

    with hooked({slot: host.get_submodule(path) for slot, path in paths.items()}, watch):
        outputs = host(example)
    topology = HOSTS.get(name).topology
    for slot, path in paths.items():
        if calls[slot] != 1:
            raise SlotError(
                f"host {name!r}: {path}, at slot {slot}, ran {calls[slot]} times in one forward; "
                f"it must run exactly once"
            )
        result = results[slot]
        if not isinstance(result, Tensor) or TOPOLOGY_BY_RANK.get(result.ndim) != topology:
            shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise SlotError(
                f"host {name!r}: {path}, at slot {slot}, returns {shape}, "
                f"which does not fit the topology {topology!r}"
            )
    if not isinstance(outputs, Tensor) or len(outputs) != len(example):
        raise UsageError(f"host {name!r} must return one tensor with a row per sample")
    return outputs


def _check_gradients(name: str, host: nn.Module, outputs: Tensor) -> None:
    # Squares, because the plain sum of normalised outputs can have a gradient of zero.
    outputs.float().square().sum().backward()
    for path, parameter in host.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise UsageError(f"host {name!r}: no gradient reaches {path}; use it or remove it")
