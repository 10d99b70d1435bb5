"""Rebuilds `DistributedDataParallel` when the garden inside it grows.

This is a module of its own because `torch.compiler.disable` imports PyTorch's compiler, which takes
a second that only a wrapped garden needs to spend.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from esper.kasmina.slot import Slot, SlotMode
from esper.leyline.errors import UsageError

if TYPE_CHECKING:
    from esper.kasmina.garden import Garden


_MEBIBYTE = 1024 * 1024


class RebuildOnGrowth:
    """Forward pre-hook of a DDP wrapper that rebuilds it when a garden inside it has grown.

    Every process has to change its garden in the same way between the same two passes, as
    `Gardener` does; rebuilding makes the weights equal to those of rank 0.
    """

    def __init__(self, gardens: list[Garden]) -> None:
        """Remember the parameters that the wrapper is being made for."""
        self._gardens = gardens
        self._known = self._parameters()
        self._finds_unused: bool | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, wrapper: nn.Module, args: Any) -> None:
        """Rebuild the wrapper if a seed came, went, froze or thawed since the last pass."""
        # Without gradients nothing is reduced, and one process may well evaluate alone.
        if not torch.is_grad_enabled():
            return
        assert isinstance(wrapper, DistributedDataParallel)
        if self._finds_unused is None:
            self._finds_unused = wrapper.find_unused_parameters
        # A seed that waits takes no part in the pass; DDP would wait for its gradient for ever.
        finds_unused = self._finds_unused or any(map(_is_idle, self._slots()))
        known = self._parameters()
        if known != self._known or finds_unused != wrapper.find_unused_parameters:
            rebuild(wrapper, find_unused_parameters=finds_unused)
            self._known = known

    def _slots(self) -> list[Slot]:
        return [slot for garden in self._gardens for slot in garden.seedbed]

    def _parameters(self) -> list[tuple[int, bool]]:
        # The wrapper keeps what it was made for alive, so no number is used twice.
        return [(id(p), p.requires_grad) for slot in self._slots() for p in slot.parameters()]


def rebuild(wrapper: DistributedDataParallel, *, find_unused_parameters: bool) -> None:
    """Rebuild a DDP wrapper in place with its settings, hooks and mode; on all ranks at once."""
    if wrapper.mixed_precision is not None or wrapper._delay_all_reduce_params:
        raise UsageError(
            "a garden cannot grow in a DistributedDataParallel with mixed_precision= or "
            "delay_all_reduce_named_params=; use torch.autocast, and let it reduce everything"
        )
    options: dict[str, Any] = {
        "device_ids": wrapper.device_ids,
        "output_device": wrapper.output_device,
        "dim": wrapper.dim,
        "process_group": wrapper.process_group,
        "bucket_cap_mb": None
        if wrapper.bucket_bytes_cap_default
        else wrapper.bucket_bytes_cap // _MEBIBYTE,
        "gradient_as_bucket_view": wrapper.gradient_as_bucket_view,
        "static_graph": wrapper.static_graph,
        "find_unused_parameters": find_unused_parameters,
    }
    # Named differently by different versions of PyTorch, or not there at all.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    for name in (buffers, "skip_all_reduce_unused_params", "batched_grad_copy"):
        if name in known:
            options[name] = getattr(wrapper, name)
    kept: dict[str, Any] = {
        name: value
        for name, value in wrapper.__dict__.items()
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        and isinstance(value, OrderedDict)
    }
    kept |= {
        "training": wrapper.training,
        "require_backward_grad_sync": wrapper.require_backward_grad_sync,
    }
    communication = list(wrapper._comm_hooks)
    DistributedDataParallel.__init__(wrapper, wrapper.module, **options)
    wrapper.__dict__.update(kept)
    for hook, state in communication:
        wrapper.register_comm_hook(state, hook)


def _is_idle(slot: Slot) -> bool:
    """Return whether the slot holds a seed that takes no part in the pass."""
    return slot.seed is not None and slot.mode == SlotMode.PASS
