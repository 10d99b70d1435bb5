r"""Compare controllers on paired seeds, with confidence intervals and verdicts.

The controllers, here called arms, play the same seeds of a family of tasks under the same limits of
parameters and FLOPs. The verdict on the first arm against each other one is beats, ties or loses.

Examples:
  esper prove --quick --out runs/quick                  tamiyo against five controls, in minutes
  esper prove runs/tamiyo wait random periodic plateau heuristic:runs/search/heuristic.json \
      schedule:runs/search/schedule.json contextual:runs/search/contextual.json static \
      scratch:tamiyo --family image16_family --split select --out runs/proof
  esper prove patient=heuristic:plateau_epochs=9 heuristic wait --out runs/patience
  esper prove --resume --out runs/proof                 continue after a stop
  esper prove --list --family image16_family            members, arms, benchmarks and their scores
  esper prove runs/tamiyo --benchmark digits-v1 --out runs/entry     an entry, ranked
"""

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
    print_line,
    safe,
)
from esper.utils.files import atomic_write_text
from esper.utils.settings import change_settings


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.late_epilog = _arms
    parser.add_argument(
        "arms",
        nargs="*",
        metavar="ARM",
        help="controllers to compare, as SPEC or NAME=SPEC; the first is judged against the "
        "others (default: tamiyo, wait, random, periodic, plateau, heuristic)",
    )
    parser.add_argument(
        "--benchmark",
        metavar="NAME",
        help="play a public benchmark: at most one ARM against its controls (default: none)",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds per member (default: 8)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="8 members of digits, 3 seeds, 40 epochs: minutes on two cores",
    )
    add_options(parser, split="select")
    add_engine_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from esper.lab.proof.arm import KINDS
    from esper.lab.proof.benchmark import describe_benchmarks, publishable
    from esper.lab.proof.play import Player
    from esper.lab.proof.prove import Proof, ProveConfig
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
    """Return the configuration of the options."""
    from esper.lab.proof.arm import parse_arm, weights_digest
    from esper.lab.proof.benchmark import check_entry, get_benchmark
    from esper.lab.proof.prove import ProveConfig
    from esper.lab.tasks.family import get_family

    if options.benchmark:
        if len(options.arms) > 1 or options.quick:
            raise UsageError("--benchmark takes at most one ARM and no --quick; leave out the rest")
        entry = _absolute(options.arms[0]) if options.arms else None
        config = resolve(get_benchmark(options.benchmark).config(entry), options)
        if options.seeds is not None:
            config = config.replace(seeds=options.seeds)
        check_entry(config)
        return config
    # With fewer members no verdict survives the correction for multiple comparisons.
    quick = {"seeds": 3, "members.count": 8, "play.horizon": 40} if options.quick else {}
    # Paths are absolute, so that the run can be continued from any folder.
    arms = [_absolute(text) for text in options.arms]
    named = given({"arms": arms or None, "seeds": options.seeds})
    config = ProveConfig()
    own = get_family(options.family or config.members.family).proof_settings
    config = resolve(change_settings(config, {**own, **quick, **named}), options)
    if config.members.needs_claim_key:
        found = weights_digest(parse_arm(config.arms[0]))
        config = change_settings(config, {"members.claim_key": found})
    return config


def _absolute(text: str) -> str:
    """Return an arm whose file, if it names one, has an absolute path."""
    from esper.lab.proof.arm import SCRATCH

    head, colon, tail = text.rpartition(":") if ":" in text else ("", "", text)
    if head.rpartition("=")[2] == SCRATCH:
        return text  # It names another arm, even where a folder has that name.
    path = Path(tail).expanduser()
    return f"{head}{colon}{path.absolute()}" if path.exists() else text


def print_verdicts(found: dict[str, Any], folder: Any) -> None:
    """Print the verdicts and a table of the arms."""
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
    print_line(console, f"report: {folder / 'report.md'}")


def _arms() -> str:
    from esper.lab.proof.arm import KINDS

    return f"arms:\n{listed(KINDS)}"
