"""Compare runs side by side: scores, sizes, what grew, settings that differ.

Growing runs: scores, twins, parameters, FLOPs and what grew. Training runs: returns, gains,
behaviour, the normalised entropy of each head, and the settings that differ.

Examples:
  esper compare runs/first runs/patient
  esper compare runs/seed* --json
  esper compare runs/tamiyo runs/again           two training runs
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from esper.leyline.errors import UsageError
from esper.leyline.reasons import format_stacks
from esper.leyline.records import (
    StackRecord,
    copy_fields,
    seed_records,
    seeds_at_end,
    stacks_at_end,
)
from esper.nissa.columns import storable_text
from esper.nissa.folder import RunFolder
from esper.nissa.reader import open_run, read_history
from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import (
    answer,
    find_store,
    gain_text,
    new_table,
    out_console,
    points,
    safe,
)
from esper.scripts.cli.views import SHOWN, duration
from esper.utils.settings import flat_settings

# ---- Training runs


_OWN_LINES = ("recipe", "seed", "rounds")
"""Settings that have lines of their own."""


def read_training(folder: str) -> dict[str, Any]:
    """Return the summary of a training run, with its state and its settings."""
    from esper.simic.training.recorded import summarize_training

    path = Path(folder)
    with open_run(path) as stored:
        return {
            **summarize_training(stored),
            "run": folder,
            "state": stored.entry.state,
            "settings": flat_settings(RunFolder(path).read_config()),
        }


def differing(sides: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings that are not the same in all runs, with the value of each."""
    keys = dict.fromkeys(key for side in sides for key in side["settings"])
    values = {key: [side["settings"].get(key) for side in sides] for key in keys}
    return {key: each for key, each in values.items() if any(one != each[0] for one in each)}


def print_training(sides: Sequence[Mapping[str, Any]]) -> None:
    """Print runs as columns, with the settings that differ below."""
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
    add("validation gain, greedy policy, points", [_greedy(side["evaluation"]) for side in sides])
    others = {key: values for key, values in differing(sides).items() if key not in _OWN_LINES}
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


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="two or more run folders of the same kind"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
    parser.set_defaults(needs_no_torch=True)


@dataclass(frozen=True, slots=True)
class Side:
    """One run of the comparison; absent is None."""

    run: str
    state: str
    task: str | None
    controller: str | None
    seed: int | None
    epochs: int
    """Epochs done."""
    val_score: float | None
    twin_val_score: float | None
    test_score: float | None
    twin_test_score: float | None
    parameters_before: int | None
    parameters_after: int | None
    flops_before: int | None
    flops_after: int | None
    seeds: tuple[dict[str, Any], ...]
    """The life of every seed, in order."""
    stacks: tuple[StackRecord, ...] = ()
    """Of a network that was deepened: its stacks."""
    training_flops: float | None = None
    static_flops: float | None = None


_SEED_FIELDS = ("slot", "blueprint", "germinated", "ended", "fate")


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    if len(options.runs) < 2:
        raise UsageError("give two or more runs to compare; `esper runs` lists them")
    kinds = {folder: _kind(folder) for folder in options.runs}
    if len(set(kinds.values())) > 1:
        found = ", ".join(f"{folder} is of `esper {kind}`" for folder, kind in kinds.items())
        raise UsageError(f"only runs of the same kind can be compared: {found}")
    if kinds[options.runs[0]] == "train":
        return _compare_training(options.runs, as_json=options.json)
    sides = [read_side(folder) for folder in options.runs]
    document = {"runs": [asdict(side) for side in sides]}
    return answer(options.json, document, lambda: print_sides(sides))


def _kind(folder: str) -> str:
    """Return the kind of a run: grow or train."""
    find_store(folder)
    with open_run(folder) as stored:
        return str(stored.info.kind)


def _compare_training(folders: Sequence[str], *, as_json: bool) -> int:
    sides = [read_training(folder) for folder in folders]
    return answer(as_json, {"runs": sides}, lambda: print_training(sides))


