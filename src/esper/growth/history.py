"""The history of a run as a picture, and as tables for pandas and polars."""

from __future__ import annotations

import dataclasses
import html
import importlib
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline.errors import UsageError, unknown_name
from esper.leyline.records import (
    DecisionRecord,
    EpochRecord,
    RunSummary,
    SeedRecord,
    SizeRecord,
    SlotRecord,
    StackRecord,
    best_by_size,
)
from esper.utils.files import as_path, atomic_write_bytes

# ---- The picture


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """The picture of a run; a notebook displays it."""

    title: str
    svg: str
    """The drawing: one self-contained SVG."""

    def __repr__(self) -> str:
        """Return the title, and how to write the picture."""
        return f"Picture({self.title!r}; .save('growth.svg') writes it)"

    def _repr_svg_(self) -> str:
        """Return the drawing for a notebook."""
        return self.svg

    def save(self, path: str | Path) -> Path:
        """Write the picture as `.svg` or `.html`; return the path."""
        path = as_path(path, "growth.svg")
        kind = path.suffix.lower()
        if kind == ".html":
            title = html.escape(self.title)
            text = f'<!doctype html>\n<meta charset="utf-8">\n<title>{title}</title>\n{self.svg}\n'
        elif kind == ".svg":
            text = self.svg
        else:
            raise UsageError(
                f"a picture is written as .svg or .html, not {path.name!r}; write "
                f"'{path.stem or 'growth'}.svg' and convert it"
            )
        atomic_write_bytes(path, text.encode())
        return path


def draw_history(history: Sequence[EpochRecord], title: str) -> Picture:
    """Draw the scores of a run by epoch, and below them its slots or stacks."""
    # Loaded only when something is drawn.
    from esper.nissa.report import growth_picture

    return Picture(title, growth_picture(history, title=title))


# ---- Tables


TABLES = ("epochs", "actions", "slots", "stacks", "seeds", "sizes")
"""Names of the tables: epochs, decisions other than WAIT, slots or stacks in every epoch, seeds,
and the best validation score of each size."""

_DECIDED = ("op", "slot", "blueprint", "outcome", "reason")


@dataclass(frozen=True, slots=True)
class Table:
    """Columns with their types, and one tuple for each row."""

    columns: dict[str, Any]
    """By name: int, float, bool or str, with `| None` where a value may be absent."""
    rows: list[tuple[Any, ...]]

    def values(self) -> dict[str, list[Any]]:
        """Return the values of every column, by name."""
        names = list(self.columns)
        return {name: [row[index] for row in self.rows] for index, name in enumerate(names)}

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`; absent numbers are NaN or NA, never 0."""
        pandas = _import("pandas")
        frame = {}
        for name, values in self.values().items():
            kind, is_optional = _kind(self.columns[name])
            dtype = {int: "int64", float: "float64", bool: "bool", str: "string"}[kind]
            if kind is int and is_optional:
                dtype = "Int64"
            frame[name] = pandas.Series(values, dtype=dtype)
        return pandas.DataFrame(frame)

    def to_polars(self) -> Any:
        """Return a `polars.DataFrame`; absent values are null, never 0."""
        polars = _import("polars")
        kinds = {int: polars.Int64, float: polars.Float64, bool: polars.Boolean, str: polars.String}
        schema = {name: kinds[_kind(hint)[0]] for name, hint in self.columns.items()}
        return polars.DataFrame(self.values(), schema=schema)


def make_table(name: str, history: Sequence[EpochRecord], summary: RunSummary) -> Table:
    """Return one of the `TABLES` of a run.

    Args:
        name: name of the table.
        history: all epochs of the run.
        summary: how the run ended.
    """
    if name not in TABLES:
        raise unknown_name("table", name, TABLES)
    if name == "epochs":
        return _epochs(history, summary)
    if name == "actions":
        acted = [
            (record.epoch, decision)
            for record in history
            for decision in record.decisions
            if decision.op != "WAIT"
        ]
        return _records(DecisionRecord, acted)
    if name == "slots":
        return _records(SlotRecord, ((one.epoch, slot) for one in history for slot in one.slots))
    if name == "stacks":
        depths = [(one.epoch, one.depth) for one in history if one.depth is not None]
        return _records(
            StackRecord, ((epoch, stack) for epoch, depth in depths for stack in depth.stacks)
        )
    if name == "seeds":
        return _records(SeedRecord, ((None, seed) for seed in summary.seeds))
    return _records(SizeRecord, ((None, size) for size in best_by_size(history)))


def _epochs(history: Sequence[EpochRecord], summary: RunSummary) -> Table:
    """Return one row for each epoch, with the decisions after it."""
    hints = typing.get_type_hints(EpochRecord)
    measured = ("epoch", "train_loss", "val_loss", "val_score")
    last = ("stabilized", "plateau_epochs", "rollback", "statistics_samples", "seconds")
    columns: dict[str, Any] = {name: hints[name] for name in measured}
    columns |= {"twin_val_score": float | None, "val_gain": float | None}
    columns |= {"parameters": int, "flops": int, "is_kept": bool}
    columns |= {"action" if name == "op" else name: str | None for name in _DECIDED}
    columns |= {name: hints[name] for name in last}
    is_deepened = any(record.depth is not None for record in history)
    if is_deepened:
        depth = {"blocks_awake": int, "training_flops": float, "static_flops": float}
        columns |= {name: kind | None for name, kind in depth.items()}

    def rows() -> Iterator[tuple[Any, ...]]:
        for one in history:
            twin = one.twin_score
            row = [getattr(one, name) for name in measured]
            row += [twin, None if twin is None else one.val_score - twin]
            row += [one.parameters, one.flops, one.epoch == summary.kept_epoch]
            row += [_joined(getattr(each, name) for each in one.decisions) for name in _DECIDED]
            row += [getattr(one, name) for name in last]
            if one.depth is not None:
                row += [sum(one.depth.awake.values()), one.depth.flops, one.depth.static_flops]
            elif is_deepened:
                row += [None, None, None]
            yield tuple(row)

    return Table(columns, list(rows()))


def _records(kind: type[Any], found: Iterable[tuple[int | None, Any]]) -> Table:
    """Return records as rows; the first column is the epoch, if they have one."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    with_epoch = kind in (DecisionRecord, SlotRecord, StackRecord)
    columns = {"epoch": int} if with_epoch else {}
    columns |= {name: hints[name] for name in names}
    rows = [
        (*([epoch] if with_epoch else []), *(getattr(record, name) for name in names))
        for epoch, record in found
    ]
    return Table(columns, rows)


def _joined(values: Iterable[str | None]) -> str | None:
    """Join the distinct values of one epoch's decisions; None if there is none."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or None


def _kind(hint: Any) -> tuple[type, bool]:
    """Return the type of a column, and whether a value may be absent."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [option for option in options if option is not types.NoneType]
    return kinds[0], len(kinds) < len(options)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"grown.to_{name}() needs {name}: pip install {name}") from None
