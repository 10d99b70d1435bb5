"""What a worker process has been told: enough to bring another one to the same state.

Everything a process knows follows from the requests that changed it: rows begin at their seeds,
and the same requests in the same order give the same numbers. So what is kept of a process that
may die is no copy of its networks but the requests themselves, as long as something rests on them.
A request that only asks is kept until it has been answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_ASKING = frozenset({"measure", "read", "score", "close", "unload"})
"""Requests that nothing rests on once they have been answered."""

_SHELF = frozenset({"load_source", "load", "unload"})
"""Requests about tasks and data; all others are about the rows of one engine."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it was sent."""

    serial: int
    name: str
    about: int
    """The engine, task or source that it is about."""
    needs: frozenset[int]
    """Tasks that rows are built from, or the source of a task."""
    packed: bytes
    """The message; empty where memory is shared anew with every process."""
    shared: Any = None
    """A source of data, whose memory is shared."""
    forgets: frozenset[int] = frozenset()
    """Tasks and sources that nobody will name again."""


def describe(serial: int, name: str, arguments: tuple[Any, ...], packed: bytes) -> Request:
    """Return a request as it is kept; `arguments` are those of the method in `process`."""
    needs: Iterable[int] = ()
    match name, arguments:
        case "load_source", (source, shared):
            # Its message is good for one process and one time.
            return Request(serial, name, source, frozenset(), b"", shared=shared)
        case "unload", (conditions, sources):
            forgets = frozenset([*conditions, *sources])
            return Request(serial, name, -1, frozenset(), packed, forgets=forgets)
        case "load", (_, source, *_):
            needs = (source,)
        case "open", (_, conditions, *_):
            needs = conditions
        case "adopt", (_, _, condition, *_):
            needs = (condition,)
    return Request(serial, name, arguments[0], frozenset(needs), packed)


class Journal:
    """The requests that the state of one process rests on, in their order."""

    def __init__(self) -> None:
        """Begin with a process that knows nothing."""
        self._requests: dict[int, Request] = {}
        self._unanswered: set[int] = set()
        self._unloaded: set[int] = set()

    def __len__(self) -> int:
        """Return how many requests are kept."""
        return len(self._requests)

    def note(self, request: Request) -> None:
        """Keep a request that is about to be sent."""
        self._requests[request.serial] = request
        self._unanswered.add(request.serial)

    @property
    def unloaded(self) -> list[int]:
        """Tasks and sources that are kept only for the rows that were built from them."""
        return sorted(self._unloaded)

    def answered(self, serial: int) -> None:
        """Take note that the answer to a request is here; drop what nothing rests on any more."""
        self._unanswered.discard(serial)
        request = self._requests.get(serial)
        if request is None or request.name not in _ASKING:
            return
        del self._requests[serial]
        if request.name == "close":
            self._drop(
                each
                for each in self._requests.values()
                if each.name not in _SHELF and each.about == request.about
            )
        if request.name in ("close", "unload"):
            self._unloaded |= request.forgets
            self._drop_unloaded()

    def requests(self) -> list[tuple[Request, bool]]:
        """Return what a new process is told, with whether somebody waits for the answer."""
        return [(each, each.serial in self._unanswered) for each in self._requests.values()]

    def _drop_unloaded(self) -> None:
        """Drop tasks, then sources, that were unloaded and that nothing kept needs."""
        for name in ("load", "load_source"):
            needed = frozenset[int]().union(*(each.needs for each in self._requests.values()))
            self._drop(
                each
                for each in self._requests.values()
                if each.name == name and each.about in self._unloaded - needed
            )
        self._unloaded &= {each.about for each in self._requests.values() if each.name in _SHELF}

    def _drop(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            del self._requests[request.serial]
