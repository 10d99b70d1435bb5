"""What a sink is, and the table of those there are.

A sink shows a run somewhere else: TensorBoard, W&B, a chat. It gets every record after the store
has committed it, on a thread of its own, so a slow or failing sink never holds up a run; the
store keeps everything whatever becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from esper.leyline.errors import UsageError
from esper.leyline.registry import Registry
from esper.nissa.columns import Row
from esper.nissa.schema import RunRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """Where a sink starts from."""

    folder: Path
    """The run folder; a sink writes below it, under a name of its own."""
    run: RunRow
    """What is being run."""
    is_resumed: bool
    """The run goes on from a checkpoint."""
    cursor: Mapping[str, Any] | None
    """What `mark` returned at that checkpoint; None when there is nothing to keep."""


@runtime_checkable
class Sink(Protocol):
    """Takes records and shows them; all methods are called on one thread.

    Any exception ends the sink: it is reported once, and the run goes on without it.
    """

    def start(self, context: SinkContext) -> None:
        """Begin, or go on from `context.cursor` and forget what came after it."""

    def write(self, records: Sequence[Row]) -> None:
        """Take records in order; `esper.nissa.metrics.points_of` turns one into points."""

    def mark(self) -> Mapping[str, Any]:
        """Hand everything so far over; return plain data to go on from here later."""

    def close(self, status: str) -> None:
        """End; the run is `finished`, `interrupted` or `failed`."""


SinkFactory = Callable[[], Sink]
F = TypeVar("F", bound=SinkFactory)

SINKS: Registry[SinkFactory] = Registry("sink")
"""Sinks by name; a third party adds its own through `register_sink` or the group `esper.sinks`."""


def register_sink(name: str) -> Callable[[F], F]:
    """Return a decorator that registers a class, or a function that makes a sink, under a name."""

    def register(factory: F) -> F:
        SINKS.register(name, factory)
        return factory

    return register


def make_sink(sink: str | Sink) -> tuple[str, Sink]:
    """Return a sink with its name, made by name or taken as it is."""
    if isinstance(sink, str):
        return sink, SINKS.get(sink)()
    if not isinstance(sink, Sink) or isinstance(sink, type):
        raise UsageError(
            f"a sink is a name ({', '.join(SINKS.names())}) or an object with start, write, mark "
            f"and close, got {sink!r}"
        )
    return type(sink).__name__, sink
