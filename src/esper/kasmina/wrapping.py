"""Guards around the model inside a garden: refuse to save or wrap it without its seeds.

Seeds live in the garden, not in the model. So a `state_dict` of the model alone is not the network:
it would load without an error and compute something else. The same holds for wrappers that are
given the model instead of its garden.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from esper.kasmina.slot import Slot
from esper.kasmina.slots.probe import pass_whole_batches
from esper.leyline.errors import SlotError, UsageError, describe_no_module

if TYPE_CHECKING:
    from esper.kasmina.garden import Garden
    from esper.kasmina.optimizer import CarriedOptimizer


class WholeSave:
    """Flag: the whole garden is being saved, so guards let its modules through."""

    def __init__(self) -> None:
        """Start with the guards on."""
        self.is_entered = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Switch the guards off within the block."""
        before, self.is_entered = self.is_entered, True
        try:
            yield
        finally:
            self.is_entered = before


class Guard:
    """A `state_dict` pre-hook of one module of the model: refuses to save it without its seeds."""

    def __init__(self, whole: WholeSave, slots: list[Slot]) -> None:
        """Guard the slots at or below the module."""
        self._whole_save = whole
        self._slots = slots

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse a state_dict that lacks the seeds, unless the whole garden is saved."""
        grown = [slot.name for slot in self._slots if slot.seed is not None]
        if grown and not self._whole_save.is_entered:
            raise SlotError(
                f"the weights of the {type(module).__name__} inside a garden are not the grown "
                f"network: seeds at {', '.join(grown)} would be left behind; save the garden "
                "(garden.state_dict(), garden.save(folder)) or a plain copy (garden.bake())"
            )


_PRINTED = "extra_repr"


class PrintedSeed:
    """An `extra_repr` that adds the seed behind a submodule to its printed line."""

    def __init__(self, module: nn.Module, slot: Slot) -> None:
        """Print the seed of this slot with this module."""
        self._module = module
        self._slot = slot

    def __call__(self) -> str:
        """Return the extra line of the module; without a seed its own alone."""
        own = type(self._module).extra_repr(self._module)
        return ", ".join(filter(None, (own, self._slot.describe_seed())))


def connect(model: nn.Module, slots: dict[str, Slot], whole: WholeSave) -> None:
    """Register slots, by path, as forward hooks, and guards on every module around them."""
    for path, slot in slots.items():
        part = model.get_submodule(path)
        part.register_forward_hook(slot.attend, with_kwargs=True)
        # An owner's own line on this very object stays.
        if _PRINTED not in part.__dict__:
            part.__dict__[_PRINTED] = PrintedSeed(part, slot)
        pass_whole_batches(map(model.get_submodule, _upwards(path.rpartition(".")[0])))
    for name in dict.fromkeys(part for path in slots for part in _upwards(path)):
        below = [
            slot for path, slot in slots.items() if not name or f"{path}.".startswith(f"{name}.")
        ]
        module = model.get_submodule(name)
        module.register_state_dict_pre_hook(Guard(whole, below))


def disconnect(model: nn.Module) -> None:
    """Remove every slot and every guard from a model."""
    for module in model.modules():
        if isinstance(module.__dict__.get(_PRINTED), PrintedSeed):
            del module.__dict__[_PRINTED]
        for hooks, kind in _hooks_of(module):
            for key in [key for key, hook in hooks.items() if isinstance(_owner(hook), kind)]:
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)


def machinery_of(model: nn.Module) -> list[Slot | Guard]:
    """Return the slots and guards registered on a model or its parts."""
    return [
        _owner(hook)
        for module in model.modules()
        for hooks, kind in _hooks_of(module)
        for hook in hooks.values()
        if isinstance(_owner(hook), kind)
    ]


def slots_behind(model: nn.Module) -> list[Slot]:
    """Return the slots of gardens behind submodules of this model."""
    return [one for one in machinery_of(model) if isinstance(one, Slot)]


def _hooks_of(module: nn.Module) -> tuple[tuple[dict[int, Any], type], ...]:
    """Return the hooks of one module, each dict with the class to look for."""
    return (module._forward_hooks, Slot), (module._state_dict_pre_hooks, Guard)


def _owner(hook: Any) -> Any:
    return getattr(hook, "__self__", hook)


def _upwards(path: str) -> Iterator[str]:
    """Yield a dotted name and the names of its parents, the model itself last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


# ---- Wrappers of PyTorch around a garden: data parallelism, averages of weights


_FSDP = "torch.distributed.fsdp"
_SHARDED = {"FSDPModule": "FSDP2 (fully_shard)", "FullyShardedDataParallel": "FSDP"}
"""Classes that shard parameters over processes, with their common names."""


