"""Collapse the heads of a training run, then measure which continuations rescue it.

A controller starts on the embedded digits with heads that are certain of one blueprint and one
tempo, and is trained as the briefing (004) describes its sick run: an entropy bonus, a penalty
below the entropy's floor, no probability floors. Copies of that run are then continued by `esper
train --resume` in several ways: as it is; with floors and KL(uniform, policy); and with both heads
started afresh as well. What every round decided and earned is compared. A quarter of an hour on two
busy cores.
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
from esper.leyline.controller import ENTROPY_FLOOR_PER_HEAD

HEADS = ("blueprint", "tempo")
"""The heads that the briefing found dead."""

COLLAPSED = 0.05
"""Normalised entropy below which the alarm `head_collapse` speaks of these heads."""

CERTAIN = 25.0
"""Nats by which one choice of these heads is ahead of all others at the start."""

BLUEPRINT, TEMPO = "norm", 1
"""That choice: a blueprint that brings next to nothing here, and the usual tempo."""

LATE = 2
"""Rounds at the end of a phase that its shares and returns are means of."""

TASKS = "benchmarks._brief_digits"
"""Where the task of the demonstration is registered."""

SICK: dict[str, object] = {
    "evaluate_every": 0,
    "population.lifecycle.gates.min_training_epochs": 3,
    "policy.lstm_hidden_dim": 64,
    "policy.floor.kind": "off",
    "ppo.entropy_coef": 0.05,
    "ppo.entropy_coef_end": 0.05,
    "ppo.exploration_kl": 0,
    "ppo.exploration.sparse_entropy": 0,
    "ppo.exploration.sparse_curiosity": 0,
}
"""The briefing's run: entropy and its floor penalty (as in all recipes), and nothing else."""

PULL: dict[str, object] = {"policy.floor.kind": "mixture", "ppo.exploration_kl": 0.1}
"""Floors supply data, KL(uniform, policy) the gradient that a certain head has left."""


@dataclass(frozen=True)
class Arm:
    """One way to go on from the collapsed run."""

    name: str
    settings: dict[str, object]
    resets: bool = False


AS_IT_IS = Arm("left as it is", {})
ARMS = (
    AS_IT_IS,
    Arm("floors and exploration KL", PULL),
    Arm("the same, heads reset", PULL, resets=True),
)


def main(arguments: Sequence[str]) -> int:
    """Collapse a run, continue it in every way, and print what became of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks recovery", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the runs (default: none is kept)")
    parser.add_argument("--task", default="digits_brief", help="what the networks learn")
    parser.add_argument("--rows", type=int, default=12, help="networks side by side")
    parser.add_argument("--steps", type=int, default=20, help="decisions of an episode")
    parser.add_argument("--sick", type=int, default=2, help="rounds of the collapsed run")
    parser.add_argument("--more", type=int, default=4, help="rounds of every way to go on")
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
    start, sick = folder / "one-sided", folder / "collapsed"
    if not sick.exists():
        make_one_sided(start, options.seed)
        _esper(
            *("--import", TASKS, "train", "digits", "--task", options.task, "--device", "cpu"),
            *("--rounds", options.sick, "--envs", options.rows),
            *("--episode-length", options.steps, "--seed", options.seed),
            *_settings({**SICK, "start": start}),
            *("--out", sick),
        )
    phases = {"collapsed": read_rounds(sick)}
    for arm in ARMS:
        run = folder / arm.name.replace(" ", "-").replace(",", "")
        if not run.exists():
            shutil.copytree(sick, run)
            settings = {"rounds": options.sick + options.more, **arm.settings}
            _esper(
                *("--import", TASKS, "train", "--resume", *_settings(settings)),
                *(("--reset-heads", ",".join(HEADS)) if arm.resets else ()),
                *("--out", run),
            )
        phases[arm.name] = read_rounds(run)[options.sick :]
    return {"phases": phases, "criteria": judge(phases)}


def make_one_sided(folder: Path, seed: int) -> None:
    """Save a fresh policy that is certain of one blueprint and one tempo."""
    from esper.simic.training.train import resolve_recipe
    from esper.simic.training.vectorized import Trainer
    from esper.tamiyo.controllers.policy_file import save_policy

    config = resolve_recipe("digits", {**SICK, "seed": seed, "device": "cpu"})
    policy = Trainer(config).policy
    chosen = {"blueprint": policy.blueprint_names.index(BLUEPRINT), "tempo": TEMPO}
    with torch.no_grad():
        for head, choice in chosen.items():
            getattr(policy.network, f"{head}_head")[-1].bias[choice] += CERTAIN
    save_policy(folder, policy)


def _settings(settings: dict[str, object]) -> list[str]:
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def _esper(*arguments: object) -> None:
    """Carry out a command of `esper`, shown as one would type it."""
    from esper.scripts.cli.main import main as esper

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
    """Return what must hold: it collapsed, what rescues it does, and without that it lasts."""

    def ends(name: str, what: str) -> list[float]:
        # A head that nothing was drawn from holds no promise.
        values = [phases[name][-1]["heads"][head][what] for head in HEADS]
        return [math.nan if value is None else value for value in values]

    def row(what: str, values: Sequence[float], form: str, holds: bool) -> list[str]:
        return [what, ", ".join(f"{value:{form}}" for value in values), "yes" if holds else "no"]

    def share(name: str, head: str) -> float:
        """Return how much of the collapse's distance from uniform is left."""
        now, then = (
            phases[each][-1]["heads"][head]["from_uniform"] for each in (name, "collapsed")
        )
        return float(now / then)

    floors = [ENTROPY_FLOOR_PER_HEAD[head] for head in HEADS]
    sick = ends("collapsed", "entropy")
    is_sick = all(value < COLLAPSED for value in sick)
    found = [row(f"collapsed: entropies below {COLLAPSED}", sick, ".4f", is_sick)]
    for arm in ARMS:
        entropies = ends(arm.name, "entropy")
        if arm.resets:
            is_open = all(now >= least for now, least in zip(entropies, floors, strict=True))
            found.append(row(f"{arm.name}: above the floors of 004", entropies, ".2f", is_open))
        elif arm.settings:
            left = [share(arm.name, head) for head in HEADS]
            is_pulled = all(
                mine < share(AS_IT_IS.name, head) for head, mine in zip(HEADS, left, strict=True)
            )
            found.append(row(f"{arm.name}: nearer to uniform than without", left, ".0%", is_pulled))
        else:
            is_stuck = all(value < COLLAPSED for value in entropies)
            found.append(row(f"{arm.name}: still below {COLLAPSED}", entropies, ".4f", is_stuck))
    return found
