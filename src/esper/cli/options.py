"""Options that several commands have, and what they mean."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from esper.cli.main import Parser
from esper.leyline.errors import UsageError


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
    from esper.population.cluster import RayCluster

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
    from esper.nissa.store import DEFAULT_SINKS

    return (*DEFAULT_SINKS, "wandb") if options.wandb else DEFAULT_SINKS
