"""`esper doctor`: versions, devices, threads, data found, and what is missing."""

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
    """Describe the verb and its options."""
    parser.description = "Show what Esper finds on this machine and what is missing."
    parser.add_argument(
        "--data", metavar="PATH", help="where data files lie (default: the usual places)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was found."""
    found = examine(options.data)
    return answer(options.json, found, lambda: print_table(found))


def print_table(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print what was found, section by section."""
    table = Table(show_header=False, title="Esper on this machine", title_justify="left")
    for section, entries in found.items():
        heading = section
        for names, value in _told_once(entries or {"nothing": ""}):
            table.add_row(heading, safe(", ".join(names)), safe(value))
            heading = ""
    out_console().print(table)


def _told_once(entries: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
    """Return entries of which the same is to be said together, in the order of the first."""
    told = grouped((value, name) for name, value in entries.items())
    return [(names, value) for value, names in told.items()]


def examine(data: str | None) -> dict[str, dict[str, Any]]:
    """Return everything the command shows, as plain data."""
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
