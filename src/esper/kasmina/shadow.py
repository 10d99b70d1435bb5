"""The shadow pass: a seed learns on its true loss while the rest of the network is frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.slot import Slot
from esper.leyline.errors import UsageError


class Shadow(nn.Module):
    """A garden in which one seed is fully blended and everything else cannot learn.

    It runs on detached parameters and on copies of the buffers, and puts the random state back, so
    the host is exactly as if this pass had never been.
    """

    def __init__(self, garden: nn.Module, slot: Slot) -> None:
        """Look at `garden` with the seed of `slot` at full amplitude."""
        super().__init__()
        # Plain attributes: a shadow owns neither of them as a submodule.
        self.__dict__["garden"] = garden
        self.__dict__["slot"] = slot
        self.was_called = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the garden so that only this seed's parameters receive a gradient."""
        garden: nn.Module = self.__dict__["garden"]
        slot: Slot = self.__dict__["slot"]
        self.was_called = True
        learning = {id(parameter) for parameter in slot.parameters()}
        frozen: dict[str, Tensor] = {
            name: parameter.detach()
            for name, parameter in garden.named_parameters()
            if id(parameter) not in learning
        }
        frozen.update({name: buffer.clone() for name, buffer in garden.named_buffers()})
        devices = {p.device for p in garden.parameters() if p.device.type == "cuda"}
        slot.is_shadowing = slot.was_shadowed = True
        try:
            with torch.random.fork_rng(devices=list(devices)):
                return torch.func.functional_call(garden, frozen, args, kwargs)
        finally:
            slot.is_shadowing = False


def shadow_loss(garden: nn.Module, slot: Slot, closure: Callable[[nn.Module], Tensor]) -> Tensor:
    """Return the loss of one batch with the seed of `slot` fully blended and the rest frozen."""
    shadow = Shadow(garden, slot)
    loss = closure(shadow)
    if not shadow.was_called:
        raise UsageError(
            "the closure must call the model it is given: training_loss(lambda model: "
            "loss(model(x), y)), not the garden itself"
        )
    return loss
