"""`esper tasks`: what can be grown here."""

from __future__ import annotations

import argparse
from typing import Any

from esper.cli.output import name_width, out_console, print_json, safe


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "tasks",
        help="list the tasks: host, slots, parameters, and whether their data was found",
        description="List what can be grown: each task is a data set with a host network.",
    )
    parser.add_argument(
        "--data", metavar="PATH", help="where data files lie (default: the usual places)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    from rich.table import Table

    from esper.tasks import TASKS, describe_task

    rows = [describe_task(name, options.data) for name in TASKS.names()]
    if options.json:
        print_json({"tasks": rows})
        return 0
    table = Table(title="Tasks", title_justify="left")
    for column in ("task", "host", "parameters", "input", "slots", "data", "what it is"):
        table.add_column(
            column,
            justify="right" if column == "parameters" else "left",
            no_wrap=column == "task",
            min_width=name_width(TASKS.names()) if column == "task" else None,
        )
    for row in rows:
        table.add_row(
            safe(row["name"]),
            safe(row["host"]),
            f"{row['parameters']:,}",
            "x".join(str(size) for size in row["input_shape"]),
            safe(", ".join(row["slots"])),
            safe(row["data"]["where"] or row["data"]["status"]),
            safe(row["summary"]),
        )
    out_console().print(table)
    return 0
