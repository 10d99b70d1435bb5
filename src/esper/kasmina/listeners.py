"""Who is told when the parameters of a garden come or go."""

from __future__ import annotations

import weakref
from collections.abc import Callable

Listener = Callable[[], None]


class Listeners:
    """Bound methods, held weakly: to listen keeps nobody alive."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self._references: list[weakref.WeakMethod[Listener]] = []

    def __len__(self) -> int:
        return len(self._references)

    def add(self, listener: Listener) -> None:
        """Tell this bound method too, for as long as its object lives."""
        self._references.append(weakref.WeakMethod(listener))

    def tell(self) -> None:
        """Call every listener that is still there, and forget the others."""
        alive = []
        for reference in self._references:
            listener = reference()
            if listener is not None:
                listener()
                alive.append(reference)
        self._references = alive
