"""Sleeping blocks: a block asleep stays in place and passes its input on.

Only the block's `forward` is replaced, so parameters, names and `state_dict` keys never change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from esper.growth.depth.saving import OnSave, remove_save_hooks
from esper.kasmina.calls import Call, Source, is_plain
from esper.kasmina.optimizer import copy_state
from esper.kasmina.slots.probe import shapes_of
from esper.leyline.errors import UsageError

# ---- Wrappers around a model and its optimizer


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
    """Return a model and all that it wraps, outermost first; the last is the user's own."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model must be a torch.nn.Module, got {type(model).__name__}; write "
            "Deepen(model, optimizer, total_steps=...)"
        )
    found = [model]
    while True:
        name = type(found[-1]).__name__
        if name in _REFUSED:
            raise UsageError(f"blocks cannot sleep in {name}; {_REFUSED[name]}")
        if isinstance(found[-1], DistributedDataParallel | AveragedModel):
            found.append(found[-1].module)
        elif isinstance(inner := getattr(found[-1], "_orig_mod", None), nn.Module):
            found.append(inner)
        else:
            return found


def unwrap_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers inside the wrappers of trainers."""
    found = []
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, Optimizer)
    given: list[Any] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
    for one in given:
        # Accelerate and Lightning keep the user's optimizer under this name.
        while isinstance(inner := getattr(one, "optimizer", None), Optimizer):
            one = inner
        if not isinstance(one, Optimizer):
            raise UsageError(
                f"optimizer must be a torch.optim.Optimizer or several, got {type(one).__name__}"
            )
        found.append(one)
    return found


def inner_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return unwrapped optimizers; refuse those under which blocks cannot be copied."""
    found = unwrap_optimizers(optimizer)
    for one in found:
        for kind in type(one).__mro__:
            if reason := _REFUSED_OPTIMIZERS.get(kind.__name__):
                raise UsageError(
                    f"blocks cannot be copied under {kind.__name__}, because {reason}; use AdamW "
                    "or SGD"
                )
    return found


