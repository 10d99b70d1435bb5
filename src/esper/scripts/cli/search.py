"""`esper search`: look for schedules and settings by successive halving."""

from __future__ import annotations

import argparse
from typing import Any

from esper.scripts.cli.main import Parser
from esper.scripts.cli.options import (
    PlayView,
    add_options,
    chosen,
    open_folder,
    print_members,
    resolve,
)
from esper.scripts.cli.output import (
    answer,
    err_console,
    interrupted,
    new_table,
    out_console,
    safe,
    tell,
)

_EPILOG = """\
examples:
  esper search --family image16_family --count 24 --out runs/search       64 plans, then 16, then 4
  esper search --rungs 16x2 4x4 --heuristics 4 --count 3 --out runs/small
  esper search --resume --out runs/search                                 go on where it stopped

what it writes into the folder:
  results.jsonl    every network: errors, sizes, what it grew
  plans.json       the schedules that were tried, where some were bred
  ratios.jsonl     log ratios of errors over waiting, by member, plan and seed
  schedule.json    the best single schedule        esper grow --controller schedule:FILE
  privileged.json  the best schedule per member    esper prove ... privileged:FILE
  lessons.json     a schedule for every train member of the family    esper clone FOLDER
  contextual.json  schedules by task descriptors   esper prove ... contextual:FILE
  heuristic.json   the heuristic's best settings   esper grow --controller heuristic:FILE
  summary.json     all of it in short
"""


def set_up(parser: Parser) -> None:
    """Describe the verb and its options."""
    parser.description = (
        "Search schedules of growth and settings of the heuristic: all of them play a few seeds on "
        "every member, the better ones more. Every network lives within the same limits, and is "
        "compared with the waiting network of the same seed."
    )
    parser.epilog = _EPILOG
    what = parser.add_argument_group("what is searched")
    what.add_argument(
        "--rungs",
        nargs="+",
        metavar="PxS",
        help="plans x seeds on every member, rung by rung (default: 64x2 16x8 4x32)",
    )
    what.add_argument(
        "--children",
        nargs="+",
        type=int,
        metavar="N",
        help="plans bred from the best of the first rung, generation by generation (default: none)",
    )
    what.add_argument(
        "--heuristics", type=int, metavar="N", help="settings of the heuristic (default: 16)"
    )
    what.add_argument("--seed", type=int, metavar="S", help="names the plans (default: 0)")
    what.add_argument(
        "--choose-by",
        choices=("val", "test"),
        help="errors that decide (default: val; test only where nothing is claimed)",
    )
    add_options(parser, split="train")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command."""
    from pathlib import Path

    from esper.lab.proof.play import Player
    from esper.lab.proof.search import Search, SearchConfig
    from esper.nissa.recorded import stop_signals
    from esper.scripts.cli.options import locked

    if options.list:
        config = make(options)
        return print_members(config.members.find(config.opening), options.json, {})
    config = open_folder(SearchConfig, options, make)
    members = config.members.find(config.opening)
    with locked(options.out), stop_signals() as stopped:
        view = PlayView(err_console(), f"searching on {len(members)} members")
        player = Player(config.play, view.show, lambda: bool(stopped))
        # What was found on some train members says what to teach on all of them.
        taught = config.members.replace(labels=(), count=0).find(config.opening)
        search = Search(config, members, Path(options.out), player, taught)
        with view:
            is_done = search.run()
        if not is_done:
            return interrupted(f"esper search --resume --out {options.out}")
        found = search.conclude()
    return answer(options.json, found, lambda: print_summary(found))


def make(options: argparse.Namespace) -> Any:
    """Turn options into a configuration."""
    from esper.lab.proof.search import SearchConfig
    from esper.utils.settings import change_settings

    named = chosen(options, "rungs", "children", "heuristics", "seed", "choose_by")
    return resolve(change_settings(SearchConfig(), named), options)


def print_summary(found: dict[str, Any]) -> None:
    """Print what was found."""
    console, best = out_console(), found["best_single"]
    tell(
        console,
        f"best single schedule: {best['plan']}: {best['schedule']}; log ratio over waiting "
        f"{best['log_ratio']:+.3f} (test {best['test_log_ratio']:+.3f}), "
        f"{best['parameters']:.2f} times the parameters, {best['flops']:.2f} times the FLOPs",
    )
    rule = found["contextual"]
    tell(
        console,
        f"schedules by descriptors: {rule['held_out_log_ratio']:+.3f} on members left out "
        f"({rule['neighbours']} neighbours)",
    )
    if "heuristic" in found:
        tuned = found["heuristic"]
        settings = ",".join(f"{key}={value}" for key, value in tuned["settings"].items())
        tell(console, f"heuristic: {tuned['log_ratio']:+.3f} with {settings or 'its defaults'}")
    table = new_table("Best schedule of every member", ("member", "log ratio", "schedule"))
    for member, own in found["best_by_member"].items():
        table.add_row(safe(member), f"{own['log_ratio']:+.3f}", safe(own["schedule"]))
    console.print(table)
