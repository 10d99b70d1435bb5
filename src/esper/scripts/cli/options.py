"""Options that several commands have, and what they mean."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import TextColumn

from esper.leyline.config import Config
from esper.leyline.errors import ConfigError, UsageError
from esper.nissa.database import LOCK_FILE
from esper.nissa.folder import RunFolder
from esper.nissa.listing import COMMAND
from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import (
    LiveView,
    listed,
    new_table,
    out_console,
    print_json,
    safe,
    tell,
)
from esper.utils.files import WriterLock
from esper.utils.settings import change_settings, parse_settings

if TYPE_CHECKING:
    from esper.lab.proof.play import Progress
    from esper.lab.tasks.member import AnyMember


def add_settings(group: Any, told: str) -> None:
    """Add `--set`; `told` goes on from "any other setting"."""
    group.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        dest="settings",
        help=f"any other setting (docs/settings.md), {told}",
    )


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not absent."""
    return {name: value for name, value in values.items() if value is not None}


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return those of the named options that were given."""
    return given({name: getattr(options, name) for name in names})


def absolute(path: str) -> str:
    """Return a path that means the same from wherever the run is resumed."""
    return str(Path(os.path.expanduser(path)).absolute())


def refuse_beside_resume(
    options: argparse.Namespace, names: Iterable[str], advice: str = ""
) -> None:
    """Refuse what contradicts --resume: replacing the run, or changing its settings.

    Args:
        options: of the command line.
        names: of the options that change settings.
        advice: goes on from what is to be left out.
    """
    if options.overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it; give one of them")
    changed = [
        _POSITIONAL.get(name, "--" + name.replace("_", "-"))
        for name in names
        if getattr(options, name) not in (None, [])
    ]
    if changed:
        raise UsageError(
            "--resume continues with the settings of the run; leave out "
            f"{', '.join(changed)}{advice}"
        )


_POSITIONAL = {"recipe": "RECIPE", "arms": "ARM", "search": "SEARCH"}


def add_engine_options(parser: Parser) -> None:
    """Describe the options."""
    where = parser.add_argument_group("on how many machines")
    where.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local: this machine; ray: the actors of a Ray cluster, with the same result on CPUs "
        "(default: local)",
    )
    where.add_argument(
        "--address",
        metavar="A",
        help="with ray: the cluster, as HOST:PORT or auto (default: one on this machine)",
    )
    where.add_argument(
        "--actors",
        type=int,
        metavar="N",
        help="with ray: actors that share the networks (default: one for every GPU, or every core)",
    )


@contextmanager
def chosen_cluster(options: argparse.Namespace) -> Iterator[Any]:
    """Give the cluster that was asked for, None for this machine; it ends with the block."""
    if options.engine == "local":
        for name in ("address", "actors"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} is for a cluster; add --engine ray")
        yield None
        return
    if options.actors is not None and options.actors < 1:
        raise UsageError(f"--actors must be at least 1, got {options.actors}")
    from esper.lab.population.ray_population import RayCluster

    with RayCluster(options.address, actors=options.actors or 0) as cluster:
        yield cluster


def add_out(group: Any) -> None:
    """Add the folder of a run that is started or continued."""
    group.add_argument(
        "--out", metavar="RUN", help="folder of the run (default: a new one below runs)"
    )


def chosen_out(options: argparse.Namespace, name: str) -> str:
    """Return the folder that was named, or a new one below `runs` that is called after `name`."""
    if options.out is not None:
        return str(options.out)
    for given_too in ("resume", "overwrite"):
        if getattr(options, given_too):
            raise UsageError(f"--{given_too} needs --out RUN: which one? (see `esper runs`)")
    first = os.path.join("runs", os.path.basename(name))
    paths = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(path for path in paths if not os.path.lexists(path))


def add_run_options(parser: Parser, *, resume: str, verbose: str) -> Any:
    """Add where a run goes and how it is continued and shown; return the group for more of it."""
    where = parser.add_argument_group("where it goes")
    add_out(where)
    where.add_argument("--resume", action="store_true", help=resume)
    where.add_argument(
        "--from",
        choices=("latest", "previous"),
        dest="source",
        help="with --resume: checkpoint to continue from (default: latest)",
    )
    where.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    where.add_argument(
        "--wandb",
        action="store_true",
        help="also show curves and alarms in Weights & Biases; its own WANDB_MODE=offline keeps "
        "them here until `wandb sync`; give it again with --resume",
    )
    where.add_argument("--json", action="store_true", help="print one JSON document")
    where.add_argument("-v", "--verbose", action="store_true", help=verbose)
    return where


def chosen_sinks(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the sinks that were asked for."""
    from esper.nissa.sinks import DEFAULT_SINKS

    return (*DEFAULT_SINKS, "wandb") if options.wandb else DEFAULT_SINKS


# ---- A search or a proof in its folder: started, continued, and never written by two at once


C = TypeVar("C", bound=Config)


def start(path: str | Path, config: Config, *, overwrite: bool) -> None:
    """Make the folder and write down what was asked for."""
    kind = type(config).__name__.removesuffix("Config").lower()
    settings = {COMMAND: kind, **config.to_mapping()}
    with RunFolder(path).claim_new(settings, overwrite=overwrite) as lock:
        lock.release()


def read_config(path: str | Path, config: type[C]) -> C:
    """Return what was asked for in a folder that is continued."""
    kind = config.__name__.removesuffix("Config").lower()
    settings = RunFolder(path).read_config()
    if settings.pop(COMMAND, None) != kind:
        raise UsageError(f"{path} is no folder of `esper {kind}`; give the --out of one")
    try:
        return config.from_mapping(settings)
    except ConfigError as error:
        raise UsageError(f"{path} was written by another version: {error}") from None


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Within the block no other process writes into the folder."""
    lock = WriterLock(Path(path) / LOCK_FILE)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


# ---- What `esper search` and `esper prove` share: members, how they are played, and what is shown


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
    if not options.out:
        raise UsageError("--out is missing; give a folder for the results")
    if not options.resume:
        config = make(options)
        config.members.find(config.opening)
        start(options.out, config, overwrite=options.overwrite)
        return config
    kept = {"out", "resume", "json", "run", "arguments", "overwrite", "list", "quick", "imports"}
    kept |= {"engine", "address", "actors"}
    refuse_beside_resume(options, [name for name in vars(options) if name not in kept])
    return read_config(options.out, config_class)


def print_members(
    members: tuple[AnyMember, ...],
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
