"""Sinks: the protocol, the registry, and the pump that feeds one.

A sink shows a run elsewhere: TensorBoard, W&B, a chat. It gets every record after the store has
committed it, on a thread of its own, so that a slow or failing sink never delays a run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from esper.leyline.errors import UsageError
from esper.leyline.registry import Registry
from esper.nissa.columns import TABLE_OF, Row
from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow, RunRow, UpdateHeadRow, UpdateRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """The start of a sink."""

    folder: Path
    """The run folder; a sink writes to a subfolder of its own."""
    run: RunRow
    """The run."""
    is_resumed: bool
    """Whether the run continues from a checkpoint."""
    cursor: Mapping[str, Any] | None
    """The result of `mark` at that checkpoint; None if there is nothing to keep."""


@runtime_checkable
class Sink(Protocol):
    """Shows records elsewhere; all methods are called on one thread.

    Any exception ends the sink: it is reported once, and the run continues without it.
    """

    def start(self, context: SinkContext) -> None:
        """Start, or continue from `context.cursor` and discard what came after it."""

    def write(self, records: Sequence[Row]) -> None:
        """Show records, in order; `esper.nissa.sinks.sink.points_of` returns their points."""

    def mark(self) -> Mapping[str, Any]:
        """Flush everything; return plain data from which to continue later."""

    def close(self, status: str) -> None:
        """Close; the run is `finished`, `interrupted` or `failed`."""


SinkFactory = Callable[[], Sink]
F = TypeVar("F", bound=SinkFactory)

DEFAULT_SINKS = ("tensorboard",)

SINKS: Registry[SinkFactory] = Registry("sink")
"""Sinks by name; add your own with `register_sink` or the entry-point group `esper.sinks`."""


def register_sink(name: str) -> Callable[[F], F]:
    """Return a decorator that registers a class or a factory of sinks by name."""

    def register(factory: F) -> F:
        SINKS.register(name, factory)
        return factory

    return register


def make_sink(sink: str | Sink) -> tuple[str, Sink]:
    """Return a sink and its name, given either."""
    if isinstance(sink, str):
        return sink, SINKS.get(sink)()
    if not isinstance(sink, Sink) or isinstance(sink, type):
        raise UsageError(
            f"a sink is a name ({', '.join(SINKS.names())}) or an object with start, write, mark "
            f"and close, got {sink!r}"
        )
    return type(sink).__name__, sink


# ----------------------------------------------------------------------------------- feeding one

QUEUE_RECORDS = 20_000
MARK_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 10.0

Report = Callable[[str, str], None]
"""Called with the name of a sink and a line about its failure."""


@dataclass(slots=True)
class _Mark:
    done: threading.Event = field(default_factory=threading.Event)


class SinkPump:
    """Feeds one sink; every method returns at once or within its timeout."""

    def __init__(self, name: str, sink: Sink, context: SinkContext, report: Report) -> None:
        """Start the thread, which starts the sink."""
        self.name = name
        self.dropped = 0
        self._sink = sink
        self._report = report
        self._queue: deque[Row | _Mark] = deque()
        self._changed = threading.Condition()
        self._status: str | None = None
        self._is_failed = False
        self._has_complained = False
        self._pending: _Mark | None = None
        self._cursor: Mapping[str, Any] | None = context.cursor
        self._thread = threading.Thread(
            target=self._run, args=(context,), name=f"esper-sink-{name}", daemon=True
        )
        self._thread.start()

    def offer(self, records: Sequence[Row]) -> None:
        """Queue records; if the queue is full, drop and count them."""
        with self._changed:
            if self._is_failed:
                return
            room = QUEUE_RECORDS - len(self._queue)
            self._queue.extend(records[: max(0, room)])
            self.dropped += max(0, len(records) - max(0, room))
            is_late = self.dropped > 0
            self._changed.notify()
        if is_late:
            self._complain("it is too slow; some of its points are left out")

    def mark(self, timeout_s: float = MARK_TIMEOUT_S) -> Mapping[str, Any] | None:
        """Return the cursor of the sink after all records so far.

        If it does not answer in time, its last cursor is returned: a resume then goes back further
        than needed, never less.
        """
        with self._changed:
            if self._is_failed or (self._pending is not None and not self._pending.done.is_set()):
                return self._cursor
            mark = self._pending = _Mark()
            self._queue.append(mark)
            self._changed.notify()
        until = time.monotonic() + timeout_s
        while not mark.done.wait(0.1):
            if self._is_failed:
                break
            if time.monotonic() > until:
                self._complain(f"it did not answer within {timeout_s:g} s")
                break
        return self._cursor

    def close(self, status: str, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the sink process the queue and close it; abandon it if it hangs."""
        with self._changed:
            self._status = status
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive() and not self._is_failed:
            self._fail(f"it did not end within {timeout_s:g} s")

    def _run(self, context: SinkContext) -> None:
        # A sink may be foreign code and raise anything.
        try:
            self._sink.start(context)
            while (batch := self._take()) is not None:
                self._hand_over(batch)
            self._sink.close(self._status or "finished")
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _take(self) -> list[Row | _Mark] | None:
        with self._changed:
            while not self._queue:
                if self._status is not None or self._is_failed:
                    return None
                self._changed.wait()
            batch = list(self._queue)
            self._queue.clear()
            return batch

    def _hand_over(self, batch: list[Row | _Mark]) -> None:
        records: list[Row] = []
        for item in batch:
            if isinstance(item, _Mark):
                if records:
                    self._sink.write(records)
                    records = []
                self._cursor = dict(self._sink.mark())
                item.done.set()
            else:
                records.append(item)
        if records:
            self._sink.write(records)

    def _complain(self, why: str) -> None:
        with self._changed:
            if self._has_complained:
                return
            self._has_complained = True
        self._report(self.name, why)

    def _fail(self, why: str) -> None:
        with self._changed:
            if self._is_failed:
                return
            self._is_failed = True
            self._queue.clear()
            self._changed.notify()
        self._report(self.name, " ".join(why.split()))


