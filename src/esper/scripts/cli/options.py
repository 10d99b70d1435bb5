"""Options that several commands share."""

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
    print_line,
    safe,
)
from esper.utils.files import WriterLock
from esper.utils.settings import change_settings, parse_settings

if TYPE_CHECKING:
    from esper.lab.proof.play import Progress
    from esper.lab.tasks.member import AnyMember


def add_settings(group: Any, example: str) -> None:
    """Add `--set`, with an example in its help."""
    group.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        dest="settings",
        help=f"any other setting (page Settings of the documentation), {example}",
    )


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return those of the named options that were given."""
    return given({name: getattr(options, name) for name in names})


def absolute(path: str) -> str:
    """Return an absolute path, so that the run can be resumed from any folder."""
    return str(Path(os.path.expanduser(path)).absolute())


def refuse_beside_resume(
    options: argparse.Namespace, names: Iterable[str], advice: str = ""
) -> None:
    """Refuse options that contradict --resume.

    Args:
        options: The parsed command line.
        names: Options that would change settings of the run.
        advice: Appended to the error.
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
            f"--resume keeps the settings of the run; leave out {', '.join(changed)}{advice}"
        )


_POSITIONAL = {"recipe": "RECIPE", "arms": "ARM", "search": "SEARCH"}


def add_engine_options(parser: Parser) -> None:
    """Add the options that choose where networks are trained."""
    where = parser.add_argument_group("machines")
    where.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local: this machine; ray: a Ray cluster, with the same result on CPUs "
        "(default: local)",
    )
    where.add_argument(
        "--address",
        metavar="A",
        help="with ray: address of the cluster, HOST:PORT or auto (default: start one on this "
        "machine)",
    )
    where.add_argument(
        "--actors",
        type=int,
        metavar="N",
        help="with ray: number of actors (default: one per GPU, else one per core)",
    )


