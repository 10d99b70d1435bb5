"""Columns and tables: a record class declares one table of the store.

`schema.py` declares the records with `column` and `key`. The SQL that creates the tables, the
writer and the documentation use the `Table` made from the class.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, TypeVar

SqlType = Literal["INTEGER", "REAL", "TEXT"]

_SQL_TYPES: dict[type, SqlType] = {int: "INTEGER", bool: "INTEGER", float: "REAL", str: "TEXT"}


T = TypeVar("T")


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def record(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass with keyword arguments."""
    return dataclass(frozen=True, slots=True, kw_only=True)(kind)


@record
class Row:
    """Base of every record: frozen, with one field per column of its table."""


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: how it is stored and what it means."""

    name: str
    sql: SqlType
    unit: str
    meaning: str
    is_key: bool
    is_required: bool
    is_volatile: bool
    is_json: bool
    is_flag: bool
    default: Any

    @property
    def declaration(self) -> str:
        """The column in a CREATE TABLE."""
        return f'"{self.name}" {self.sql}{" NOT NULL" if self.is_required else ""}'


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """One table: its columns, its key, and how a record becomes a row.

    Compared by identity, because it is looked up for every row that is written.
    """

    name: str
    meaning: str
    record: type[Row]
    columns: tuple[Column, ...]
    indexes: tuple[tuple[str, ...], ...]
    is_numbered: bool
    """Whether the writer numbers rows by `ordinal` within the rest of the key."""
    is_versioned: bool
    """Whether a later row with the same key replaces the earlier one for readers."""
    values: Callable[[Row], tuple[Any, ...]]
    """Returns a record's values in the order of the columns."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns, in order."""
        return tuple(column.name for column in self.columns)

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the columns that identify a row."""
        return tuple(column.name for column in self.columns if column.is_key)

    @property
    def stored_as(self) -> str:
        """Name of the SQL table that holds the rows; a versioned table is read through a view."""
        return f"{self.name}_versions" if self.is_versioned else self.name

    def column(self, name: str) -> Column:
        """Return the column with this name."""
        return next(column for column in self.columns if column.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A table's JSON column as rows: one per name in it, with the key of the row it is from."""

    name: str
    meaning: str
    table: str
    column: str
    name_column: str
    """Name of the column with the names."""
    values: Mapping[str, str]
    """Meaning by column. `value` is the value itself, other columns are its members."""


VIEWS: dict[str, View] = {}
"""Every view by name, in the order of the documents."""

TABLES: dict[str, Table] = {}
"""Every table by name, in the order of the documents."""

TABLE_OF: dict[type[Row], Table] = {}
"""Every table by the class of its records."""


def key(meaning: str, default: Any = 0) -> Any:
    """Declare a column of the key."""
    return _field("", meaning, default, is_key=True)


def column(unit: str, meaning: str, *, default: Any = None, volatile: bool = False) -> Any:
    """Declare a column: unit, meaning, and whether identical runs may differ in it.

    A missing value is None. Mappings and sequences are stored as JSON text.
    """
    return _field(unit, meaning, default, is_volatile=volatile)


def _field(unit: str, meaning: str, default: Any, **marks: bool) -> Any:
    return dataclasses.field(
        default=default, metadata={"unit": unit, "meaning": meaning, "marks": marks}
    )


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def table(
    name: str,
    meaning: str,
    *,
    indexes: tuple[tuple[str, ...], ...] = (),
    numbered: bool = False,
    versioned: bool = False,
) -> Callable[[type[R]], type[R]]:
    """Return a decorator that makes a class the record of a table."""

    def declare(kind: type[R]) -> type[R]:
        made_of = record(kind)
        hints = typing.get_type_hints(made_of)
        columns = tuple(_column(field, hints[field.name]) for field in dataclasses.fields(made_of))
        made = Table(
            name=name,
            meaning=meaning,
            record=made_of,
            columns=columns,
            indexes=indexes,
            is_numbered=numbered,
            is_versioned=versioned,
            values=operator.attrgetter(*(column.name for column in columns)),
        )
        TABLES[name] = TABLE_OF[made_of] = made
        return made_of

    return declare


def unfold(
    view: str, meaning: str, *, of: str, column: str, name: str, values: Mapping[str, str]
) -> None:
    """Declare a view that unfolds the JSON `column` of the table `of`; see `View`."""
    VIEWS[view] = View(
        name=view, meaning=meaning, table=of, column=column, name_column=name, values=values
    )


def _column(field: dataclasses.Field[Any], hint: Any) -> Column:
    members = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
    kinds = [member for member in members if member is not type(None)]
    marks = field.metadata["marks"]
    is_json = typing.get_origin(kinds[0]) is not None
    optional = type(None) in members and not marks.get("is_key", False)
    return Column(
        name=field.name,
        sql="TEXT" if is_json else _SQL_TYPES[kinds[0]],
        unit=field.metadata["unit"],
        meaning=field.metadata["meaning"],
        is_key=marks.get("is_key", False),
        is_required=not optional,
        is_volatile=marks.get("is_volatile", False),
        is_json=is_json,
        is_flag=kinds[0] is bool,
        default=field.default,
    )


# -------------------------------------------------------------------------------------- encoding


def plain_value(value: Any, column: Column) -> Any:
    """Return a value as number, text or None, which SQLite can store; NaN becomes None.

    Invalid Unicode, as in some paths, is escaped.
    """
    if value is None:
        return None
    if column.is_json:
        return json_text(value)
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, Enum):
        value = value.value if isinstance(value.value, str) else value.name
    if isinstance(value, str | PurePath):
        return storable_text(str(value))
    if isinstance(value, int):
        return int(value)
    number = _number(value)
    if isinstance(number, float) and math.isnan(number):
        return None
    return number


def json_text(value: Any) -> str:
    """Return nested data as the text of a JSON column."""
    return storable_text(json.dumps(plain_data(value), sort_keys=True))


def plain_data(value: Any) -> Any:
    """Return nested data as strict JSON; numbers that are not finite become None."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_data(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    number = _number(value)
    if isinstance(number, float) and not math.isfinite(number):
        return None
    return number


def storable_text(text: str) -> str:
    """Return text with invalid Unicode escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _number(value: Any) -> int | float:
    """Return a number of any library as a Python number; raise TypeError for anything else."""
    if isinstance(value, int | float):
        return value
    # NumPy numbers and tensors of one element.
    item = getattr(value, "item", None)
    if callable(item):
        found = item()
        if isinstance(found, int | float):
            return found
    raise TypeError(f"{type(value).__name__} is not a number, text, flag or plain data")
