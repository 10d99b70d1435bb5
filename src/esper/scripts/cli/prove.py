"""`esper prove`: say which controller beats which, by how much and with what certainty."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from esper.leyline.errors import UsageError
from esper.scripts.cli.main import Parser
from esper.scripts.cli.options import (
    PlayView,
    add_engine_options,
    add_options,
    chosen_cluster,
    given,
    locked,
    open_folder,
    print_members,
    resolve,
)
from esper.scripts.cli.output import (
    answer,
    err_console,
    interrupted,
    listed,
    new_table,
    out_console,
    safe,
    tell,
)
from esper.utils.files import atomic_write_text
from esper.utils.settings import change_settings

_EXAMPLES = """\
examples:
  esper prove --quick --out runs/quick                  tamiyo against five controls, here
  esper prove runs/tamiyo wait random periodic plateau heuristic:runs/search/heuristic.json \\
      schedule:runs/search/schedule.json contextual:runs/search/contextual.json static \\
      scratch:tamiyo --family image16_family --split select --out runs/proof
  esper prove patient=heuristic:plateau_epochs=9 heuristic wait --out runs/patience
  esper prove --resume --out runs/proof                 go on where it stopped
  esper prove --list --family image16_family            members, arms, benchmarks and their scores
  esper prove runs/tamiyo --benchmark digits-v1 --out runs/entry     an entry, ranked
"""


def set_up(parser: Parser) -> None:
    """Describe the verb and its options."""
    parser.description = (
        "Play arms on members of a family with paired seeds, under one limit of parameters and "
        "operations for all, and judge the first arm against every other: it beats, ties or loses."
    )
    parser.late_epilog = _epilog
    parser.add_argument(
        "arms",
        nargs="*",
        metavar="ARM",
        help="what is played, as SPEC or NAME=SPEC; the first is judged (default: tamiyo, wait, "
        "random, periodic, plateau, heuristic)",
    )
    parser.add_argument(
        "--benchmark",
        metavar="NAME",
        help="play the named public benchmark: ARM, if any, against all controls (default: none)",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds on a member (default: 8)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="digits, 8 members, 3 seeds, 40 epochs: minutes on two cores",
    )
    add_options(parser, split="select")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command."""
    from esper.lab.proof.arm import KINDS
    from esper.lab.proof.play import Player
    from esper.lab.proof.prove import Proof, ProveConfig, describe_benchmarks, publishable
    from esper.lab.proof.results import write_report
    from esper.nissa.recorded import stop_signals

    if options.list:
        config = make(options)
        members = config.members.find(config.opening)
        return print_members(members, options.json, KINDS, describe_benchmarks())
    config = open_folder(ProveConfig, options, make)
    members = config.members.find(config.opening)
    folder = Path(options.out)
    with locked(folder), stop_signals() as stopped, chosen_cluster(options) as cluster:
        view = PlayView(err_console(), f"proving on {len(members)} members")
        player = Player(config.play, view.show, lambda: bool(stopped), cluster)
        proof = Proof(config, members, folder, player)
        with view:
            is_done = proof.run()
        if not is_done:
            return interrupted(f"esper prove --resume --out {options.out}")
        found = proof.conclude()
        if cluster is not None:
            work = [dataclasses.asdict(each) for each in cluster.take_work()]
            atomic_write_text(folder / "cluster.json", json.dumps(work, indent=1) + "\n")
        atomic_write_text(folder / "results.json", json.dumps(found, indent=1) + "\n")
        atomic_write_text(folder / "report.md", write_report(found))
        if config.benchmark:
            scores = json.dumps(publishable(found), indent=1) + "\n"
            atomic_write_text(folder / "scores.json", scores)
    return answer(options.json, found, lambda: print_verdicts(found, folder))


def make(options: argparse.Namespace) -> Any:
    """Turn options into a configuration."""
    from esper.lab.proof.prove import ProveConfig, check_entry, get_benchmark

    if options.benchmark:
        if len(options.arms) > 1 or options.quick:
            raise UsageError("a benchmark is one entry against its controls; name one ARM at most")
        entry = _absolute(options.arms[0]) if options.arms else None
        config = resolve(get_benchmark(options.benchmark).config(entry), options)
        if options.seeds is not None:
            config = config.replace(seeds=options.seeds)
        check_entry(config)
        return config
    # With fewer members no verdict could survive the correction for four controls.
    quick = {"seeds": 3, "members.count": 8, "play.horizon": 40} if options.quick else {}
    # Files are named so that a run can be continued from anywhere.
    arms = [_absolute(text) for text in options.arms]
    named = given({"arms": arms or None, "seeds": options.seeds})
    return resolve(change_settings(ProveConfig(), {**quick, **named}), options)


def _absolute(text: str) -> str:
    """Return an arm whose file, if it names one, is meant from wherever."""
    from esper.lab.proof.arm import SCRATCH

    head, colon, tail = text.rpartition(":") if ":" in text else ("", "", text)
    if head.rpartition("=")[2] == SCRATCH:
        return text  # It names another arm, be there a folder of that name or not.
    path = Path(tail).expanduser()
    return f"{head}{colon}{path.absolute()}" if path.exists() else text


def print_verdicts(found: dict[str, Any], folder: Any) -> None:
    """Print what may be said, and the arms in a table."""
    console = out_console()
    styles = {"beats": "green", "ties": "yellow", "loses": "red"}
    for comparison, line in zip(found["comparisons"], found["verdicts"], strict=True):
        text = safe(line)
        text.stylize(styles[comparison["verdict"]])
        console.print(text, soft_wrap=True)
    columns = {
        "test score": "test_score",
        "error": "error",
        "parameters": "parameters",
        "FLOPs": "flops",
        "run FLOPs": "total_flops",
        "fossilized": "fossilized",
    }
    table = new_table("Arms", ("arm", *columns), numbers=columns)
    for name, arm in found["arms"].items():
        table.add_row(safe(name), *(f"{arm[key]:.3f}" for key in columns.values()))
    console.print(table)
    tell(console, f"report: {folder / 'report.md'}")


def _epilog() -> str:
    from esper.lab.proof.arm import KINDS

    return f"{_EXAMPLES}\narms:\n{listed(KINDS)}"
