"""List the tasks and families with their sizes, slots and data.

A task is a data set with a host network; a family is a set of tasks that differ in size, data or
training.

Examples:
  esper tasks
  esper tasks --family digits_family
  esper grow --task digits                 grow the host of a task
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import answer, name_width, new_table, out_console, print_json, safe

if TYPE_CHECKING:
    from rich.console import Console

    from esper.lab.tasks import Family
    from esper.lab.tasks.family import FamilyMember, FamilySplit


_SPLITS: tuple[FamilySplit, ...] = ("train", "select", "claim")


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--family", metavar="NAME", help="list the axes and members of one family instead"
    )
    parser.add_argument(
        "--data", metavar="PATH", help="folder of the data files (default: see docs/data.md)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from esper.lab.tasks import FAMILIES, TASKS, describe_task, get_family

    if options.family is not None:
        family = get_family(options.family)
        document = {"family": {**_describe(family), "members": _members(family)}}
        return answer(options.json, document, lambda: _print_family(out_console(), family))
    rows = [describe_task(name, options.data) for name in TASKS.names()]
    families = [get_family(name) for name in FAMILIES.names()]
    if options.json:
        print_json({"tasks": rows, "families": [_describe(family) for family in families]})
        return 0
    console = out_console()
    _print_tasks(console, rows)
    _print_families(console, families)
    return 0


def _print_tasks(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the main facts of each task; `--json` has the others."""
    from esper.lab.tasks.task import EMBEDDED

    columns = ("task", "parameters", "slots", "data", "what it is")
    table = new_table("Tasks", columns, numbers=("parameters",), whole=("task",))
    for row in rows:
        slots, data = list(row["slots"]), row["data"]
        table.add_row(
            safe(row["name"]),
            f"{row['parameters']:,}",
            safe(" … ".join(dict.fromkeys((slots[0], slots[-1])))),
            EMBEDDED if data["where"] == EMBEDDED else data["status"],
            safe(row["summary"]),
        )
    console.print(table)


def _print_families(console: Console, families: list[Family]) -> None:
    columns = ("family", *_SPLITS, "what it is")
    table = new_table("Families", columns, numbers=_SPLITS, whole=("family",))
    table.columns[0].min_width = name_width(family.name for family in families)
    for family in families:
        sizes = (f"{len(family.members(split)):,}" for split in _SPLITS)
        table.add_row(safe(family.name), *sizes, safe(family.summary))
    console.print(table)
    console.print("Members: esper tasks --family NAME")


def _print_family(console: Console, family: Family) -> None:
    console.print(safe(f"{family.name}: {family.summary}"))
    axes = new_table("Axes", ("axis", "train", "select"))
    select = dict(family.select.items())
    for axis, values in family.train.items():
        axes.add_row(axis, *(safe(_values(axis, each)) for each in (values, select[axis])))
    console.print(axes)
    count = len(family.members("train"))
    console.print(f"train: {count:,} members of {len(family.architectures('train'))} architectures")
    for title, members in (("select", family.members("select")), *family.claims.items()):
        heading = title if title == "select" else f"claim: {title}"
        table = new_table(heading, ("member", "parameters"), numbers=("parameters",))
        for member in members:
            table.add_row(safe(member.label), f"{member.task().host_parameters:,}")
        console.print(table)
    if family.claim_draws is not None:
        console.print(
            f"claim: {family.claim_draws.count} members, drawn by the SHA-256 of the weights that "
            "are judged"
        )


def _values(axis: str, values: tuple[object, ...]) -> str:
    """Return the values of an axis; an absent number of classes or images means all."""
    has_all = axis in ("classes", "train_size")
    return ", ".join("all" if has_all and not value else str(value) for value in values)


def _describe(family: Family) -> dict[str, Any]:
    return {
        "name": family.name,
        "summary": family.summary,
        "slots": family.max_slots,
        "sizes": {split: len(family.members(split)) for split in _SPLITS},
        "axes": {
            split: {name: list(values) for name, values in axes.items()}
            for split, axes in (("train", family.train), ("select", family.select))
        },
    }


def _members(family: Family) -> list[dict[str, Any]]:
    """Return every member with its axis values, its split and, in claim, its purpose."""
    found = [
        _member(each, split) for split in ("train", "select") for each in family.members(split)
    ]
    for purpose, members in family.claims.items():
        found += [{**_member(each, "claim"), "purpose": purpose} for each in members]
    return found


def _member(member: FamilyMember, split: str) -> dict[str, Any]:
    values = dataclasses.asdict(member)
    return {"label": member.label, "split": split, **values, "rate": member.learning_rate}
