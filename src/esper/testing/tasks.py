"""The conformance checks of hosts, tasks and families."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.hosts.registry import HOSTS, build_host, host_slots
from esper.kasmina.slots.probe import hooked
from esper.lab.tasks.family import FamilySplit, get_family
from esper.lab.tasks.member import TRAIN_SIZES, Member
from esper.lab.tasks.splits import SPLITS
from esper.lab.tasks.task import DataPath, Task, TaskConfig, get_task
from esper.leyline.config import Config
from esper.leyline.errors import SlotError, UsageError
from esper.leyline.slots import TOPOLOGY_BY_RANK
from esper.utils.randomness import seeded

# ---- Hosts


def check_host(name: str, options: Mapping[str, Any] | Config | None, example: Tensor) -> None:
    """Raise if a registered host breaks the contract.

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
    """Run the host once and check the activations at its slots."""
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
    # Squares, because the sum of normalised outputs can have a gradient of zero.
    outputs.float().square().sum().backward()
    for path, parameter in host.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise UsageError(f"host {name!r}: no gradient reaches {path}; use it or remove it")


# ---- Tasks


CHECKED_SAMPLES = 8


def check_task(name: str, data_path: DataPath | None = None) -> None:
    """Raise if a registered task breaks the contract.

    Args:
        name: The name it is registered under.
        data_path: Folder of its data; None for the usual places.
    """
    task = get_task(name)
    config = task.config
    if TaskConfig.from_mapping(config.to_mapping()) != config:
        raise UsageError(f"task {name!r}: its configuration does not survive being written down")
    check_host(config.host, config.host_options, task.example_input(2))
    first, second = task.load(data_path), task.load(data_path)
    for split in SPLITS:
        if not torch.equal(first.splits.samples[split], second.splits.samples[split]):
            raise UsageError(f"task {name!r}: two loads give different {split} splits")
    order = first.order(0, 1)
    if not torch.equal(order, second.order(0, 1)) or len(order) != config.samples_per_step:
        raise UsageError(
            f"task {name!r}: an epoch must be {config.samples_per_step} samples fixed by its keys"
        )
    x, y = first.batch("train", order[:CHECKED_SAMPLES])
    if x.dtype != task.example_input().dtype or x.shape[1:] != config.input_shape:
        raise UsageError(
            f"task {name!r}: a batch has shape {tuple(x.shape)} and type {x.dtype}, "
            f"but example_input() promises {config.input_shape} of {task.example_input().dtype}"
        )
    _check_step(task, x, y)


def _check_step(task: Task, x: torch.Tensor, y: torch.Tensor) -> None:
    """Check that the loss of a batch is finite and every parameter gets a gradient."""
    host = task.build_host(0)
    loss, correct = task.objective(host(x), y)
    if loss.shape != x.shape[:1] or not bool(loss.isfinite().all()):
        raise UsageError(f"task {task.name!r}: the objective must give one finite loss per sample")
    if (correct is None) != (task.score_kind == "negative_loss"):
        raise UsageError(f"task {task.name!r}: correctness and the kind of score do not agree")
    loss.mean().backward()
    if any(p.grad is None or not bool(p.grad.isfinite().all()) for p in host.parameters()):
        raise UsageError(f"task {task.name!r}: the loss does not reach every parameter")


# ---- Families


_DRAWN: tuple[FamilySplit, ...] = ("train", "select")
"""Splits that must have members: one to train on, one to select the best policy on."""


def check_family(name: str, data_path: DataPath | None = None) -> None:
    """Raise if a registered family breaks the contract.

    Every architecture of every split is built and checked as a host, draws are repeated, and the
    declared sizes of the training sets are compared with the data.

    Args:
        name: The name it is registered under.
        data_path: Folder of its data; None for the usual places.
    """
    family = get_family(name)
    for split in _DRAWN:
        if not family.members(split):
            raise UsageError(f"family {name!r} has no members to {split}")
        first, second = (family.draw(3, split, architectures=2, conditions=2) for _ in range(2))
        if first != second:
            raise UsageError(f"family {name!r}: two draws of {split} members by one seed differ")
    every = [member for split in (*_DRAWN, "claim") for member in family.members(split)]
    for architecture in dict.fromkeys(member.architecture for member in every):
        member = next(each for each in every if each.architecture == architecture)
        task = member.task()
        check_host(task.config.host, task.config.host_options, task.example_input(2))
    sizes = [member for member in every if isinstance(member, Member)]
    for data in dict.fromkeys(member.data for member in sizes):
        found = get_task(data).load(data_path).size("train")
        if found != TRAIN_SIZES[data]:
            raise UsageError(
                f"family {name!r}: {data} has {found:,} training images, and "
                f"esper.lab.tasks.member.TRAIN_SIZES says {TRAIN_SIZES[data]:,}"
            )
