"""Show versions, devices, threads, data found, and what is missing.

Lists the optional packages that are not installed, with the command that installs them.

Examples:
  esper doctor
  esper doctor --json > doctor.json          for a bug report
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import answer, out_console, safe
from esper.utils.process import grouped, software_versions

_EXTRAS = {
    "dash": ("starlette", "uvicorn"),
    "export": ("onnx", "onnxscript"),
    "wandb": ("wandb",),
}


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--data", metavar="PATH", help="folder of the data files (default: see docs/data.md)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    found = examine(options.data)
    return answer(options.json, found, lambda: print_table(found))


def print_table(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the findings, section by section."""
    table = Table(show_header=False, title="Esper on this machine", title_justify="left")
    for section, entries in found.items():
        heading = section
        for names, value in _by_value(entries or {"nothing": ""}):
            table.add_row(heading, safe(", ".join(names)), safe(value))
            heading = ""
    out_console().print(table)


def _by_value(entries: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
    """Group names that have the same value."""
    names_by_value = grouped((value, name) for name, value in entries.items())
    return [(names, value) for value, names in names_by_value.items()]


def examine(data: str | None) -> dict[str, dict[str, Any]]:
    """Return the findings as plain data."""
    import torch

    from esper.lab.tasks import TASKS, describe_task

    devices: dict[str, Any] = {"cpu": f"{os.cpu_count()} cores"}
    for index in range(torch.cuda.device_count()):
        devices[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    missing = {
        extra: f"pip install 'esper-grow[{extra}]'"
        for extra, packages in _EXTRAS.items()
        if any(importlib.util.find_spec(package) is None for package in packages)
    }
    found = {name: describe_task(name, data)["data"] for name in TASKS.names()}
    return {
        "versions": software_versions(),
        "devices": devices,
        "threads": {"torch": torch.get_num_threads()},
        "data": {name: str(one["where"] or one["problem"]) for name, one in found.items()},
        "missing": missing,
    }
