"""Compile the kernels of a family's architectures, each in a process of its own.

One process compiles kernels one after another, which takes minutes for a dozen architectures; this
takes as long as one of them. Triton's cache (TRITON_CACHE_DIR) then has them all.

    python research/campaign/warm.py --data DATA --family image16_family --splits train select
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

from esper.tasks import get_family
from esper.tasks.family import FamilySplit


def make_commands(family: str, splits: list[FamilySplit], data: str | None) -> Iterator[list[str]]:
    """Yield a short search for every architecture: the usual blueprints, few epochs."""
    for split in splits:
        firsts = {member.architecture: member for member in get_family(family).members(split)}
        for member in firsts.values():
            yield [
                *(sys.executable, "-m", "esper", "search", "--family", family, "--split", split),
                *("--members", member.label, "--rungs", "16x2", "--heuristics", "0"),
                *("--horizon", "8", "--device", "cuda", "--set", "play.population.use_bf16=true"),
                *(("--data", data) if data else ()),
            ]


def main() -> None:
    """Run all of them at once, and say what failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--family", default="image16_family")
    parser.add_argument("--splits", nargs="+", default=["train"], choices=["train", "select"])
    parser.add_argument("--data", help="folder of the data")
    asked = parser.parse_args()
    began = time.monotonic()
    commands = list(make_commands(asked.family, asked.splits, asked.data))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(commands)) as pool:

        def run(number: int) -> subprocess.CompletedProcess[str]:
            out = ["--out", str(Path(folder, str(number)))]
            return subprocess.run([*commands[number], *out], capture_output=True, text=True)

        done = list(pool.map(run, range(len(commands))))
    failed = [each for each in done if each.returncode]
    for each in failed:
        print(each.stderr[-500:], file=sys.stderr)
    spent = time.monotonic() - began
    print(f"{len(done) - len(failed)} of {len(done)} architectures in {spent:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
