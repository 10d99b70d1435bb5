"""`esper tasks`: what can be grown here."""

from __future__ import annotations

import argparse

from esper.cli.main import Parser
from esper.cli.output import name_width, out_console, print_json, safe

_COLUMNS = ("task", "host", "parameters", "FLOPs", "input", "slots", "data", "what it is")
_WIDE = 110


def set_up(parser: Parser) -> None:
    """Describe the verb and its options."""
    parser.description = "List what can be grown: each task is a data set with a host network."
    parser.add_argument(
        "--data", metavar="PATH", help="where data files lie (default: the usual places)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    from rich.table import Table

    from esper.tasks import TASKS, describe_task
    from esper.tasks.task import EMBEDDED

    rows = [describe_task(name, options.data) for name in TASKS.names()]
    if options.json:
        print_json({"tasks": rows})
        return 0
    console = out_console()
    table = Table(title="Tasks", title_justify="left")
    least = {"task": name_width(TASKS.names()), "parameters": 10, "data": len(EMBEDDED)}
    # A narrow terminal keeps what one chooses a task by.
    columns = [c for c in _COLUMNS if console.width >= _WIDE or c not in ("host", "FLOPs", "input")]
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in ("parameters", "FLOPs") else "left",
            no_wrap=column == "task",
            min_width=least.get(column),
        )
    for row in rows:
        cells = {
            "task": safe(row["name"]),
            "host": safe(row["host"]),
            "parameters": safe(f"{row['parameters']:,}"),
            "FLOPs": safe(f"{row['flops']:,}"),
            "input": safe("x".join(str(size) for size in row["input_shape"])),
            "slots": safe(", ".join(row["slots"])),
            "data": safe(row["data"]["where"] or row["data"]["status"]),
            "what it is": safe(row["summary"]),
        }
        table.add_row(*(cells[column] for column in columns))
    console.print(table)
    return 0
