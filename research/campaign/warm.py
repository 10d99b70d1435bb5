"""Compile the kernels of a family's architectures, each in a process of its own.

One process compiles kernels one after another, which takes minutes for a dozen architectures; this
takes as long as one of them. Triton's cache (TRITON_CACHE_DIR) then has them all.

    python research/campaign/warm.py --data DATA --splits train select
    python research/campaign/warm.py --splits claim --sizes 1 1.5 2 3

`--sizes` are those of static networks, which only wait; at 1 the host itself grows.

Kernels depend on shapes alone. So claim architectures are warmed on noise in place of images, and
nothing is learned about them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from esper.lab.population.engine import PopulationConfig
from esper.lab.proof.arm import StaticArm
from esper.lab.proof.play import Cell, PlayConfig, Player
from esper.lab.proof.search import Search, SearchConfig
from esper.lab.tasks import get_family
from esper.lab.tasks.family import FamilySplit
from esper.simic.training.config import LIFE

SHAPES = {"cifar16": (3, 16, 16), "fashion14": (1, 14, 14)}
IMAGES = 30_000


def write_noise(folder: Path) -> None:
    """Write files that look like the data sets and hold nothing but chance."""
    draws = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        parts = {}
        for split, count in (("train", IMAGES), ("test", 1_000)):
            parts[f"x_{split}"] = draws.integers(0, 256, (count, *shape), dtype=np.uint8)
            parts[f"y_{split}"] = draws.integers(0, 10, count, dtype=np.uint8)
        np.savez(folder / f"{name}.npz", **parts)


def labels(family: str, split: FamilySplit) -> list[str]:
    """Return a member for every architecture of a split."""
    firsts = {member.architecture: member for member in get_family(family).members(split)}
    return [member.label for member in firsts.values()]


def warm(
    family: str, split: FamilySplit, label: str, size: float, data: str | None, out: Path
) -> None:
    """Search briefly on one member: the usual blueprints, few epochs; or let a wider host wait."""
    members = [each for each in get_family(family).members(split) if each.label == label]
    play = PlayConfig(
        device="cuda",
        horizon=8,
        data=data,
        population=PopulationConfig(lifecycle=LIFE, use_bf16=True),
    )
    if size != 1.0:
        rates = {label: members[0].task().config.learning_rate}
        arm = StaticArm("static", size, rates)
        list(Player(play).play([Cell("warm", arm, members[0], (0, 1))]))
        return
    config = SearchConfig(rungs=("16x2",), heuristics=0, play=play)
    Search(config, members, out, Player(play)).run()


def make_commands(asked: argparse.Namespace, noise: Path) -> Iterator[list[str]]:
    """Yield what to run for every architecture."""
    for split in asked.splits:
        data = str(noise) if split == "claim" else asked.data
        for label in labels(asked.family, split):
            for size in asked.sizes:
                one = [sys.executable, __file__, "--family", asked.family, "--splits", split]
                place = ("--data", data) if data else ()
                yield [*one, "--member", label, "--sizes", str(size), *place]


def main() -> None:
    """Run all of them at once, and say what failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--family", default="image16_family")
    splits = ("train", "select", "claim")
    parser.add_argument("--splits", nargs="+", default=["train"], choices=splits)
    parser.add_argument("--sizes", nargs="+", type=float, default=[1.0], help="in hosts' widths")
    parser.add_argument("--at-once", type=int, help="processes (default: all)")
    parser.add_argument("--data", help="folder of the data; claim members never see it")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        if asked.member:
            warm(asked.family, asked.splits[0], asked.member, asked.sizes[0], asked.data, here)
            return
        if "claim" in asked.splits:
            write_noise(here)
        began, commands = time.monotonic(), list(make_commands(asked, here))
        with ThreadPoolExecutor(asked.at_once or len(commands)) as pool:
            done = list(
                pool.map(
                    lambda each: subprocess.run(each, capture_output=True, text=True), commands
                )
            )
    failed = [each for each in done if each.returncode]
    for each in failed:
        print(each.stderr[-500:], file=sys.stderr)
    spent = time.monotonic() - began
    print(f"{len(done) - len(failed)} of {len(done)} architectures in {spent:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