def check_held(names: Sequence[str], network: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that lack a trainable parameter of these blocks."""
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    for name in names:
        for part, parameter in network.get_submodule(name).named_parameters():
            if parameter.requires_grad and id(parameter) not in held:
                raise UsageError(
                    f"the optimizer lacks {name}.{part}; make it from all of model.parameters(), "
                    "including blocks that sleep at first"
                )


class Processes:
    """Keeps a `DistributedDataParallel` wrapper in step with sleeping blocks.

    DDP waits for the gradient of every parameter that it was made for. So parameters of sleeping
    blocks require no gradient, and the wrapper is rebuilt at every growth. A wrapper with
    `find_unused_parameters` is left alone.
    """

    def __init__(self, wrappers: Sequence[nn.Module]) -> None:
        """Find the DDP wrapper among those around the model."""
        found = [one for one in wrappers if isinstance(one, DistributedDataParallel)]
        self._wrapper = found[0] if found else None
        self._frozen: list[nn.Parameter] = []

    def follow(self, asleep: Sequence[nn.Module]) -> None:
        """Make the wrapper wait for all parameters but those of these blocks."""
        wrapper = self._wrapper
        if wrapper is None or wrapper.find_unused_parameters:
            return
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = [p for block in asleep for p in block.parameters() if p.requires_grad]
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        # Imported here because it loads PyTorch's compiler.
        from esper.kasmina.ddp import rebuild

        # Gradients may be views into the old wrapper's memory.
        wrapper.zero_grad(set_to_none=True)
        rebuild(wrapper, find_unused_parameters=False)

    def check(self, *, is_asleep: bool) -> None:
        """Refuse a forward pass of a DDP wrapper that waits for gradients of sleeping blocks.

        The wrapper given to `Deepen` does not, if blocks were put to sleep before the pass.
        """
        around = DistributedDataParallel._get_active_ddp_module()
        is_known = is_asleep and around is self._wrapper
        if around is not None and not is_known and not around.find_unused_parameters:
            raise UsageError(
                "this DistributedDataParallel would wait for gradients of sleeping blocks; write "
                "Deepen(wrapper, ..., example=batch), or make the wrapper with "
                "find_unused_parameters=True"
            )


def mean_over_processes(value: torch.Tensor) -> torch.Tensor:
    """Return the mean of a number over all processes, so that all decide the same."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
        value /= world_size()
    return value


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@dataclass(frozen=True, slots=True)
class Output:
    """The form of a block's output, learned from an example call."""

    parts: tuple[Source, ...]
    """Where each item of the output comes from; one part for a tensor."""
    form: type | None
    """`tuple` or `list`; None if the block returns a single value."""


def pass_through(output: Output, *args: Any, **kwargs: Any) -> Any:
    """Return the inputs of a block in the form of its output.

    It is a function of the module without a reference to the block, so that a model with sleeping
    blocks can be pickled and copied.
    """
    if output.form is None:
        return output.parts[0].read(args, kwargs)
    return output.form(part.read(args, kwargs) for part in output.parts)


class Sleeper:
    """One block that can be put to sleep and woken."""

    def __init__(self, block: nn.Module, output: Output, on_save: OnSave) -> None:
        """Leave the block awake; the hook tells when its weights are saved while it sleeps."""
        self.block = block
        self._output = output
        self._on_save = on_save
        self._kept: dict[str, Any] | None = None

    def set_awake(self, is_awake: bool) -> None:
        """Wake the block, or put it to sleep."""
        if is_awake == (self._kept is None):
            return
        own = self.block.__dict__
        if is_awake:
            assert self._kept is not None
            del own["forward"]
            own.update(self._kept)
            self._kept = None
            remove_save_hooks(self.block)
            return
        # A block with `block.compile()` would be compiled asleep, then again awake.
        names = ["forward", "_compiled_call_impl"]
        if isinstance(self.block, FSDPModule):
            # FSDP gathers the parameters of every block that is called, even asleep.
            names += _HOOKS
        self._kept = {name: own.pop(name) for name in names if name in own}
        own.update({name: OrderedDict() for name in _HOOKS if name in self._kept})
        own["forward"] = partial(pass_through, self._output)
        self.block.register_state_dict_pre_hook(self._on_save)


def wake_copies(network: nn.Module) -> None:
    """Wake the blocks of a network that was copied or pickled while they slept."""
    for module in network.modules():
        if is_asleep(module):
            del module.__dict__["forward"]
            remove_save_hooks(module)


def is_asleep(module: nn.Module) -> bool:
    """Return whether a module is a sleeping block."""
    own = vars(module).get("forward")
    return isinstance(own, partial) and own.func is pass_through


# ---- The output of sleeping blocks, learned from watched calls


def learn_output(calls: list[Call]) -> Output | str:
    """Return the output of sleeping blocks, or why there is none."""
    outputs = [_output_of(call, after) for call, after in pairwise(calls)]
    if any(isinstance(output, str) for output in outputs):
        return next(output for output in outputs if isinstance(output, str))
    if any(output != outputs[0] for output in outputs):
        return "its blocks return their inputs in different places; let all return the same"
    output = outputs[0]
    assert isinstance(output, Output)
    for call in calls[1:]:
        if len(call.parts) != len(output.parts):
            counts = f"{len(output.parts)} and {len(call.parts)}"
            return f"its blocks return {counts} values; let all return as many"
        for source, part in zip(output.parts, call.parts, strict=True):
            given = source.read(call.args, call.kwargs)
            if isinstance(part, Tensor) and getattr(given, "shape", None) != part.shape:
                shapes = f"{shapes_of(given)} into {shapes_of(part)}"
                return f"its blocks turn {shapes}; a block must keep the shape"
    return output


def _output_of(call: Call, after: Call) -> Output | str:
    """Find the input that replaces each output, from a call and the next one."""
    parts = []
    for part in call.parts:
        # The next block takes this output by the same argument as this block its own input.
        source = None if is_plain(part) else after.source_of(part) or call.source_of(part)
        if source is None and isinstance(part, Tensor):
            return (
                f"its blocks return a tensor {list(part.shape)} that the next block does not take; "
                "let each block take what the one before it returns"
            )
        if source is None and not is_plain(part):
            return f"its blocks return a {type(part).__name__}; let them return tensors or a tuple"
        parts.append(source or Source(value=part))
    form = type(call.output) if type(call.output) in (tuple, list) else None
    return Output(tuple(parts), form)


# ---- Copying blocks: weights, buffers and the state that optimizers keep for them


Order = Literal["stack", "interleave"]

ORDERS: tuple[Order, ...] = ("stack", "interleave")


def plan_copies(
    before: int, after: int, order: Order, period: int = 1
) -> Iterator[tuple[int, int]]:
    """Yield (target, source) for every block that changes, in the order in which to copy.

    Three blocks a b c become a b c a b c when stacked, a a b b c c when interleaved. If fewer are
    added, the last ones are repeated: a b c d become a b c d c d. Blocks that alternate (period 2:
    attention of two kinds) are copied in groups of that size.

    Args:
        before: number of blocks awake, a multiple of the period.
        after: number of blocks that will be awake.
        order: 'stack' or 'interleave'.
        period: number of blocks after which their kinds repeat.
    """
    if order == "stack":
        whole = after - after % before
        added = -(-(after - before) // period) * period
        for target in range(before, after):
            yield target, target % before if target < whole else target - added
        return
    groups = -(-after // period)
    # From the last to the first, so that no source is overwritten before it is copied.
    for target in reversed(range(after)):
        group, phase = divmod(target, period)
        source = group * (before // period) // groups * period + phase
        if source != target:
            yield target, source


@torch.no_grad()
def copy_block(source: nn.Module, target: nn.Module) -> None:
    """Copy the parameters and buffers of a block to another one."""
    for one, other in zip(_tensors(target), _tensors(source), strict=True):
        one.copy_(other)


def copy_optimizer_state(
    source: nn.Module, target: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Copy the optimizer state of a block's parameters to those of another one."""
    for one, other in zip(target.parameters(), source.parameters(), strict=True):
        for optimizer in optimizers:
            copy_state(optimizer, other, one)


def _tensors(block: nn.Module) -> list[Tensor]:
    return [*block.parameters(), *block.buffers()]
