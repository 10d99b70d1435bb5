"""Running many configurations of seeds in one pass that shares what they have in common.

A batch goes through the model once up to the first slot in which configurations differ. Behind it
the batch is as many times as long as there are different ways taken so far: the samples with the
seed, then the same samples without it. So three seeds in eight configurations cost one, two, four
and eight parts of the model, one behind another, instead of eight times all of it.

This works where a model treats samples one by one, whatever their number: every slot sees the whole
batch, and what comes out has one entry per sample. A model that meets again, behind a slot, what it
kept from before (a slot inside a residual branch) cannot be run that way; it stops with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from esper.kasmina.garden import Garden
from esper.kasmina.slot import MIXING, Slot
from esper.leyline.errors import EsperError


class BranchingError(EsperError, RuntimeError):
    """A model does not keep a batch that became longer at a slot as it is."""


class Branches:
    """Configurations of one pass, in groups that have gone the same way so far.

    The batch is made of one part for every group, in their order, `samples` long each.
    """

    def __init__(self, configurations: Tensor, samples: int) -> None:
        """Start with all configurations, bool [K, S], in one group."""
        self.samples = samples
        self.groups: list[list[int]] = [list(range(len(configurations)))]
        self._is_on = configurations.tolist()

    def split(self, index: int, slot: str, h: Tensor, mix: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the activation behind a slot: mixed with the seed where on, as it is where off.

        Args:
            index: which column of the configurations is the slot's.
            slot: its name.
            h: what the host puts out there, one part for every group.
            mix: the activation with the seed mixed in.
        """
        if len(h) != len(self.groups) * self.samples:
            raise BranchingError(
                f"slot {slot!r} got {len(h)} samples where {len(self.groups) * self.samples} were "
                "expected: it does not lie behind the slots before it"
            )
        on = [[k for k in group if self._is_on[k][index]] for group in self.groups]
        off = [[k for k in group if not self._is_on[k][index]] for group in self.groups]
        parts = h.split(self.samples)
        lit = [part for part, group in zip(parts, on, strict=True) if group]
        dark = [part for part, group in zip(parts, off, strict=True) if group]
        self.groups = [group for group in (*on, *off) if group]
        if not lit:
            return h
        mixed = mix(h if len(lit) == len(parts) else torch.cat(lit))
        return torch.cat([mixed, *dark]) if dark else mixed

    def places(self) -> list[int]:
        """Return for every configuration which part of the outcome is its own."""
        return [
            next(place for place, group in enumerate(self.groups) if number in group)
            for number in range(len(self._is_on))
        ]


@contextmanager
def branching(garden: Garden, configurations: Tensor, samples: int) -> Iterator[Branches]:
    """Within the block, one pass over a batch of `samples` runs all configurations, bool [K, S]."""
    branches = Branches(configurations, samples)
    changed: list[Slot] = []
    try:
        for index, slot in enumerate(garden.seedbed):
            if slot.mode in MIXING and not bool(configurations[:, index].all()):
                slot.branch = partial(branches.split, index, slot.name)
                changed.append(slot)
        yield branches
    finally:
        for slot in changed:
            slot.branch = None