@contextmanager
def chosen_cluster(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the Ray cluster of the options, None for this machine; close it at the end."""
    if options.engine == "local":
        for name in ("address", "actors"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} is for a Ray cluster; add --engine ray")
        yield None
        return
    if options.actors is not None and options.actors < 1:
        raise UsageError(f"--actors must be at least 1, got {options.actors}")
    from esper.lab.population.ray_population import RayCluster

    with RayCluster(options.address, actors=options.actors or 0) as cluster:
        yield cluster


def add_out(group: Any) -> None:
    """Add `--out`, the run folder."""
    group.add_argument("--out", metavar="RUN", help="run folder (default: a new one below runs/)")


def chosen_out(options: argparse.Namespace, name: str) -> str:
    """Return the folder given by --out, or a new one below `runs` named after `name`."""
    if options.out is not None:
        return str(options.out)
    for given_too in ("resume", "overwrite"):
        if getattr(options, given_too):
            raise UsageError(f"--{given_too} needs --out RUN; `esper runs` lists the runs")
    first = os.path.join("runs", os.path.basename(name))
    paths = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(path for path in paths if not os.path.lexists(path))


def add_run_options(parser: Parser, *, resume: str, verbose: str) -> Any:
    """Add the options of a run folder; return their group, to which more can be added."""
    where = parser.add_argument_group("output")
    add_out(where)
    where.add_argument("--resume", action="store_true", help=resume)
    where.add_argument(
        "--from",
        choices=("latest", "previous"),
        dest="source",
        help="with --resume: the checkpoint to continue from (default: latest)",
    )
    where.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    where.add_argument(
        "--wandb",
        action="store_true",
        help="also log to Weights & Biases; set WANDB_MODE=offline to upload later with "
        "`wandb sync`; repeat it with --resume",
    )
    where.add_argument("--json", action="store_true", help="print the result as one JSON document")
    where.add_argument("-v", "--verbose", action="store_true", help=verbose)
    return where


def chosen_sinks(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the sinks to write to."""
    from esper.nissa.sinks import DEFAULT_SINKS

    return (*DEFAULT_SINKS, "wandb") if options.wandb else DEFAULT_SINKS


# ---- The folder of a search, a clone or a proof


C = TypeVar("C", bound=Config)


def start(path: str | Path, config: Config, *, overwrite: bool) -> None:
    """Create the folder and write its settings."""
    kind = type(config).__name__.removesuffix("Config").lower()
    settings = {COMMAND: kind, **config.to_mapping()}
    with RunFolder(path).claim_new(settings, overwrite=overwrite) as lock:
        lock.release()


def read_config(path: str | Path, config: type[C]) -> C:
    """Return the settings of a folder to continue."""
    kind = config.__name__.removesuffix("Config").lower()
    settings = RunFolder(path).read_config()
    if settings.pop(COMMAND, None) != kind:
        raise UsageError(f"{path} was not written by `esper {kind}`; give the --out of one")
    try:
        return config.from_mapping(settings)
    except ConfigError as error:
        raise UsageError(f"{path} was written by another version: {error}") from None


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Within the block, lock the folder against other processes."""
    lock = WriterLock(Path(path) / LOCK_FILE)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


# ---- What search, clone and prove share: members of a family, and how they are played


def add_options(parser: Parser, *, split: str) -> None:
    """Add the options of the three commands."""
    what = parser.add_argument_group("members to play on")
    what.add_argument(
        "--family", metavar="F", help="a family of `esper tasks` (default: digits_family)"
    )
    what.add_argument(
        "--split",
        choices=("train", "select", "claim"),
        help=f"split of the family (default: {split})",
    )
    what.add_argument(
        "--members",
        nargs="+",
        metavar="TEXT",
        help="only members whose label contains one of these (default: all)",
    )
    what.add_argument(
        "--count",
        type=int,
        metavar="N",
        help="number of members; the same ones each time (default: all)",
    )
    what.add_argument(
        "--open-claim",
        type=int,
        metavar="N",
        dest="opening",
        help="needed for the claim split, which may be used twice: 1 for the first time, 2 for "
        "the second; the result records it",
    )
    what.add_argument("--list", action="store_true", help="list the members and exit")
    how = parser.add_argument_group("how to play")
    how.add_argument(
        "--horizon", type=int, metavar="E", help="epochs per network (default: the members')"
    )
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), help="device (default: auto)")
    how.add_argument(
        "--rows", type=int, metavar="N", help="networks at once (default: 1024 on CUDA, 64 on CPU)"
    )
    how.add_argument(
        "--data", metavar="PATH", help="file or folder of the data (default: see docs/data.md)"
    )
    add_settings(how, "such as play.param_limit=3; may be given again")
    where = parser.add_argument_group("output")
    where.add_argument("--out", metavar="RUN", help="folder of the results, needed unless --list")
    where.add_argument("--resume", action="store_true", help="continue in --out after a stop")
    where.add_argument("--overwrite", action="store_true", help="replace the results in --out")
    where.add_argument("--json", action="store_true", help="print the result as one JSON document")


def resolve(config: Any, options: argparse.Namespace) -> Any:
    """Return a configuration changed by the family's own settings and by the shared options."""
    from esper.lab.tasks.family import get_family

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
    family = get_family(options.family or config.members.family)
    return change_settings(config, {**family.settings, **settings, **given(named)})


def open_folder(config_class: Any, options: argparse.Namespace, make: Any) -> Any:
    """Start or continue a folder, and return its configuration.

    Args:
        config_class: Class of the configuration.
        options: The parsed command line.
        make: Returns a configuration from the options.
    """
    if not options.out:
        raise UsageError("--out is missing; give a folder for the results, as in --out runs/mine")
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
    """Print members, arms and benchmarks."""
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
            print_line(console, line)
    for name, each in (benchmarks or {}).items():
        console.print(safe(f"Benchmark {name} ({each['checksum']}): {each['summary']}"))
        scores = each["scores"]
        text = "the controls' scores are not measured yet"
        if scores is not None:
            text = ", ".join(f"{arm} {one['score']:+.3f}" for arm, one in scores["arms"].items())
        print_line(console, f"  {text}")
    return 0


class PlayView(LiveView):
    """Progress of search, clone and prove; use it as a context manager."""

    def __init__(self, console: Console, title: str) -> None:
        """Show the title; the total is known after the first epoch."""
        counter = TextColumn("{task.fields[where]}", markup=False)
        super().__init__(console, counter, title=title, total=1.0, done=0.0, where="")

    def show(self, progress: Progress) -> None:
        """Show one epoch of some networks."""
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
            print_line(self._console, f"{progress.done / progress.total:.0%} {progress.text}{eta}")
