"""Run one SQL SELECT on what a run recorded.

Prints the rows as a table, CSV or JSON. Nothing can be changed.

Examples:
  esper query runs/first "SELECT step, val_score FROM epochs ORDER BY val_score DESC LIMIT 5"
  esper query runs/first "SELECT op, COUNT(*) FROM decisions GROUP BY op" --csv
  esper query runs/first "SELECT term, AVG(mean), AVG(share) FROM round_terms GROUP BY term"
  esper query runs/first "SELECT * FROM alarms" --json
  esper query runs/first "SELECT name FROM sqlite_master"

The page Telemetry of the documentation lists every table and column with its unit.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from esper.leyline.errors import UsageError
from esper.nissa.query import query_run, stream_query
from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import err_console, find_store, out_console, safe, somebody_reads

_TABLE_ROWS = 200
_WIDE = 10
_CELL = 200


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("where", metavar="RUN", help="run folder")
    parser.add_argument("sql", metavar="SQL", help="one SELECT statement, in quotes")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the result as one JSON document")
    form.add_argument("--csv", action="store_true", help="print CSV with a header")
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help=f"most rows to print (default: {_TABLE_ROWS} in a table, all in CSV and JSON)",
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", default=60.0, help="time limit in seconds; 0: none"
    )
    parser.set_defaults(needs_no_torch=True)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.limit is not None and options.limit < 0:
        raise UsageError(f"--limit must be 0 or more, got {options.limit}")
    if not options.timeout >= 0:
        raise UsageError(f"--timeout must be 0 or more seconds, got {options.timeout}")
    path = find_store(options.where)
    timeout_s = options.timeout or None
    if options.csv or options.json:
        write = _print_csv if options.csv else _print_json
        write(path, options.sql, options.limit, timeout_s)
        return 0
    limit = _TABLE_ROWS if options.limit is None else options.limit
    result = query_run(
        path, options.sql, limit=limit, timeout_s=timeout_s, is_wanted=somebody_reads
    )
    print_table(result.columns, result.rows)
    if result.is_truncated:
        err_console().print(f"there are more than {limit} rows; see all with --csv, or --limit N")
    return 0


def _print_csv(path: Any, sql: str, limit: int | None, timeout_s: float | None) -> None:
    # A file gets exactly what was recorded; for a terminal control characters are escaped.
    shown = (lambda text: safe(text).plain) if sys.stdout.isatty() else str
    writer = csv.writer(sys.stdout, lineterminator="\n")
    with stream_query(path, sql, timeout_s=timeout_s, is_wanted=somebody_reads) as (columns, rows):
        first = next(rows, None)
        writer.writerow([shown(name) for name in columns])
        count = 0
        while first is not None and (limit is None or count < limit):
            writer.writerow(
                [shown(cell) if isinstance(cell, str) else cell for cell in map(_cell, first)]
            )
            count += 1
            first = next(rows, None)
    if first is not None:
        err_console().print(f"there are more than {limit} rows")


def _print_json(path: Any, sql: str, limit: int | None, timeout_s: float | None) -> None:
    """Print rows one at a time: the result may be larger than memory."""
    with stream_query(path, sql, timeout_s=timeout_s, is_wanted=somebody_reads) as (columns, rows):
        count, is_truncated = 0, False
        for row in rows:
            if limit is not None and count == limit:
                is_truncated = True
                break
            start = "," if count else f'{{"columns": {json.dumps(list(columns))}, "rows": ['
            named = {name: _plain(value) for name, value in zip(columns, row, strict=True)}
            print(f"{start}\n  {json.dumps(named)}", end="")
            count += 1
        if not count:
            print(f'{{"columns": {json.dumps(list(columns))}, "rows": [', end="")
    print(f'\n], "truncated": {json.dumps(is_truncated)}}}')


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows as one table, or with many columns as one table per row."""
    console = out_console()
    if len(columns) > _WIDE:
        for number, row in enumerate(rows, start=1):
            table = Table(title=f"row {number}", title_justify="left", show_header=False)
            for name, value in zip(columns, row, strict=True):
                table.add_row(safe(name), safe(_shown(value)))
            console.print(table)
        return
    table = Table()
    for index, name in enumerate(columns):
        numbers = all(isinstance(row[index], int | float | None) for row in rows)
        table.add_column(safe(name), justify="right" if numbers and rows else "left")
    for row in rows:
        table.add_row(*(safe(_shown(value)) for value in row))
    console.print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.9g}"
    text = str(_cell(value))
    return text if len(text) <= _CELL else f"{text[:_CELL]}… ({len(text):,} characters)"


def _cell(value: Any) -> Any:
    return f"x'{value.hex()}'" if isinstance(value, bytes) else value


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return _cell(value)
