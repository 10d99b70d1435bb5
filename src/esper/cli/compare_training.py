"""Training runs side by side: how their last rounds went, and which settings differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from esper.cli.output import new_table, out_console, safe
from esper.cli.train_view import SHOWN, duration
from esper.leyline.settings import flat_settings
from esper.nissa.listing import describe_run
from esper.runs.folder import RunFolder

_TOLD = ("recipe", "seed", "rounds")
"""Settings that have lines of their own."""


def read_training(folder: str) -> dict[str, Any]:
    """Return what the store of a training run says, with its state and its settings."""
    from esper.runs.training import summarize_training

    path = Path(folder)
    return {
        **summarize_training(path),
        "run": folder,
        "state": describe_run(path).state,
        "settings": flat_settings(RunFolder(path).read_config()),
    }


def differing(sides: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings that are not the same in all runs, with the value of each."""
    keys = dict.fromkeys(key for side in sides for key in side["settings"])
    values = {key: [side["settings"].get(key) for side in sides] for key in keys}
    return {key: each for key, each in values.items() if any(one != each[0] for one in each)}


def print_training(sides: Sequence[Mapping[str, Any]]) -> None:
    """Print runs as columns, and below them the settings in which they differ."""
    table = new_table("Training runs compared", ("",))
    for side in sides:
        table.add_column(safe(side["run"]), overflow="fold")

    def add(name: str, cells: Sequence[str]) -> None:
        table.add_row(name, *(Text(safe(cell).plain) for cell in cells))

    for name in ("state", "recipe", "task"):
        add(name, [str(side[name] or "–") for side in sides])
    add("seed", [str(side["seed"]) for side in sides])
    add("rounds", [f"{side['rounds']:,}" for side in sides])
    add("decisions", [f"{side['env_steps']:,}" for side in sides])
    add("time", [duration(side["seconds"]) for side in sides])
    add("means of the last rounds", [f"{side['last']['rounds']:,}" for side in sides])
    for key, name, form in SHOWN:
        values = [side["last"].get(key) for side in sides]
        if any(value is not None for value in values):
            add(name, ["–" if value is None else form.format(value) for value in values])
    for head in dict.fromkeys(head for side in sides for head in side["last"]["entropy"]):
        values = [side["last"]["entropy"].get(head) for side in sides]
        add(f"entropy, {head}", ["–" if value is None else f"{value:.2f}" for value in values])
    add("gain, greedy policy, points", [_greedy(side["evaluation"]) for side in sides])
    others = {key: values for key, values in differing(sides).items() if key not in _TOLD}
    if others:
        table.add_section()
        table.caption, table.caption_justify = "last: all other settings that differ", "left"
    for key, values in others.items():
        add(key, [str(value) for value in values])
    out_console().print(table)


def _greedy(evaluation: Mapping[str, Any] | None) -> str:
    if evaluation is None or evaluation["gain"] is None:
        return "–"
    return f"{evaluation['gain']:+.2f} ({evaluation['episodes']} episodes)"
