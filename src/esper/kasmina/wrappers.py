"""What PyTorch wraps around a garden: data parallelism, and averages of its weights.

Both look at the parameters once, when they are made. A garden changes them later, and neither
would notice: new seeds would differ between processes, or be missing in the average, without an
error. So a garden takes notice of being wrapped (PyTorch tells when a module becomes part of
another): `DistributedDataParallel` is renewed before the first pass after a change, and the copy
inside an `AveragedModel` follows the garden it was made of: it grows as that does, with weights of
its own.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from esper.kasmina.inside import slots_behind
from esper.leyline.errors import SlotError, UsageError

if TYPE_CHECKING:
    from esper.kasmina.garden import Garden


_FSDP = "torch.distributed.fsdp"
_SHARDED = {"FSDPModule": "FSDP2 (fully_shard)", "FullyShardedDataParallel": "FSDP"}
"""Classes that spread parameters over processes, by the name that people know them by."""


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model whose parameters are spread over processes: a new seed has no place there."""
    for name, module in model.named_modules():
        # By name: to import these classes takes longer than to build most models.
        kinds = [k for k in type(module).__mro__ if k.__module__.startswith(_FSDP)]
        known = [_SHARDED[kind.__name__] for kind in kinds if kind.__name__ in _SHARDED]
        if known:
            raise UsageError(
                f"{f'{name!r} of the model' if name else 'the model'} is sharded by {known[0]}, "
                "in which no seed can grow; give the model before it is sharded, and train it "
                "in one process or wrap its Garden in DistributedDataParallel"
            )


def refuse_scripted(model: nn.Module) -> None:
    """Refuse a model that TorchScript has compiled: nothing can be put into it any more."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{f'{name!r} of the model' if name else 'the model'} is compiled by TorchScript "
                "(torch.jit), in which no seed can grow; give the nn.Module that it was made of"
            )


def watch(kind: type[Garden]) -> None:
    """From now on take notice whenever a garden is wrapped."""

    def notice(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(parent, DistributedDataParallel | AveragedModel) and child is not None:
            _wrap(parent, child, [one for one in child.modules() if isinstance(one, kind)])

    register_module_module_registration_hook(notice)


def _wrap(parent: nn.Module, child: nn.Module, gardens: list[Garden]) -> None:
    """Bind a wrapper that is being made to the gardens in it, or refuse it."""
    inside = {id(slot) for garden in gardens for slot in garden.seedbed}
    if any(id(slot) not in inside for slot in slots_behind(child)):
        raise SlotError(
            f"{type(parent).__name__} was given a model that grows in a garden, without the "
            "garden; wrap the garden instead"
        )
    if isinstance(parent, AveragedModel):
        for garden in gardens:
            if (original := garden.original) is not None:
                garden.follow(original)
        return
    assert isinstance(parent, DistributedDataParallel)
    for garden in gardens:
        if garden.config.training_mode == "shadow":
            raise UsageError(
                "training_mode='shadow' trains seeds past DistributedDataParallel; "
                "use 'straight_through' in several processes"
            )
        garden.wrap(parent)
    if gardens:
        from esper.kasmina.renewal import Renewal

        parent.register_forward_pre_hook(Renewal(gardens))


class Followers:
    """The gardens that follow one, held weakly."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self._references: list[weakref.ref[Garden]] = []

    def __iter__(self) -> Iterator[Garden]:
        found = (reference() for reference in self._references)
        return iter([garden for garden in found if garden is not None])

    def add(self, garden: Garden) -> None:
        """Let a garden follow, once."""
        others = (weakref.ref(one) for one in self if one is not garden)
        self._references = [*others, weakref.ref(garden)]


class Mirrored:
    """Which modules of the garden that is followed the copy has taken over."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known: list[weakref.ref[nn.Module]] = []

    def take_over(self, mine: nn.Module | None, theirs: nn.Module | None) -> nn.Module | None:
        """Return the copy's own module, a fresh copy where theirs is new."""
        if theirs is None:
            return None
        self._known = [reference for reference in self._known if reference() is not None]
        if mine is not None and any(reference() is theirs for reference in self._known):
            return mine
        self._known.append(weakref.ref(theirs))
        return copy.deepcopy(theirs)
