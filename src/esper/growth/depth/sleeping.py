"""Sleeping blocks: a block that sleeps stays where it is and hands its input on.

Only the block's `forward` is replaced, so parameters, names and `state_dict` keys never change.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from esper.kasmina.calls import Source

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