def refuse_adapted(model: nn.Module) -> None:
    """Refuse a model with adapters of its weights, which only the user's own loop can place."""
    # By name, because adapters are a layer above this one.
    if any(type(one).__module__.startswith("esper.growth.adapters") for one in model.modules()):
        raise SlotError(
            "the model has adapters of esper.Adapt, beside which no seed can grow; call "
            "adapters.bake() first"
        )


def refuse_unsuitable(model: nn.Module) -> None:
    """Refuse what is no module, adapted, broken, sharded, scripted, or grows in another garden."""
    if not isinstance(model, nn.Module):
        raise UsageError(describe_no_module(model))
    refuse_adapted(model)
    _refuse_non_finite(model)
    for name, module in model.named_modules():
        told = f"{name!r} of the model" if name else "the model"
        # By name: to import these classes takes longer than to build most models.
        kinds = [k for k in type(module).__mro__ if k.__module__.startswith(_FSDP)]
        known = [_SHARDED[kind.__name__] for kind in kinds if kind.__name__ in _SHARDED]
        if known:
            raise UsageError(
                f"{told} is sharded by {known[0]}, in which no seed can grow; give the model "
                "before it is sharded, and train it in one process or wrap its Garden in "
                "DistributedDataParallel"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{told} is compiled by TorchScript (torch.jit), in which no seed can grow; give "
                "the nn.Module that it was made of"
            )
    if any(slot.seed is not None for slot in slots_behind(model)):
        raise SlotError(
            "the model already grows: seeds of an earlier run or Garden are active in it; build "
            "the model anew, or give its plain copy, grown.bake() or garden.bake()"
        )


def _refuse_non_finite(model: nn.Module) -> None:
    """Refuse weights that no training can mend."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            continue
        if not bool(torch.isfinite(parameter.detach()).all()):
            count = int((~torch.isfinite(parameter.detach())).sum())
            raise UsageError(
                f"{count:,} of {parameter.numel():,} values of the parameter {name!r} are not "
                "finite before training; build the model anew, or load other weights"
            )


def watch(kind: type[Garden]) -> None:
    """Call `_wrap` whenever a garden is put into a DDP wrapper or an average of weights."""

    def notice(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(parent, DistributedDataParallel | AveragedModel) and child is not None:
            _wrap(parent, child, [one for one in child.modules() if isinstance(one, kind)])

    register_module_module_registration_hook(notice)


def _wrap(parent: nn.Module, child: nn.Module, gardens: list[Garden]) -> None:
    """Bind a new wrapper to the gardens in it, or refuse it."""
    inside = {id(slot) for garden in gardens for slot in garden.seedbed}
    if any(id(slot) not in inside for slot in slots_behind(child)):
        raise SlotError(
            f"{type(parent).__name__} was given a model that grows in a garden, without the "
            "garden; wrap the garden instead"
        )
    if isinstance(parent, AveragedModel):
        for garden in gardens:
            if (original := garden.ties.original()) is not None:
                garden.follow(original)
        return
    assert isinstance(parent, DistributedDataParallel)
    for garden in gardens:
        if garden.config.training_mode == "shadow":
            raise UsageError(
                "training_mode='shadow' trains seeds past DistributedDataParallel; "
                "use 'straight_through' in several processes"
            )
        garden.ties.wrapper = weakref.ref(parent)
    if gardens:
        from esper.kasmina.ddp import RebuildOnGrowth

        parent.register_forward_pre_hook(RebuildOnGrowth(gardens))


def _nobody() -> None:
    """Stand in for a weak reference that was never set."""


class Ties:
    """What else depends on a garden, all held weakly; a copy of the garden has ties of its own."""

    def __init__(self) -> None:
        """Start with none."""
        self.optimizers: weakref.WeakSet[CarriedOptimizer] = weakref.WeakSet()
        """Those that let new parameters in and removed ones out."""
        self.followers: weakref.WeakSet[Garden] = weakref.WeakSet()
        """Gardens that hold the same seeds, such as an average of the weights."""
        self.mirrored: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Seeds and gates of the followed garden that this one has copies of."""
        self.original: Callable[[], Garden | None] = _nobody
        """The garden that this one was copied from, as long as it exists."""
        self.wrapper: Callable[[], DistributedDataParallel | None] = _nobody
        """The DDP wrapper that trains the garden in several processes, where there is one."""

    def reconcile(self) -> None:
        """Tell optimizers that parameters came or went."""
        for optimizer in list(self.optimizers):
            optimizer.reconcile()

    def __reduce__(self) -> tuple[type[Ties], tuple[()]]:
        return Ties, ()
