"""Search for the best fixed growth schedule and heuristic settings.

Successive halving: every plan plays a few seeds on every member, the better plans play more. Each
network is compared with the one of the same seed that never grows.

Examples:
  esper search --family image16_family --count 24 --out runs/search       64 plans, then 16, then 4
  esper search --rungs 16x2 4x4 --heuristics 4 --count 3 --out runs/small
  esper search --family depth_small --rungs 14x4 --out runs/depth         when to double the depth
  esper search --resume --out runs/search                                 continue after a stop

files in the folder:
  schedule.json    the best single schedule        esper grow --controller schedule:FILE
  heuristic.json   the heuristic's best settings   esper grow --controller heuristic:FILE
  privileged.json  the best schedule per member    esper prove ... privileged:FILE
  contextual.json  schedules by task descriptors   esper prove ... contextual:FILE
  split1.json      the same, by one comparison     esper prove ... contextual:FILE
  split2.json      the same, by two comparisons    esper prove ... contextual:FILE
  depth_*.json     the same choices among depths   --set depths='[2, 4]'
  lessons.json     a schedule for every train member of the family    esper clone FOLDER
  summary.json     the results in short
  results.jsonl    every network: errors, sizes, what it grew
  plans.json       the schedules that were tried, with --children
  ratios.jsonl     log ratios of errors against the wait controller, by member, plan and seed
"""

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
    print_line,
    safe,
)


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    what = parser.add_argument_group("what to search")
    what.add_argument(
        "--rungs",
        nargs="+",
        metavar="PxS",
        help="plans x seeds on every member, one pair per rung (default: 64x2 16x8 4x32)",
    )
    what.add_argument(
        "--children",
        nargs="+",
        type=int,
        metavar="N",
        help="plans to breed from the best of the first rung, one number per generation "
        "(default: none)",
    )
    what.add_argument(
        "--heuristics",
        type=int,
        metavar="N",
        help="settings of the heuristic to try (default: 16)",
    )
    what.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="random seed that the plans are drawn with (default: 0)",
    )
    what.add_argument(
        "--choose-by",
        choices=("val", "test"),
        help="rank plans by validation or test error; test only where no claim follows "
        "(default: val)",
    )
    add_options(parser, split="train")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
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
        # The plans found on some train members become lessons for all of them.
        taught = config.members.replace(labels=(), count=0).find(config.opening)
        search = Search(config, members, Path(options.out), player, taught)
        with view:
            is_done = search.run()
        if not is_done:
            return interrupted(f"esper search --resume --out {options.out}")
        found = search.conclude()
    return answer(options.json, found, lambda: print_summary(found))


def make(options: argparse.Namespace) -> Any:
    """Return the configuration of the options."""
    from esper.lab.proof.search import SearchConfig
    from esper.lab.tasks.family import get_family
    from esper.utils.settings import change_settings

    config = SearchConfig()
    own = get_family(options.family or config.members.family).search_settings
    named = chosen(options, "rungs", "children", "heuristics", "seed", "choose_by")
    return resolve(change_settings(config, {**own, **named}), options)


def print_summary(found: dict[str, Any]) -> None:
    """Print the best schedules and settings."""
    console, best = out_console(), found["best_single"]
    print_line(
        console,
        f"best single schedule: {best['plan']}: {best['schedule']}; log ratio over waiting "
        f"{best['log_ratio']:+.3f} (test {best['test_log_ratio']:+.3f}), "
        f"{best['parameters']:.2f} times the parameters, {best['flops']:.2f} times the FLOPs",
    )
    _print_choices("schedule", found)
    if "depths" in found:
        depths = found["depths"]
        worth = ", ".join(f"{depth}: {ratio:+.3f}" for depth, ratio in depths["log_ratios"].items())
        print_line(console, f"best single static depth: {depths['best_single']}; {worth}")
        _print_choices("depth", depths)
    if "heuristic" in found:
        tuned = found["heuristic"]
        settings = ",".join(f"{key}={value}" for key, value in tuned["settings"].items())
        print_line(
            console, f"heuristic: {tuned['log_ratio']:+.3f} with {settings or 'its defaults'}"
        )
    table = new_table("Best schedule of every member", ("member", "log ratio", "schedule"))
    for member, own in found["best_by_member"].items():
        table.add_row(safe(member), f"{own['log_ratio']:+.3f}", safe(own["schedule"]))
    console.print(table)


def _print_choices(what: str, found: dict[str, Any]) -> None:
    """Print what hindsight is worth, and the rules that choose by descriptors."""
    console = out_console()
    if worth := found["headroom"]:
        print_line(
            console,
            f"best {what} of each member in hindsight: {worth['hindsight']:+.3f} ± "
            f"{worth['standard_error']:.3f} over the best single one (log ratio, chosen on half of "
            f"{worth['seeds']:.0f} seeds, scored on the other half)",
        )
    for name, rule in found["rules"].items():
        print_line(
            console,
            f"{what} by descriptors, {name}: {rule['held_out_log_ratio']:+.3f} on members left "
            f"out; {rule['rule']}",
        )
