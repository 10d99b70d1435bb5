"""`esper blueprints`: what a network can be grown with."""

from __future__ import annotations

import argparse
from typing import Any

from esper.cli.output import name_width, out_console, print_json, safe
from esper.cli.parser import Parser

_WIDTHS = (8, 64)


def set_up(parser: Parser) -> None:
    """Describe the verb and its options."""
    parser.description = "List the kinds of seeds a network can be grown with."
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    from rich.table import Table

    rows = describe_blueprints()
    if options.json:
        print_json({"blueprints": rows})
        return 0
    table = Table(title="Blueprints (parameters at 8 and 64 channels)", title_justify="left")
    for column in ("id", "blueprint", "topologies", "at 8", "at 64", "what it is"):
        table.add_column(
            column,
            justify="right" if column in ("id", "at 8", "at 64") else "left",
            no_wrap=column == "blueprint",
            min_width=name_width(row["name"] for row in rows) if column == "blueprint" else None,
        )
    for row in rows:
        sizes = [list(by_width.values()) for by_width in row["parameters"].values()]
        table.add_row(
            str(row["id"]),
            safe(row["name"]),
            ", ".join(row["topologies"]),
            *(" / ".join(f"{n:,}" for n in sorted({size[i] for size in sizes})) for i in (0, 1)),
            safe(row["note"]),
        )
    out_console().print(table)
    return 0


def describe_blueprints() -> list[dict[str, Any]]:
    """Return every blueprint with its sizes, as plain data."""
    from esper.kasmina.blueprints import BLUEPRINTS, blueprint_names, count_parameters

    rows = []
    for index, name in enumerate(blueprint_names()):
        blueprint = BLUEPRINTS.get(name)
        rows.append(
            {
                "id": index,
                "name": name,
                "topologies": list(blueprint.topologies),
                "identity_at_start": list(blueprint.identity_at_start),
                "parameters": {
                    topology: {
                        str(width): count_parameters(blueprint, width, topology)
                        for width in _WIDTHS
                    }
                    for topology in blueprint.topologies
                },
                "selectable": name != "noop",
                "note": blueprint.note,
            }
        )
    return rows
