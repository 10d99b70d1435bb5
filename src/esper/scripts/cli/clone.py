"""Train a policy to imitate the schedules that a search found.

The policy sees only what a controller sees (DAgger). In the first round the schedules act; in later
rounds the policy acts in more and more episodes and learns what the schedules would have done.

Examples:
  esper search --family image16_family --count 36 --out runs/search
  esper clone runs/search --out runs/clone
  esper prove runs/clone wait heuristic --family image16_family --out runs/proof
  esper train arena --set start=runs/clone --set ppo.anchor_kl=0.1 --out runs/tamiyo

files in the folder:
  policy/      the trained policy            esper grow --controller greedy:FOLDER
  clone.json   every round: losses, agreement with the schedules, scores of both
  state/       all episodes                  esper clone --resume --out FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from esper.leyline.errors import UsageError
from esper.scripts.cli.main import Parser
from esper.scripts.cli.options import (
    PlayView,
    add_options,
    chosen,
    locked,
    open_folder,
    print_members,
    read_config,
    resolve,
)
from esper.scripts.cli.output import (
    answer,
    err_console,
    interrupted,
    new_table,
    out_console,
    print_line,
)
from esper.utils.settings import change_settings


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "search",
        nargs="?",
        metavar="SEARCH",
        help="folder of an `esper search`; needed unless --resume",
    )
    what = parser.add_argument_group("how to train it")
    what.add_argument("--rounds", type=int, metavar="R", help="rounds of episodes (default: 5)")
    what.add_argument("--episodes", type=int, metavar="N", help="episodes a round (default: 256)")
    what.add_argument(
        "--passes", type=int, metavar="N", help="passes over all episodes a round (default: 30)"
    )
    what.add_argument("--seed", type=int, metavar="S", help="random seed (default: 0)")
    add_options(parser, split="train")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from esper.lab.proof.clone import CloneConfig, Cloner
    from esper.lab.proof.plans import read_plans
    from esper.lab.proof.play import Player
    from esper.nissa.recorded import stop_signals

    if options.list:
        return print_members(make(options).members.find(), options.json, {})
    config = open_folder(CloneConfig, options, make)
    members, plans = config.members.find(), read_plans(config.plans)
    with locked(options.out), stop_signals() as stopped:
        view = PlayView(err_console(), "cloning")
        player = Player(config.play.replace(rows=max(config.play.rows, config.episodes)))
        cloner = Cloner(
            config,
            members,
            plans,
            Path(options.out),
            player,
            view.show,
            lambda: bool(stopped),
        )
        with view:
            is_done = cloner.run()
        if not is_done:
            return interrupted(f"esper clone --resume --out {options.out}")
    found = cloner.summary()
    return answer(options.json, found, lambda: print_summary(found))


def make(options: argparse.Namespace) -> Any:
    """Return the configuration of the options."""
    from esper.lab.proof.clone import CloneConfig, find_taught
    from esper.lab.proof.plans import read_plans
    from esper.lab.proof.search import LESSONS_FILE, SearchConfig
    from esper.lab.tasks.family import get_family

    if not options.search:
        raise UsageError("SEARCH is missing; give the folder that `esper search` wrote")
    searched = read_config(options.search, SearchConfig)
    plans = Path(options.search).absolute() / LESSONS_FILE
    named = chosen(options, "rounds", "episodes", "passes", "seed")
    # Limits are those of the search; members are all that it has lessons for.
    everyone = searched.members.replace(labels=(), count=0)
    base = CloneConfig(plans=str(plans), members=everyone, play=searched.play)
    own = get_family(everyone.family).clone_settings
    config: CloneConfig = resolve(change_settings(base, {**own, **named}), options)
    # Errors are raised before the folder is created.
    find_taught(config.members.find(), read_plans(plans))
    return config


def print_summary(found: dict[str, Any]) -> None:
    """Print every round."""
    columns = {
        "round": "",
        "schedules act in": "teacher_share",
        "their score": "teacher_score",
        "clone's score": "clone_score",
        "loss": "loss",
        "held out": "held_out_loss",
        "same op where they act": "held_out_agreement",
    }
    table = new_table("Clone", columns, numbers=columns)
    for number, each in enumerate(found["rounds"], start=1):
        values = [each.get(key) for key in list(columns.values())[1:]]
        shares = ("teacher_share", "held_out_agreement")
        texts = [
            "–" if value is None else f"{value:.0%}" if key in shares else f"{value:.3f}"
            for key, value in zip(list(columns.values())[1:], values, strict=True)
        ]
        table.add_row(str(number), *texts)
    console = out_console()
    console.print(table)
    print_line(
        console, f"policy: {found['policy']}; use it with --controller greedy:{found['policy']}"
    )