def _below(group: str, *columns: str) -> dict[str, str]:
    """Return metric names made of a group and the names of columns."""
    return {column: f"{group}/{column}" for column in columns}


_MEMORY = {"memory_bytes": "memory/process_bytes", "gpu_memory_share": "memory/gpu_share"}

EPISODES = {
    **_below("charts", "episodic_return", "final_score", "gain", "parameter_ratio", "flop_ratio"),
    **_below("charts", "seeds_fossilized", "stability"),
    "length": "charts/episodic_length",
}

EPOCHS = {
    **_below("charts", "val_score", "twin_score", "best_score"),
    **_below("charts", "parameters", "live_seeds", "plateau_epochs", "training_flops"),
    **_below("losses", "train_loss", "val_loss"),
    "seconds": "time/epoch_s",
    **_MEMORY,
}

ROUNDS = {
    **_below("charts", "return_mean", "return_p05", "return_p50", "return_p95"),
    **_below("charts", "score_mean", "score_best", "score_rolling"),
    **_below("charts", "gain_mean", "gain_p05", "gain_p50", "gain_p95"),
    **_below("charts", "paid_off_share", "paid_off_rolling", "eval_return", "eval_gain"),
    **_below("charts", "wait_share_free", "forced_share", "growth_ratio"),
    **{f"seeds_{fate}": f"seeds/{fate}" for fate in ("germinated", "fossilized", "pruned")},
    **_below("seeds", "fossilization_rate", "rollbacks"),
    **_below("rewards", "anti_gaming_share", "attribution_ratio_max"),
    **_below("rewards", "hindsight_mean", "hindsight_count", "hindsight_delay"),
    "steps_per_s": "charts/SPS",
    "seconds": "time/round_s",
    "update_seconds": "time/round_update_s",
    "twin_seconds": "time/twin_s",
    **_MEMORY,
}

_OTHER_UPDATES = {
    "q_variance": "critic/q_variance_across_ops",
    "q_op_spread": "critic/q_op_spread",
    "learning_rate": "charts/learning_rate",
    "seconds": "time/update_s",
    "memory_bytes": None,
    "gpu_memory_share": None,
    "forced_share": None,
    "paid_off_rolling": None,
}

UPDATES = {
    column.name: _OTHER_UPDATES.get(column.name, f"losses/{column.name}")
    for column in TABLE_OF[UpdateRow].columns
    if column.sql == "REAL" and column.name != "time"
}
"""Every measured column of an update, as `losses/<column>` unless another name is usual."""

_OTHER_HEADS = {
    **{f"ratio_{part}": f"ppo/ratio_<head>_{part}" for part in ("max", "min", "mean")},
    "usage": "head_usage/<head>",
    "entropy_nats": "entropy/<head>",
}
"""Metric names of the design documents."""

HEADS = {
    column.name: _OTHER_HEADS.get(column.name, f"losses/{column.name}/<head>")
    for column in TABLE_OF[UpdateHeadRow].columns
    if column.sql == "REAL"
}
"""Every measured column of a head; `<head>` is replaced by its name."""

METRICS: dict[type[Row], Mapping[str, str | None]] = {
    EpisodeRow: EPISODES,
    EpochRow: EPOCHS,
    RoundRow: ROUNDS,
    UpdateRow: UPDATES,
    UpdateHeadRow: HEADS,
}
"""Metric names by column, by class of record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One named number at one step."""

    name: str
    step: int
    value: float


TERMS = ("mean", "share")
"""Figures of each reward term, shown as `rewards/<figure>/<term>`."""


def points_of(record: Row, run: RunRow) -> Iterator[Point]:
    """Yield the points of a record, without missing values.

    Epochs have points only in runs of one network. Updates have points once, after their last pass.
    """
    names = METRICS.get(type(record))
    if names is None:
        return
    if isinstance(record, EpochRow):
        if (run.rows or 1) > 1:
            return
        step, head = record.step, ""
    elif isinstance(record, UpdateHeadRow):
        step, head = _env_step(record.env_steps, record.round), record.head
    elif isinstance(record, UpdateRow | RoundRow | EpisodeRow):
        if isinstance(record, UpdateRow) and not record.is_last:
            return
        step, head = _env_step(record.env_steps, record.round), ""
    else:
        return
    for column, name in names.items():
        value = getattr(record, column)
        if name is not None and value is not None:
            yield Point(name=name.replace("<head>", head), step=step, value=float(value))
    if isinstance(record, RoundRow) and isinstance(record.reward_terms, Mapping):
        for term, numbers in record.reward_terms.items():
            for series in TERMS:
                if numbers.get(series) is not None:
                    yield Point(
                        name=f"rewards/{series}/{term}", step=step, value=float(numbers[series])
                    )


def _env_step(env_steps: int | None, round_number: int) -> int:
    return round_number if env_steps is None else int(env_steps)
