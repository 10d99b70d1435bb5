"""Wrappers around a model and its optimizer: which of them blocks can sleep in, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from esper.leyline.errors import UsageError

_REFUSED = {
    "FullyShardedDataParallel": "shard it by torch.distributed.fsdp.fully_shard instead",
    "DataParallel": "wrap it in DistributedDataParallel instead",
    "DeepSpeedEngine": "train it under DistributedDataParallel or fully_shard instead",
}

_REFUSED_OPTIMIZERS = {
    "LBFGS": "it keeps one flat state for all parameters",
    "ZeroRedundancyOptimizer": "it keeps the state of a parameter in one process only",
}


def unwrapped(model: nn.Module) -> list[nn.Module]:
    """Return a model with all that it wraps, outermost first; the last is the owner's own."""
    found = [model]
    while True:
        name = type(found[-1]).__name__
        if name in _REFUSED:
            raise UsageError(f"blocks cannot sleep in a {name}; {_REFUSED[name]}")
        if isinstance(found[-1], DistributedDataParallel | AveragedModel):
            found.append(found[-1].module)
        elif isinstance(inner := getattr(found[-1], "_orig_mod", None), nn.Module):
            found.append(inner)
        else:
            return found


def inner_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return optimizers without what trainers wrap around them."""
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    found = []
    for one in given:
        # Accelerate and Lightning keep the owner's optimizer under this name.
        while isinstance(inner := getattr(one, "optimizer", None), Optimizer):
            one = inner
        if not isinstance(one, Optimizer):
            raise UsageError(
                f"an optimizer must be a torch.optim.Optimizer or several of them, got a "
                f"{type(one).__name__}"
            )
        for kind in type(one).__mro__:
            if reason := _REFUSED_OPTIMIZERS.get(kind.__name__):
                raise UsageError(f"blocks cannot be copied under {kind.__name__}: {reason}")
        found.append(one)
    return found


def check_held(names: Sequence[str], network: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that do not hold every trainable parameter of these blocks."""
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    for name in names:
        for part, parameter in network.get_submodule(name).named_parameters():
            if parameter.requires_grad and id(parameter) not in held:
                raise UsageError(
                    f"the optimizer does not hold {name}.{part}; make it from all of "
                    "model.parameters(), also those of blocks that sleep at first"
                )


class Processes:
    """The processes that train a model by `DistributedDataParallel`, kept in step with growth.

    DDP waits for the gradient of every parameter that it was made for. So while blocks sleep, their
    parameters require no gradient, and the wrapper is made anew at every growth; a wrapper that
    finds unused parameters by itself is left alone.
    """

    def __init__(self, wrappers: Sequence[nn.Module]) -> None:
        """Look for the DDP wrapper among those around the model."""
        found = [one for one in wrappers if isinstance(one, DistributedDataParallel)]
        self._wrapper = found[0] if found else None
        self._frozen: list[nn.Parameter] = []

    def follow(self, asleep: Sequence[nn.Module]) -> None:
        """Let the wrapper wait for all parameters but those of these blocks."""
        wrapper = self._wrapper
        if wrapper is None or wrapper.find_unused_parameters:
            return
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = [p for block in asleep for p in block.parameters() if p.requires_grad]
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        # Loads PyTorch's compiler, which only a wrapped model needs.
        from esper.kasmina.renewal import renew

        # Gradients that are views of the old wrapper's memory are no use to the new one.
        wrapper.zero_grad(set_to_none=True)
        renew(wrapper, find_unused_parameters=False)

    def check(self, *, is_asleep: bool) -> None:
        """Refuse to go on in a pass of a DDP wrapper that waits for gradients of sleeping blocks.

        The wrapper that was given does not, once blocks were put to sleep before the pass.
        """
        around = DistributedDataParallel._get_active_ddp_module()
        is_known = is_asleep and around is self._wrapper
        if around is not None and not is_known and not around.find_unused_parameters:
            raise UsageError(
                "the model is called by a DistributedDataParallel that would wait for sleeping "
                "blocks; give Deepen that wrapper and a batch as example=, or make the wrapper "
                "with find_unused_parameters=True"
            )


def mean_over_processes(value: torch.Tensor) -> torch.Tensor:
    """Return the mean of a number over all processes, so that all decide alike."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
        value /= world_size()
    return value


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def ancestors(names: Sequence[str]) -> Iterator[str]:
    """Yield the names of all modules around these, outermost first, the model itself as ''."""
    paths = {""} | {
        name.rsplit(".", count)[0] for name in names for count in range(1, name.count(".") + 1)
    }
    yield from sorted(paths, key=lambda path: (path.count("."), path))
