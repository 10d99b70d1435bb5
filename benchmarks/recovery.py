"""Can a run whose heads have collapsed be rescued? Collapses one on real networks, then tries.

A controller is trained on the embedded digits with all that holds the heads for blueprint and tempo
open taken away, and with steps so long that they become certain. Copies of that run are then
continued by `esper train --resume` in several ways, and what each round decided is compared: left
alone; by entropy and the penalty below its floor, as the briefing (004) had it; by floors and
KL(uniform, policy); and by these with both heads started afresh. Minutes on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.table import print_table
from esper.leyline.actions import LifecycleOp
from esper.leyline.defaults import ENTROPY_FLOOR_PENALTY_COEF, ENTROPY_FLOOR_PER_HEAD

HEADS = ("blueprint", "tempo")
"""The heads that the briefing found dead."""

COLLAPSED = 0.05
"""Normalised entropy below which the alarm `head_collapse` speaks of these heads."""

TASKS = "benchmarks._brief_digits"
"""Where the task of the demonstration is registered."""

LATE = 2
"""Rounds at the end of a phase that its shares and returns are means of."""


def _of_heads(setting: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{setting}.{head}": values[head] for head in HEADS}


FRAGILE: dict[str, object] = {
    "evaluate_every": 0,
    "population.lifecycle.gates.min_training_epochs": 3,
    "policy.lstm_hidden_dim": 64,
    "policy.floor.kind": "off",
    "ppo.learning_rate": 0.0001,
    "ppo.learning_rate_end": 1.0,
    "ppo.target_kl": 0,
    "ppo.clip": 10,
    "ppo.max_grad_norm": 100,
    "ppo.head_weights": "equal",
    "ppo.entropy_coef": 0,
    "ppo.entropy_coef_end": 0,
    "ppo.exploration_kl": 0,
    "ppo.exploration.sparse_entropy": 0,
    "ppo.exploration.sparse_curiosity": 0,
    **_of_heads("ppo.entropy_floor_penalty", dict.fromkeys(HEADS, 0.0)),
    **_of_heads("ppo.lr_multipliers", dict.fromkeys(HEADS, 100.0)),
}
"""Nothing holds blueprint and tempo open or limits a step, and theirs are long; the rest hardly
moves, so that seeds are germinated as before."""

CALM: dict[str, object] = {
    "ppo.learning_rate": 0.003,
    "ppo.target_kl": 0.015,
    "ppo.clip": 0.5,
    "ppo.max_grad_norm": 5,
    "ppo.head_weights": "share",
    **_of_heads("ppo.lr_multipliers", dict.fromkeys(HEADS, 1.0)),
}
"""Ordinary steps again: whatever is tried, the cause is gone."""

ENTROPY: dict[str, object] = {
    "ppo.entropy_coef": 0.05,
    "ppo.entropy_coef_end": 0.05,
    **_of_heads("ppo.entropy_floor_penalty", ENTROPY_FLOOR_PENALTY_COEF),
}
"""What the briefing's run had: the entropy's bonus, and a penalty below its floor."""

PULL: dict[str, object] = {"policy.floor.kind": "mixture", "ppo.exploration_kl": 0.1}
"""Floors supply data, KL(uniform, policy) the gradient that a certain head has left."""


@dataclass(frozen=True)
class Arm:
    """One way to go on from the collapsed run."""

    name: str
    settings: dict[str, object]
    resets: bool = False
    pulls: bool = False
    """Whether something in it has a gradient where a head is certain."""


ARMS = (
    Arm("left alone", {}),
    Arm("entropy and its floor penalty", ENTROPY),
    Arm("floors and exploration KL", PULL, pulls=True),
    Arm("the same, heads reset", PULL, resets=True, pulls=True),
)


def main(arguments: Sequence[str]) -> int:
    """Collapse a run, continue it in every way, and print what became of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks recovery", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the runs (default: none is kept)")
    parser.add_argument("--task", default="digits_brief", help="what the networks learn")
    parser.add_argument("--rows", type=int, default=12, help="networks side by side")
    parser.add_argument("--steps", type=int, default=20, help="decisions of an episode")
    parser.add_argument("--collapse", type=int, default=5, help="rounds of the collapse")
    parser.add_argument("--rescue", type=int, default=4, help="rounds of every way to go on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for every round")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = options.out or Path(place)
        result = demonstrate(folder, options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print_table(*as_table(result["phases"]))
    print()
    print_table(["what must hold", "measured", "holds"], result["criteria"])
    return 0 if all(holds == "yes" for _, _, holds in result["criteria"]) else 1


def demonstrate(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return every round of the collapse and of every arm, with what must hold of them."""
    folder.mkdir(parents=True, exist_ok=True)
    sick = folder / "collapsed"
    if not sick.exists():
        _esper(
            *("--import", TASKS, "train", "digits", "--task", options.task, "--device", "cpu"),
            *("--rounds", options.collapse, "--envs", options.rows),
            *("--episode-length", options.steps, "--seed", options.seed),
            *_settings(FRAGILE),
            *("--out", sick),
        )
    phases = {"collapse": read_rounds(sick)}
    for arm in ARMS:
        run = folder / arm.name.replace(" ", "-").replace(",", "")
        if not run.exists():
            shutil.copytree(sick, run)
            rounds = {"rounds": options.collapse + options.rescue}
            _esper(
                *(
                    "--import",
                    TASKS,
                    "train",
                    "--resume",
                    *_settings({**rounds, **CALM, **arm.settings}),
                ),
                *(("--reset-heads", ",".join(HEADS)) if arm.resets else ()),
                *("--out", run),
            )
        phases[arm.name] = read_rounds(run)[options.collapse :]
    return {"phases": phases, "criteria": judge(phases)}


def _settings(settings: dict[str, object]) -> list[str]:
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def _esper(*arguments: object) -> None:
    """Carry out a command of `esper`, shown as one would type it."""
    from esper.cli.main import main as esper

    words = [str(argument) for argument in arguments]
    print(f"$ esper {shlex.join(words)}", file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(sys.stderr):
        code = esper(words)
    if code != 0:
        raise SystemExit(code)


def read_rounds(run: Path) -> list[dict[str, Any]]:
    """Return what every round of a run decided and earned, and how open its heads were."""
    import esper

    with esper.open_run(run) as stored:
        rounds = stored.rows(
            "rounds", columns=("round", "return_mean", "gain_mean", "op_counts", "seconds")
        )
        last = {
            (row["round"], row["ordinal"])
            for row in stored.rows("updates", columns=("round", "ordinal"), where="is_last = 1")
        }
        heads = stored.rows(
            "update_heads",
            columns=(
                *("round", "ordinal", "head"),
                *("entropy_conditional", "exploration_kl", "choices"),
            ),
            where=f"head IN ({', '.join('?' * len(HEADS))})",
            parameters=HEADS,
        )
    by_round: dict[int, dict[str, Any]] = {row["round"]: {} for row in rounds}
    for row in heads:
        if (row["round"], row["ordinal"]) in last:
            by_round[row["round"]][row["head"]] = {
                "entropy": row["entropy_conditional"],
                "from_uniform": row["exploration_kl"],
                "chosen": sum(count > 0 for count in row["choices"] or ()),
            }
    return [{**row, "heads": by_round[row["round"]]} for row in rounds]


def as_table(phases: dict[str, list[dict[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Return one row per phase: heads in its first and last round, means of its late ones."""
    header = ["", *(f"{head}: entropy" for head in HEADS), *(f"{head}: KL" for head in HEADS)]
    header += ["blueprints", "tempos", *(op.name for op in LifecycleOp), "return", "gain"]
    table = []
    for name, rounds in phases.items():
        late = rounds[-LATE:]
        counts = {op.name: sum(row["op_counts"][op.name] for row in late) for op in LifecycleOp}
        decided = sum(counts.values())
        table.append(
            [
                f"{name}, rounds {rounds[0]['round'] + 1} to {rounds[-1]['round'] + 1}",
                *(_moved(rounds, head, "entropy", ".3f") for head in HEADS),
                *(_moved(rounds, head, "from_uniform", ".1f") for head in HEADS),
                *(f"{fmean(row['heads'][head]['chosen'] for row in late):.1f}" for head in HEADS),
                *(f"{count / decided:.0%}" for count in counts.values()),
                f"{fmean(row['return_mean'] for row in late):+.2f}",
                f"{fmean(row['gain_mean'] for row in late):+.2f}",
            ]
        )
    return header, table


def _moved(rounds: Sequence[dict[str, Any]], head: str, what: str, form: str) -> str:
    """Return a figure of a head after the first and after the last round."""
    values = [row["heads"][head][what] for row in (rounds[0], rounds[-1])]
    return " to ".join("none drawn" if value is None else f"{value:{form}}" for value in values)


def judge(phases: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Return what must hold: it collapsed, what cannot rescue it did not, and what can did."""

    def ends(name: str, what: str) -> list[float]:
        # A head that nothing was drawn from holds no promise.
        values = [phases[name][-1]["heads"][head][what] for head in HEADS]
        return [math.nan if value is None else value for value in values]

    def row(what: str, values: Sequence[float], form: str, holds: bool) -> list[str]:
        return [what, ", ".join(f"{value:{form}}" for value in values), "yes" if holds else "no"]

    names = " and ".join(HEADS)
    sick, was = ends("collapse", "entropy"), ends("collapse", "from_uniform")
    is_sick = all(value < COLLAPSED for value in sick)
    floors = [ENTROPY_FLOOR_PER_HEAD[head] for head in HEADS]
    found = [row(f"collapse: entropy of {names} < {COLLAPSED}", sick, ".3f", is_sick)]
    for arm in ARMS:
        entropies = ends(arm.name, "entropy")
        shares = [now / then for now, then in zip(ends(arm.name, "from_uniform"), was, strict=True)]
        is_open = all(now >= least for now, least in zip(entropies, floors, strict=True))
        if arm.resets:
            found.append(row(f"{arm.name}: above the floors of 004", entropies, ".3f", is_open))
        elif arm.pulls:
            is_near = all(share < 0.5 for share in shares)
            found.append(row(f"{arm.name}: KL from uniform halved", shares, ".0%", is_near))
        else:
            found.append(
                row(f"{arm.name}: still below the floors of 004", entropies, ".3f", not is_open)
            )
    return found
