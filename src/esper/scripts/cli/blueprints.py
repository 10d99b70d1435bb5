"""List the blueprints of seeds with their parameters and FLOPs.

A blueprint is a kind of seed that a network can grow. Sizes are those at 8 and 64 channels.

Examples:
  esper blueprints
  esper blueprints --import my_blueprints.py --json     with blueprints of your own
"""

from __future__ import annotations

import argparse
from typing import Any

from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import answer, name_width, new_table, out_console, safe

_WIDTHS = (8, 64)
_WIDE = 140


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    rows = describe_blueprints()
    return answer(options.json, {"blueprints": rows}, lambda: print_table(rows))


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print blueprints as a table."""
    console = out_console()
    # A narrow terminal shows parameters only.
    costs = ("parameters", "flops") if console.width >= _WIDE else ("parameters",)
    numbers = [f"{_SHORT[cost]}at {width}" for cost in costs for width in _WIDTHS]
    columns = ("id", "blueprint", "topologies", *numbers, "what it is")
    table = new_table(_TITLES[costs], columns, numbers=("id", *numbers), whole=("blueprint",))
    table.columns[1].min_width = name_width(row["name"] for row in rows)
    for row in rows:
        table.add_row(
            str(row["id"]),
            safe(row["name"]),
            ", ".join(row["topologies"]),
            *(_over_topologies(row[cost], width) for cost in costs for width in _WIDTHS),
            safe(row["note"]),
        )
    console.print(table)


_SHORT = {"parameters": "", "flops": "FLOPs "}
_TITLES = {
    ("parameters",): "Blueprints (parameters at 8 and 64 channels)",
    ("parameters", "flops"): (
        "Blueprints (parameters, and FLOPs for 8 x 8 pixels or 64 tokens, at 8 and 64 channels)"
    ),
}


def _over_topologies(cost: dict[str, dict[str, int]], width: int) -> str:
    """Return the distinct costs of a blueprint at one width."""
    if not cost:
        return "its block's"
    return " / ".join(f"{n:,}" for n in sorted({sizes[str(width)] for sizes in cost.values()}))


def _shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Return the input shapes that FLOPs are counted for."""
    return {"cnn": (1, width, 8, 8), "sequence": (1, 64, width), "vector": (1, width)}


def describe_blueprints() -> list[dict[str, Any]]:
    """Return every blueprint with its costs, as plain data."""
    from esper.kasmina.blueprints import BLUEPRINTS, blueprint_names, count_parameters
    from esper.kasmina.costs import seed_flops

    rows = []
    for index, name in enumerate(blueprint_names()):
        blueprint = BLUEPRINTS.get(name)
        # A copy has the size of the block it copies.
        own_size = () if blueprint.is_copy else blueprint.topologies
        rows.append(
            {
                "id": index,
                "name": name,
                "kind": blueprint.kind,
                "topologies": list(blueprint.topologies),
                "identity_at_start": list(blueprint.identity_at_start),
                "immediate": [t for t in blueprint.topologies if blueprint.can_be_immediate(t)],
                "parameters": {
                    topology: {
                        str(width): count_parameters(blueprint, width, topology)
                        for width in _WIDTHS
                    }
                    for topology in own_size
                },
                "flops": {
                    topology: {
                        str(width): seed_flops(blueprint, topology, _shapes(width)[topology])
                        for width in _WIDTHS
                    }
                    for topology in own_size
                },
                "selectable": name != "noop",
                "note": blueprint.note,
            }
        )
    return rows
