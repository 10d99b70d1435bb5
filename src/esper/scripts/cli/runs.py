"""List runs with their state, progress and scores.

Lists all runs below a folder, including searches, clones and proofs, newest first.

Examples:
  esper runs
  esper runs --root /mnt/experiments --json
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from rich.text import Text

from esper.leyline.reasons import format_gain
from esper.nissa.columns import storable_text
from esper.nissa.listing import find_runs
from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import err_console, new_table, out_console, points, print_json, safe

_ROOT = "runs"


_VALIDATION = ("val\nscore", "val\ngain")
_TEST = ("test\nscore", "test\ngain")
_STYLES = {"running": "cyan", "interrupted": "yellow", "finished": "green", "damaged": "red"}


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("--root", metavar="DIR", help=f"folder to search (default: {_ROOT})")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
    parser.set_defaults(needs_no_torch=True)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    root = Path(_ROOT if options.root is None else options.root)
    is_missing = options.root is None and not os.path.isdir(root)
    entries = [] if is_missing else find_runs(root)
    if options.json:
        print_json({"root": _text(root), "runs": [describe(entry) for entry in entries]})
    elif not entries:
        err_console().print(
            safe(
                f"there are no runs in {_text(root)}; look elsewhere with `esper runs --root "
                "FOLDER`, or start one with `esper grow` or `esper train`"
            )
        )
    else:
        print_table(entries)
    return 0


def describe(entry: Any) -> dict[str, Any]:
    """Return one run as plain data."""
    return {**dataclasses.asdict(entry), "path": _text(entry.path)}


def print_table(entries: list[Any]) -> None:
    """Print runs as a table."""
    has_notes = any(entry.note for entry in entries)
    is_tested = any(entry.test_score is not None for entry in entries)
    scores = (*_VALIDATION, *(_TEST if is_tested else ()))
    numbers = ("progress", *scores, "written")
    columns = ("run", "state", "task", "controller", *numbers, *["note"] * has_notes)
    table = new_table("Runs", columns, numbers=numbers, whole=("state", *numbers))
    for column in table.columns:
        column.overflow = "fold"
    for entry in entries:
        row: list[Text | str] = [
            safe(_short(_text(entry.path), 80)),
            Text(entry.state, style=_STYLES[entry.state]),
            safe(_short(entry.task or "", 40)),
            safe(_short(entry.controller or "", 40)),
            _progress(entry),
            points(entry.val_score),
            _gain(entry.val_score, entry.val_gain),
            *(
                [points(entry.test_score), _gain(entry.test_score, entry.test_gain)]
                if is_tested
                else ()
            ),
            _age(entry.age_s),
        ]
        table.add_row(*row, *[safe(_short(entry.note or "", 120))] * has_notes)
    out_console().print(table)


def _text(path: Path) -> str:
    return storable_text(str(path))


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length // 2]} … {text[-length // 2 :]}"


def _progress(entry: Any) -> str:
    if entry.done is None and entry.planned is None:
        return "–"
    done = "?" if entry.done is None else f"{entry.done:,}"
    return f"{done}/{entry.planned:,} {entry.unit}" if entry.planned else f"{done} {entry.unit}"


def _gain(score: float | None, gain: float | None) -> str:
    return "–" if score is None or gain is None else format_gain(score, score - gain)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
