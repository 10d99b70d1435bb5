"""A copy of a garden that grows as the garden does, with weights of its own: for averages."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from esper.kasmina.garden import Garden


class Followers:
    """The gardens that follow one, held weakly."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self._references: list[weakref.ref[Garden]] = []

    def __iter__(self) -> Iterator[Garden]:
        found = (reference() for reference in self._references)
        return iter([garden for garden in found if garden is not None])

    def add(self, garden: Garden) -> None:
        """Let a garden follow, once."""
        others = (weakref.ref(one) for one in self if one is not garden)
        self._references = [*others, weakref.ref(garden)]


class Mirrored:
    """Which modules of the garden that is followed the copy has taken over."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known: list[weakref.ref[nn.Module]] = []

    def take_over(self, mine: nn.Module | None, theirs: nn.Module | None) -> nn.Module | None:
        """Return the copy's own module, a fresh copy where theirs is new."""
        if theirs is None:
            return None
        self._known = [reference for reference in self._known if reference() is not None]
        if mine is not None and any(reference() is theirs for reference in self._known):
            return mine
        self._known.append(weakref.ref(theirs))
        return copy.deepcopy(theirs)
