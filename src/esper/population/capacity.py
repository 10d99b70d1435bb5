"""How many places a stack of seeds has: some more than there are seeds, where that saves work.

A captured step is void as soon as a stack gets more places or fewer, so on a device stacks have a
few empty ones and keep them for a while. An empty place costs what a seed costs; that is little
where activations are small and steps are short, so there stacks start with more of them and keep
them from one episode to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

from esper.population.engine import SlotSpec

Key = TypeVar("Key")

_FREE_BYTES = 2**19
"""Activations of so many bytes cost no more than the launch of a kernel."""

_PATIENCE = 8
"""Epochs for which a third of all places may stay empty; few when places move anyway."""

_PATIENCE_WHEN_MOVED = 2


@dataclass(slots=True)
class Room:
    """Just as many places as seeds; with `spares`, a few more."""

    spares: bool = False
    rows: int = 1
    """Rows of the stack: no slot has more seeds."""
    sample_bytes: int = 4
    """Bytes of one channel of one position of a batch: batch size times element size."""
    _epochs_wasted: int = field(default=0, init=False)

    def places(self, slot: SlotSpec, count: int) -> int:
        """Return how many places a stack of `count` seeds at this slot gets."""
        if not self.spares:
            return count
        # Where places are cheap, a stack that grows will not have to grow again soon.
        wanted = max(_and_more(count), self._least(slot)) if self.is_cheap(slot) else count
        return max(count, min(_step_up(wanted), self.rows))

    def positions(self, count: int) -> int:
        """Return how many positions a pass of `count` gets, where there are some to spare."""
        return max(count, min(_step_up(count), self.rows))

    def is_cheap(self, slot: SlotSpec) -> bool:
        """Whether empty places at this slot cost less than a new capture does."""
        return self.spares and self._least(slot) > 1

    def kept(self, slot: SlotSpec, now: int, peak: int) -> int:
        """Return how many of a stack's places stay when other rows begin: none, or some.

        `peak` is how many were taken at once when most were.
        """
        if not peak or not self.is_cheap(slot):
            return 0
        wanted = min(_step_up(_and_more(peak)), self.rows)
        return wanted if 2 * now > 3 * wanted else now

    def _least(self, slot: SlotSpec) -> int:
        """Return how many places cost no more than one."""
        own = prod(slot.shape[1:]) * self.sample_bytes
        return min(_FREE_BYTES // own, self.rows // 8)

    def too_large(self, sizes: Mapping[Key, tuple[int, int]], *, has_moved: bool) -> Iterator[Key]:
        """Yield the stacks, by (places now, places wanted), that should give places up.

        Without spares all that can; otherwise those with half too many, once too many places have
        been empty for too long.
        """
        if not self.spares:
            yield from (key for key, (now, wanted) in sizes.items() if now > wanted)
            return
        held = sum(now for now, _ in sizes.values())
        wasted = 3 * sum(max(0, now - wanted) for now, wanted in sizes.values()) > held
        self._epochs_wasted = self._epochs_wasted + 1 if wasted else 0
        if self._epochs_wasted > (_PATIENCE_WHEN_MOVED if has_moved else _PATIENCE):
            self._epochs_wasted = 0
            yield from (key for key, (now, wanted) in sizes.items() if 2 * now > 3 * wanted)


def _and_more(count: int) -> int:
    return count + count // 4


def _step_up(count: int) -> int:
    """Return the least of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not less."""
    size = 1
    while size < count:
        middle = size + size // 2
        if size > 1 and middle >= count:
            return middle
        size *= 2
    return size
