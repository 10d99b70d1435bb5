"""One garden trained in several processes: what one of them measures and decides holds for all."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from esper.kasmina.garden import Garden
from esper.leyline.errors import UsageError

T = TypeVar("T")


class Ranks:
    """The processes in which copies of a garden are trained by `DistributedDataParallel`.

    Every method is called in all of them at the same point. Where the garden is in no such
    wrapper there is only this process, and everything is returned as it is.
    """

    def __init__(self, garden: Garden, *, val_is_sharded: bool = False) -> None:
        """Look for the garden's wrapper whenever something is to be shared."""
        self._garden = garden
        self._val_is_sharded = val_is_sharded

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes that train this garden; None where this one is alone."""
        wrapper = self._garden.wrapper
        if wrapper is None:
            return None
        group: dist.ProcessGroup = wrapper.process_group
        return group if dist.get_world_size(group) > 1 else None

    def from_first(self, value: T) -> T:
        """Return rank 0's value; its tensors must be on the CPU."""
        group = self.group
        if group is None:
            return value
        holder: list[Any] = [value]
        dist.broadcast_object_list(holder, group=group, group_src=0)
        shared: T = holder[0]
        return shared

    def mean(self, value: float | None) -> float | None:
        """Return the mean over the processes that know this number."""
        known = [one for one in self._all(value) if one is not None]
        return sum(known) / len(known) if known else None

    def measured(self, loss: Tensor, correct: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the same loss [K, M] and correctness [K, M] everywhere."""
        if self.group is None:
            return loss, correct
        device = loss.device
        own = loss.cpu(), None if correct is None else correct.cpu()
        losses, corrects = zip(
            *(self._all(own) if self._val_is_sharded else [self.from_first(own)]), strict=True
        )
        rights = [one for one in corrects if one is not None]
        return (
            torch.cat(losses, 1).to(device),
            torch.cat(rights, 1).to(device) if rights else None,
        )

    def check_topology(self) -> None:
        """Refuse to go on with networks that have become different ones."""
        found = self._all(topology_hash(self._garden))
        strangers = [rank for rank, one in enumerate(found) if one != found[0]]
        if strangers:
            raise UsageError(
                f"the network on rank {', '.join(map(str, strangers))} is not that of rank 0; act "
                "on the garden in the same way in every process, or let the Gardener do it"
            )

    def _all(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        group = self.group
        if group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values


def topology_hash(garden: Garden) -> str:
    """Return what tells grown networks apart: parameters, what trains, and how seeds are mixed."""
    parameters = [(n, tuple(p.shape), p.requires_grad) for n, p in garden.named_parameters()]
    slots = [(s.name, s.mode, s.algorithm, float(s.alpha)) for s in garden.seedbed]
    return hashlib.sha256(repr((parameters, slots)).encode()).hexdigest()
