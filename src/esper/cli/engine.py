"""Where rows live: `--engine`, `--address` and `--actors`, and the cluster that they mean."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from esper.cli.main import Parser


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
    from esper.leyline.errors import UsageError

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