def read_side(folder: str) -> Side:
    """Return what a growing run recorded."""
    with open_run(folder) as stored:
        info = stored.info
        history = read_history(stored)
        state = stored.entry.state
    last = history[-1] if history else None
    depth = None if last is None else last.depth
    is_over = state == "finished"
    lives = seeds_at_end(history, info.kept_epoch) if is_over else seed_records(history)
    return copy_fields(
        Side,
        info,
        run=storable_text(folder),
        state=state,
        epochs=len(history),
        val_score=_either(info.val_score, last and last.val_score),
        twin_val_score=_either(info.twin_val_score, last and last.twin_score),
        parameters_before=info.host_parameters,
        parameters_after=_either(info.parameters, last and last.parameters),
        flops_before=info.host_flops,
        flops_after=_either(info.flops, last and last.flops),
        seeds=tuple({name: getattr(life, name) for name in _SEED_FIELDS} for life in lives),
        stacks=stacks_at_end(history, info.kept_epoch if is_over else None),
        training_flops=None if depth is None else depth.flops,
        static_flops=None if depth is None else depth.static_flops,
    )


def print_sides(sides: Sequence[Side]) -> None:
    """Print runs as columns."""
    table = new_table("Runs compared", ("",))
    for side in sides:
        table.add_column(safe(side.run), overflow="fold")
    lines: dict[str, Callable[[Side], str]] = {
        "state": lambda side: side.state,
        "task": lambda side: side.task or "–",
        "controller": lambda side: side.controller or "–",
        "seed": lambda side: _count(side.seed),
        "epochs": lambda side: _count(side.epochs),
        "validation": lambda side: points(side.val_score),
        "validation, twin": lambda side: points(side.twin_val_score),
        "test": lambda side: points(side.test_score),
        "test, twin": lambda side: points(side.twin_test_score),
        "validation gain over the twin": lambda s: gain_text(s.val_score, s.twin_val_score),
        "test gain over the twin": lambda s: gain_text(s.test_score, s.twin_test_score),
        "parameters": lambda side: _sizes(side.parameters_before, side.parameters_after),
        "FLOPs": lambda side: _sizes(side.flops_before, side.flops_after),
        "blocks awake": lambda side: format_stacks(side.stacks) if side.stacks else "all",
        "training FLOPs": _training,
        "what grew": lambda side: _lives(side, is_kept=True),
        "what did not stay": lambda side: _lives(side, is_kept=False),
    }
    # Lines that would be empty for all runs are left out.
    if not any(side.stacks for side in sides):
        del lines["blocks awake"], lines["training FLOPs"]
    if all(side.stacks for side in sides):
        del lines["what grew"], lines["what did not stay"]
    for name, text_of in lines.items():
        # Line breaks between seeds stay; control characters in names are escaped.
        cells = ["\n".join(safe(part).plain for part in text_of(s).split("\n")) for s in sides]
        table.add_row(name, *map(Text, cells))
    out_console().print(table)


def _either(first: Any, second: Any) -> Any:
    return second if first is None else first


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _sizes(before: int | None, after: int | None) -> str:
    return " → ".join(_count(size) for size in dict.fromkeys((before, after)))


def _training(side: Side) -> str:
    """Return the training FLOPs of a deepened network."""
    if not side.training_flops or not side.static_flops:
        return "–"
    share = 100 * side.training_flops / side.static_flops
    return f"{side.training_flops:.4g}, {share:.0f} % of the static network's"


def _lives(side: Side, *, is_kept: bool) -> str:
    """Return the seeds that were kept, or those that were not, one per line."""
    parts = []
    for life in side.seeds:
        is_gone = life["fate"] in ("pruned", "dropped")
        if is_gone != is_kept:
            line = f"{life['blueprint']} at {life['slot']}, from epoch {life['germinated']}"
            parts.append(line if life["fate"] == "fossilized" else f"{line}, {life['fate']}")
    return "\n".join(parts) or "nothing"
