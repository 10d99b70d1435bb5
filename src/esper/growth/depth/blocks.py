"""Sleeping blocks: a block that sleeps stays where it is and hands its input on.

Only the block's `forward` is replaced, so parameters, names and `state_dict` keys never change.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from esper.kasmina.calls import Call, Source, is_plain
from esper.kasmina.optimizer import copy_state
from esper.leyline.errors import UsageError

# ---- Wrappers around a model and its optimizer: which of them blocks can sleep in, and how


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


def unwrap_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return optimizers without what trainers wrap around them."""
    found = []
    for one in [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer):
        # Accelerate and Lightning keep the owner's optimizer under this name.
        while isinstance(inner := getattr(one, "optimizer", None), Optimizer):
            one = inner
        if not isinstance(one, Optimizer):
            raise UsageError(
                f"an optimizer must be a torch.optim.Optimizer or several of them, got a "
                f"{type(one).__name__}"
            )
        found.append(one)
    return found


def inner_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return optimizers unwrapped; those under which blocks cannot be copied are refused."""
    found = unwrap_optimizers(optimizer)
    for one in found:
        for kind in type(one).__mro__:
            if reason := _REFUSED_OPTIMIZERS.get(kind.__name__):
                raise UsageError(f"blocks cannot be copied under {kind.__name__}: {reason}")
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
        from esper.kasmina.ddp import rebuild

        # Gradients that are views of the old wrapper's memory are no use to the new one.
        wrapper.zero_grad(set_to_none=True)
        rebuild(wrapper, find_unused_parameters=False)

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


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@dataclass(frozen=True, slots=True)
class Output:
    """What a block returns, learned from an example call."""

    parts: tuple[Source, ...]
    """One part for a tensor, otherwise one for each item."""
    form: type | None
    """`tuple` or `list`; None where the block returns its only part as it is."""


def pass_through(output: Output, *args: Any, **kwargs: Any) -> Any:
    """Return the inputs of a block in the form of its output.

    At module level, and without a reference to the block, so that a model with sleeping blocks can
    be pickled and copied.
    """
    if output.form is None:
        return output.parts[0].read(args, kwargs)
    return output.form(part.read(args, kwargs) for part in output.parts)


class Sleeper:
    """One block that can be put to sleep and woken."""

    def __init__(self, block: nn.Module, output: Output) -> None:
        """Leave the block as it is: awake."""
        self.block = block
        self._output = output
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
            return
        # A block compiled by `block.compile()` would be compiled asleep, then again awake.
        names = ["forward", "_compiled_call_impl"]
        if isinstance(self.block, FSDPModule):
            # FSDP gathers the parameters of every block that is called, even of one asleep.
            names += _HOOKS
        self._kept = {name: own.pop(name) for name in names if name in own}
        own.update({name: OrderedDict() for name in _HOOKS if name in self._kept})
        own["forward"] = partial(pass_through, self._output)


def wake_copies(network: nn.Module) -> None:
    """Wake the blocks of a network that was copied or pickled while they slept."""
    for module in network.modules():
        if is_asleep(module):
            del module.__dict__["forward"]


def is_asleep(module: nn.Module) -> bool:
    """Return whether a module is a block that sleeps."""
    own = vars(module).get("forward")
    return isinstance(own, partial) and own.func is pass_through


# ---- What the blocks of a stack return while they sleep, learned from watching their calls


def learn_output(calls: list[Call]) -> Output | str:
    """Return what the blocks of a run return while they sleep, or why that cannot be said."""
    outputs = [_output_of(call, after) for call, after in pairwise(calls)]
    if any(isinstance(output, str) for output in outputs):
        return next(output for output in outputs if isinstance(output, str))
    if any(output != outputs[0] for output in outputs):
        return "its blocks return different things"
    output = outputs[0]
    assert isinstance(output, Output)
    for call in calls[1:]:
        if len(call.parts) != len(output.parts):
            return "its blocks return different things"
        for source, part in zip(output.parts, call.parts, strict=True):
            given = source.read(call.args, call.kwargs)
            if isinstance(part, Tensor) and getattr(given, "shape", None) != part.shape:
                return "its blocks change the shape of what they are given"
    return output


def _output_of(call: Call, after: Call) -> Output | str:
    """Learn from a call, and from the call that follows, which input stands for which output."""
    parts = []
    for part in call.parts:
        # What the next block takes as its hidden state, this one takes by the same name.
        source = None if is_plain(part) else after.source_of(part) or call.source_of(part)
        if source is None and isinstance(part, Tensor):
            return (
                "its blocks return a tensor that the next one does not take; asleep they have none"
            )
        if source is None and not is_plain(part):
            return f"its blocks return a {type(part).__name__}; let them return tensors or a tuple"
        parts.append(source or Source(value=part))
    form = type(call.output) if type(call.output) in (tuple, list) else None
    return Output(tuple(parts), form)


# ---- The hook by which the first batch of a model is seen, where no example was given


OnCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class FirstBatch:
    """Forward pre-hook that tells the arguments of a call, until it is removed.

    Copies of a model copy its hooks: a copy of this one, pickled or not, does nothing.
    """

    def __init__(self, on_call: OnCall | None = None) -> None:
        """Call this method of an object that is not kept alive by it."""
        self._on_call = None if on_call is None else weakref.WeakMethod(on_call)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return FirstBatch, ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell a call of the module."""
        on_call = None if self._on_call is None else self._on_call()
        if on_call is not None:
            on_call(module, args, kwargs)

    def hook(self, modules: Iterable[nn.Module]) -> None:
        """Watch the calls of these modules."""
        for module in modules:
            # Before FSDP gathers parameters for the call.
            module.register_forward_pre_hook(self, prepend=True, with_kwargs=True)


def unhook(model: nn.Module) -> None:
    """Remove all hooks of this kind from a model and everything within it."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, FirstBatch):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


# ---- Copying blocks: weights, buffers and the state that optimizers keep for them


Order = Literal["stack", "interleave"]

ORDERS: tuple[Order, ...] = ("stack", "interleave")


def plan_copies(
    before: int, after: int, order: Order, period: int = 1
) -> Iterator[tuple[int, int]]:
    """Yield (target, source) for every block that changes, in the order in which to copy.

    Three blocks a b c become a b c a b c when stacked, a a b b c c when interleaved. Where fewer
    are added, the stack ends as it did: a b c d become a b c d c d. Blocks that alternate (period
    2: attention of two kinds) are moved in groups of that size.

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
    # From the last to the first: no source is overwritten before it was copied.
    for target in reversed(range(after)):
        group, phase = divmod(target, period)
        source = group * (before // period) // groups * period + phase
        if source != target:
            yield target, source


@torch.no_grad()
def copy_block(source: nn.Module, target: nn.Module) -> None:
    """Give a block the parameters and buffers of another one."""
    for one, other in zip(_tensors(target), _tensors(source), strict=True):
        one.copy_(other)


def copy_optimizer_state(
    source: nn.Module, target: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Give the parameters of a block the optimizer state of another block's; groups stay."""
    for one, other in zip(target.parameters(), source.parameters(), strict=True):
        for optimizer in optimizers:
            copy_state(optimizer, other, one)


def _tensors(block: nn.Module) -> list[Tensor]:
    return [*block.parameters(), *block.buffers()]
