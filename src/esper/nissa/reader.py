"""Reads a run from Python: its tables as data frames or rows, its history as records."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import sqlite3
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from esper.leyline.errors import UsageError, reason_of, unknown_name
from esper.leyline.records import (
    DEEPEN,
    DecisionRecord,
    DeepeningRecord,
    DepthRecord,
    EpochRecord,
    SeedRecord,
    SlotRecord,
    StackRecord,
    copy_fields,
)
from esper.leyline.stages import SeedStage
from esper.nissa.columns import TABLES, Row, Table
from esper.nissa.database import (
    ANSWER_S,
    BUSY_TIMEOUT_S,
    StoreError,
    TimeLimit,
    connect_reader,
    primary_code,
    store_path,
    unanswered,
)
from esper.nissa.listing import RunEntry, describe_store
from esper.nissa.query import TIMEOUT_S, QueryResult, ask_connection, collect, restrict
from esper.nissa.schema import DecisionRow, EpochRow, SeedRow, StackRow, StageRow
from esper.nissa.schema_runs import RunRow
from esper.nissa.writer import decode

FRAME_LIBRARIES = ("polars", "pandas")


class StoredRun:
    """A recorded run, opened for reading by `open_run`; a running run is not disturbed."""

    def __init__(
        self,
        path: Path,
        *,
        limit: TimeLimit | None = None,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        """Open the store at this path for reading; see `open_run`."""
        self.path = path
        self._limit = TimeLimit(ANSWER_S) if limit is None else limit
        self._connection = connect_reader(path, self._limit, busy_timeout_s=busy_timeout_s)
        restrict(self._connection)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.path.parent

    @property
    def info(self) -> RunRow:
        """The row of the run: what it is and how it ended."""
        row = next(self.records("runs"), None)
        if not isinstance(row, RunRow):
            raise UsageError(f"{self.path} holds no run")
        return row

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables."""
        return tuple(TABLES)

    def records(
        self, table: str, *, where: str | None = None, parameters: Sequence[Any] = ()
    ) -> Iterator[Row]:
        """Yield the typed records of a table in the order of writing; see `rows`."""
        chosen = _chosen(table)
        for row in self._select(chosen, where, None, parameters):
            yield chosen.record(**self._decode(chosen, row))

    def rows(
        self,
        table: str,
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        parameters: Sequence[Any] = (),
        limit: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return rows as plain data: flags as booleans, JSON decoded, absent as None.

        Args:
            table: Name of the table.
            columns: Names of columns; all by default.
            where: A condition in SQL, such as "step > ?".
            parameters: Values for `?` in it.
            limit: Most rows to return.
        """
        chosen = _chosen(table, columns)
        found = self._select(chosen, where, limit, parameters)
        return [self._decode(chosen, row) for row in found]

    def table(
        self,
        table: str,
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        parameters: Sequence[Any] = (),
        limit: int | None = None,
        library: str | None = None,
    ) -> Any:
        """Return rows as a data frame of Polars or, if that is not installed, pandas.

        `library` chooses one of them; the other arguments are those of `rows`. JSON columns stay
        text.
        """
        name, module = frame_library(library)
        chosen = _chosen(table, columns)
        found = list(self._select(chosen, where, limit, parameters))
        return (_polars if name == "polars" else _pandas)(module, chosen, found)

    @property
    def entry(self) -> RunEntry:
        """State, progress and scores, as in a list of runs."""
        self._limit.start()
        try:
            return describe_store(self.folder, self._connection)
        except sqlite3.Error as error:
            raise self._unanswered(error) from None
        except (RecursionError, TypeError, ValueError) as error:
            raise self._damaged(error) from None

    def query(
        self,
        sql: str,
        parameters: Sequence[Any] = (),
        *,
        limit: int | None = None,
        timeout_s: float | None = TIMEOUT_S,
    ) -> QueryResult:
        """Return the result of one SELECT; see `query_run`."""
        try:
            with ask_connection(
                self._connection,
                str(self.path),
                sql,
                parameters,
                timeout_s=timeout_s,
                is_wanted=self._limit.is_wanted,
            ) as answer:
                return collect(*answer, limit)
        finally:
            self._limit.apply(self._connection)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<run {str(self.folder)!r}>"

    def _decode(self, table: Table, row: Sequence[Any]) -> dict[str, Any]:
        try:
            return decode(table, row)
        except (RecursionError, TypeError, ValueError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> StoreError:
        return StoreError(f"the store {self.path} is damaged: {error}; use another copy of it")

    def _select(
        self, chosen: Table, where: str | None, limit: int | None, parameters: Sequence[Any]
    ) -> Iterator[tuple[Any, ...]]:
        names = ", ".join(f'"{name}"' for name in chosen.names)
        condition = f" WHERE {where}" if where else ""
        count = -1 if limit is None else limit
        statement = (
            f'SELECT id, {names} FROM "{chosen.name}"{condition} ORDER BY id LIMIT {int(count)}'
        )
        clock = self._limit
        try:
            clock.start()
            cursor = self._connection.execute(statement, parameters)
            last: Any = None
            # Not `yield from`: a caller that stops early may have closed the file.
            while (row := cursor.fetchone()) is not None:
                if last is not None and not row[0] > last:
                    # In a damaged file, pages in a cycle would repeat rows for ever.
                    raise self._damaged(ValueError(f"{chosen.name} repeats its rows"))
                last = row[0]
                clock.pause()
                yield row[1:]
                clock.go_on()
        except sqlite3.DatabaseError as error:
            is_ended = primary_code(error) == sqlite3.SQLITE_INTERRUPT
            if (
                not is_ended
                and isinstance(error, sqlite3.OperationalError | sqlite3.ProgrammingError)
                and where
            ):
                reason = reason_of(error)
                raise UsageError(f"the condition {where!r} cannot be used: {reason}") from None
            raise self._unanswered(error) from None

    def _unanswered(self, error: sqlite3.Error) -> StoreError:
        return unanswered(f"read the store {self.path}", self.path, error, self._limit)


def open_run(
    run: str | os.PathLike[str],
    *,
    limit: TimeLimit | None = None,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
) -> StoredRun:
    """Open a recorded run for reading: a run folder, or its `run.db`.

    Args:
        run: The run folder or its `run.db`.
        limit: Time limit of one query; 20 seconds by default.
        busy_timeout_s: How long to wait while another program locks the file.

    Raises:
        StoreError: There is no store, or it is damaged, foreign or newer.
    """
    return StoredRun(store_path(run), limit=limit, busy_timeout_s=busy_timeout_s)


def frame_library(name: str | None = None) -> tuple[str, Any]:
    """Return the name and the module of the data-frame library to use."""
    if name is not None and name not in FRAME_LIBRARIES:
        raise unknown_name("data-frame library", name, FRAME_LIBRARIES)
    for candidate in FRAME_LIBRARIES if name is None else (name,):
        with contextlib.suppress(ImportError):
            return candidate, importlib.import_module(candidate)
    wanted = name or " or ".join(FRAME_LIBRARIES)
    raise UsageError(
        f"data frames need {wanted}, which is not installed; use pip install "
        f"{name or FRAME_LIBRARIES[0]}, or .rows() for plain rows"
    )


def _chosen(name: str, columns: Sequence[str] | None = None) -> Table:
    """Return a table with only the chosen columns."""
    if name not in TABLES:
        raise unknown_name("table", name, TABLES)
    table = TABLES[name]
    if columns is None:
        return table
    for column in columns:
        if column not in table.names:
            raise unknown_name(f"column of {name}", column, table.names)
    return dataclasses.replace(table, columns=tuple(table.column(each) for each in columns))


def _polars(module: Any, table: Table, rows: list[tuple[Any, ...]]) -> Any:
    types = {"INTEGER": module.Int64, "REAL": module.Float64, "TEXT": module.String}
    frame = module.DataFrame(
        rows, schema={column.name: types[column.sql] for column in table.columns}, orient="row"
    )
    flags = [column.name for column in table.columns if column.is_flag]
    return frame.with_columns(module.col(flags).cast(module.Boolean)) if flags else frame


def _pandas(module: Any, table: Table, rows: list[tuple[Any, ...]]) -> Any:
    # Nullable types keep a missing integer missing, instead of turning the column into floats.
    types = {"INTEGER": "Int64", "REAL": "Float64", "TEXT": "string"}
    frame = module.DataFrame.from_records(rows, columns=list(table.names))
    return frame.astype(
        {
            column.name: "boolean" if column.is_flag else types[column.sql]
            for column in table.columns
        }
    )


# ---- The history of one network


T = TypeVar("T", SlotRecord, DecisionRecord, DeepeningRecord, StackRecord, EpochRecord, SeedRecord)

_ABSENT = {float: math.nan, int: 0, bool: False, str: ""}
"""Default values of required fields, for NULL in the store."""


def read_history(
    run: StoredRun,
    every: int = 1,
    *,
    round: int = 0,
    row: int = 0,
    between: tuple[float, float] | None = None,
) -> list[EpochRecord]:
    """Return the epochs of one network as they were recorded.

    Args:
        run: Where they were recorded.
        every: Read one epoch in so many, and the last.
        round: The round of training it was grown in; 0 for a growing run.
        row: Its row of that round; 0 for a growing run.
        between: Read only the epochs from the one to the other.
    """
    here: list[Any] = [round, row]
    where = '"round" = ? AND "row" = ?'
    if between is not None:
        where, here = f"{where} AND step >= ? AND step <= ?", [*here, *between]
    if every > 1:
        last = run.query(f"SELECT MAX(step) FROM epochs WHERE {where}", here, timeout_s=ANSWER_S)
        where, here = f"{where} AND (step % ? = 0 OR step = ?)", [*here, every, last.rows[0][0]]

    def read(table: str) -> Iterator[Row]:
        return run.records(table, where=where, parameters=here)

    slots: dict[int, dict[str, SlotRecord]] = {}
    used: dict[int, str] = {}
    for stage in read("seed_stages"):
        assert isinstance(stage, StageRow)
        found = slots.setdefault(stage.step, {})
        found[str(stage.slot)] = _record(SlotRecord, stage, name=stage.slot)
        used[stage.ordinal] = str(stage.slot)
    decisions: dict[int, DecisionRecord] = {}
    woken: dict[int, list[DeepeningRecord]] = {}
    for decision in read("decisions"):
        assert isinstance(decision, DecisionRow)
        # Blocks may wake several times in an epoch; `decision` is the first.
        decisions.setdefault(decision.step, _record(DecisionRecord, decision))
        if decision.op == DEEPEN:
            woken.setdefault(decision.step, []).append(
                _record(
                    DeepeningRecord,
                    decision,
                    stack=str(decision.slot),
                    before=decision.blocks_before or 0,
                    after=decision.blocks_after or 0,
                    step=decision.training_step or 0,
                )
            )
    stacks: dict[int, list[StackRecord]] = {}
    for stack in read("stacks"):
        assert isinstance(stack, StackRow)
        found_stack = _record(StackRecord, stack, name=str(stack.stack))
        stacks.setdefault(stack.step, []).append(found_stack)
    names = [str(name) for name in run.info.slots or ()]
    if not set(used.values()) <= set(names):
        # In a run over several tasks the slots of a row may be those of another task.
        names = [used[ordinal] for ordinal in sorted(used)]
    history = []
    for epoch in read("epochs"):
        assert isinstance(epoch, EpochRow)
        found = slots.get(epoch.step, {})
        history.append(
            _record(
                EpochRecord,
                epoch,
                epoch=epoch.step,
                slots=tuple(found.get(name) or _empty_slot(name) for name in names),
                decision=decisions.get(epoch.step),
                rollback=epoch.rollback_reason,
                depth=_depth(epoch, stacks.get(epoch.step, ()), woken.get(epoch.step, ())),
            )
        )
    return history


def read_seeds(run: StoredRun, *, round: int = 0, row: int = 0) -> list[SeedRecord]:
    """Return the seeds of one network in order of germination; see `read_history`."""
    found = run.records("seeds", where='"round" = ? AND "row" = ?', parameters=[round, row])
    rows = [one for one in found if isinstance(one, SeedRow)]
    return [_record(SeedRecord, one) for one in sorted(rows, key=lambda one: one.ordinal)]


def _depth(
    epoch: EpochRow, stacks: Sequence[StackRecord], woken: Sequence[DeepeningRecord]
) -> DepthRecord | None:
    """Return the depth of a network at an epoch; None without stacks."""
    if not stacks:
        return None
    return DepthRecord(
        step=epoch.training_steps or 0,
        flops=epoch.training_flops or 0.0,
        static_flops=epoch.static_flops or 0.0,
        stacks=tuple(stacks),
        deepenings=tuple(woken),
    )


def _record(kind: type[T], row: Row, **given: Any) -> T:
    """Return a row as a record."""
    for name, absent in _NEEDED[kind.__name__].items():
        if name not in given and getattr(row, name) is None:
            given[name] = absent
    return copy_fields(kind, row, **given)


def _needed(kind: type[Any]) -> dict[str, Any]:
    """Return the default value of each required field."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: _ABSENT[hints[name]] for name in names if hints[name] in _ABSENT}


_NEEDED = {kind.__name__: _needed(kind) for kind in T.__constraints__}


def _empty_slot(name: str) -> SlotRecord:
    empty = StageRow(stage=SeedStage.DORMANT.name, alpha=0.0, alpha_target=0.0)
    return _record(SlotRecord, empty, name=name)
