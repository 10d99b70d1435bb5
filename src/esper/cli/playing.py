"""What `esper search` and `esper prove` share: members, how they are played, and what is shown."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import TextColumn

from esper.cli.main import Parser
from esper.cli.options import absolute, add_settings, given, refuse_beside_resume
from esper.cli.output import listed, new_table, out_console, print_json, safe, tell
from esper.cli.view import LiveView
from esper.leyline.errors import UsageError
from esper.leyline.settings import change_settings, parse_settings

if TYPE_CHECKING:
    from esper.proof.member import Member
    from esper.proof.play import Progress


def add_options(parser: Parser, *, split: str) -> None:
    """Describe the options that both commands have."""
    what = parser.add_argument_group("on which members")
    what.add_argument("--family", metavar="F", help="a family of tasks (default: digits_family)")
    what.add_argument(
        "--split", choices=("train", "select", "claim"), help=f"part of it (default: {split})"
    )
    what.add_argument(
        "--members", nargs="+", metavar="TEXT", help="only members with any of these in their label"
    )
    what.add_argument(
        "--count", type=int, metavar="N", help="so many of them, drawn by their family and split"
    )
    what.add_argument(
        "--open-claim",
        type=int,
        metavar="N",
        dest="opening",
        help="say that the claim members are looked at, for the first (1) or second (2) time; the "
        "result records it",
    )
    what.add_argument("--list", action="store_true", help="list the members and end")
    how = parser.add_argument_group("how")
    how.add_argument("--horizon", type=int, metavar="E", help="epochs (default: the members')")
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where (default: auto)")
    how.add_argument(
        "--rows", type=int, metavar="N", help="networks at once (default: 1024 on CUDA, 64 on CPU)"
    )
    how.add_argument("--data", metavar="PATH", help="file or folder of the data")
    add_settings(how, "such as play.param_limit=3; may be given again")
    where = parser.add_argument_group("where it goes")
    where.add_argument("--out", metavar="RUN", help="folder of the results")
    where.add_argument("--resume", action="store_true", help="continue what is in --out")
    where.add_argument("--overwrite", action="store_true", help="replace what is in --out")
    where.add_argument("--json", action="store_true", help="print one JSON document")


def resolve(config: Any, options: argparse.Namespace) -> Any:
    """Return a configuration with what the shared options say."""
    named = {
        "members.family": options.family,
        "members.split": options.split,
        "members.labels": options.members,
        "members.count": options.count,
        "opening": options.opening,
        "play.horizon": options.horizon,
        "play.device": options.device,
        "play.rows": options.rows,
        "play.data": None if options.data is None else absolute(options.data),
    }
    settings = parse_settings(options.settings or (), "play.param_limit=3")
    return change_settings(config, {**settings, **given(named)})


def open_folder(config_class: Any, options: argparse.Namespace, make: Any) -> Any:
    """Start or continue a folder, and return the configuration that holds there.

    Args:
        config_class: what the command is configured by.
        options: of the command line.
        make: returns a configuration from the options.
    """
    from esper.proof import folder

    if not options.out:
        raise UsageError("--out is missing; give a folder for the results")
    if not options.resume:
        config = make(options)
        config.members.find(config.opening)
        folder.start(options.out, config, overwrite=options.overwrite)
        return config
    kept = {"out", "resume", "json", "run", "arguments", "overwrite", "list", "quick", "imports"}
    kept |= {"engine", "address", "actors"}
    refuse_beside_resume(options, [name for name in vars(options) if name not in kept])
    return folder.read_config(options.out, config_class)


def print_members(
    members: tuple[Member, ...],
    as_json: bool,
    arms: dict[str, str],
    benchmarks: dict[str, dict[str, Any]] | None = None,
) -> int:
    """List the members that would be played, what can be played on them, and the benchmarks."""
    if as_json:
        found = {"members": [member.label for member in members], "arms": arms}
        print_json(found | ({} if benchmarks is None else {"benchmarks": benchmarks}))
        return 0
    console = out_console()
    table = new_table("Members", ("member", "host", "parameters", "slots", "horizon"))
    for member in members:
        task = member.task()
        table.add_row(
            safe(member.label),
            safe(task.config.host),
            f"{task.host_parameters:,}",
            str(len(task.slot_paths)),
            str(task.config.horizon),
        )
    console.print(table)
    if arms:
        console.print("Arms:")
        for line in listed(arms).splitlines():
            tell(console, line)
    for name, each in (benchmarks or {}).items():
        console.print(safe(f"Benchmark {name} ({each['checksum']}): {each['summary']}"))
        scores = each["scores"]
        told = "the controls' scores are not measured yet"
        if scores is not None:
            told = ", ".join(f"{arm} {one['score']:+.3f}" for arm, one in scores["arms"].items())
        tell(console, f"  {told}")
    return 0


class PlayView(LiveView):
    """Shows how far the playing is; use it as a context manager."""

    def __init__(self, console: Console, title: str) -> None:
        """Show what is running; how much there is to do comes with the first epoch."""
        counter = TextColumn("{task.fields[where]}", markup=False)
        super().__init__(console, counter, title=title, total=1.0, done=0.0, where="")

    def show(self, progress: Progress) -> None:
        """Take over one epoch of some networks."""
        self._progress.update(
            self._bar,
            total=progress.total,
            completed=progress.done,
            where=f"{progress.done / progress.total:.0%}, {progress.text}",
        )
        if self._live is not None:
            self._draw()
        elif self._is_line_due(time.monotonic(), matters=progress.done >= progress.total):
            left = progress.left_s
            eta = "" if left is None else f", about {left / 60:.1f} min left"
            tell(self._console, f"{progress.done / progress.total:.0%} {progress.text}{eta}")
