"""How many entries a stack of seeds has: some more than there are seeds, where that saves work.

A captured CUDA graph is void as soon as a stack gets more entries or fewer, so on a device stacks
have a few spare ones and keep them for a while. A spare entry costs what a seed costs; that is
little where activations are small and steps are short, so there stacks start with more of them and
keep them from one episode to the next.
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
"""Epochs for which a third of all entries may be spare; few when the layout changes anyway."""

_PATIENCE_WHEN_CHANGED = 2


@dataclass(slots=True)
class StackCapacity:
    """Just as many entries as seeds; with `has_spares`, a few more."""

    has_spares: bool = False
    rows: int = 1
    """Rows of the stack: no slot has more seeds."""
    sample_bytes: int = 4
    """Bytes of one channel of one position of a batch: batch size times element size."""
    _epochs_wasted: int = field(default=0, init=False)

    def entries(self, slot: SlotSpec, count: int) -> int:
        """Return how many entries a stack of `count` seeds at this slot gets."""
        if not self.has_spares:
            return count
        # Where entries are cheap, a stack that grows will not have to grow again soon.
        wanted = max(_and_more(count), self._least(slot)) if self.is_cheap(slot) else count
        return max(count, min(_step_up(wanted), self.rows))

    def positions(self, count: int) -> int:
        """Return how many positions a validation pass of `count` gets, where spares are kept."""
        return max(count, min(_step_up(count), self.rows))

    def is_cheap(self, slot: SlotSpec) -> bool:
        """Whether spare entries at this slot cost less than a new capture does."""
        return self.has_spares and self._least(slot) > 1

    def entries_kept(self, slot: SlotSpec, now: int, peak: int) -> int:
        """Return how many of a stack's entries stay when other rows begin: none, or some.

        `peak` is how many were in use at once when most were.
        """
        if not peak or not self.is_cheap(slot):
            return 0
        wanted = min(_step_up(_and_more(peak)), self.rows)
        return wanted if 2 * now > 3 * wanted else now

    def oversized(
        self, sizes: Mapping[Key, tuple[int, int]], *, has_changed: bool
    ) -> Iterator[Key]:
        """Yield the stacks, by (entries now, entries wanted), that should shrink.

        Without spares all that can; otherwise those with half too many, once too many entries have
        been spare for too long. `has_changed` says that captures are void in any case.
        """
        if not self.has_spares:
            yield from (key for key, (now, wanted) in sizes.items() if now > wanted)
            return
        held = sum(now for now, _ in sizes.values())
        wasted = 3 * sum(max(0, now - wanted) for now, wanted in sizes.values()) > held
        self._epochs_wasted = self._epochs_wasted + 1 if wasted else 0
        if self._epochs_wasted > (_PATIENCE_WHEN_CHANGED if has_changed else _PATIENCE):
            self._epochs_wasted = 0
            yield from (key for key, (now, wanted) in sizes.items() if 2 * now > 3 * wanted)

    def _least(self, slot: SlotSpec) -> int:
        """Return how many entries cost no more than one."""
        own = prod(slot.shape[1:]) * self.sample_bytes
        return min(_FREE_BYTES // own, self.rows // 8)


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
