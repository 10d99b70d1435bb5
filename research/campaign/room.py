"""Where growing pays under the limits of a proof: slots before or after pools, short or long runs.

Hosts of `image16_family`'s kind with other slots and horizons; schedules are searched on all of
them at once, each network within twice its host's parameters and operations.

    python research/campaign/room.py --data DATA --device cuda --out room
    python research/campaign/room.py --summary room

The summary has, for every host, the schedule that is best by validation with one seed left out, and
what it brings on test samples with that seed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev

from esper.kasmina.hosts import CnnConfig
from esper.lab.population.engine import PopulationConfig
from esper.lab.proof.choose import Table, read_table
from esper.lab.proof.play import PlayConfig, Player, Progress
from esper.lab.proof.results import RESULTS_FILE, ResultFile
from esper.lab.proof.search import Search, SearchConfig
from esper.lab.tasks.member import GivenMember, Member
from esper.simic.training.config import LIFE

DOUBLING = ((8, 16, 32), (16, 32, 64), (16, 32))
LEVEL = ((16, 16, 16), (32, 32, 32))
"""Channels of the hosts' blocks."""
SHORT, LONG = 60, 150
MANY, FEW = 20_000, 3_000
ROWS = {"blocks": 0, "pools": 1}
"""Rows of slots: after a block's convolution, or after its pool."""


def make_members() -> Iterator[GivenMember]:
    """Yield hosts with their slots, horizons and images."""
    for channels in DOUBLING:
        yield make_member(channels, "blocks", SHORT, MANY)
    for channels in (*DOUBLING, *LEVEL):
        yield make_member(channels, "pools", SHORT, MANY)
        yield make_member(channels, "pools", LONG, MANY)
    for channels in DOUBLING[:2]:
        yield make_member(channels, "pools", SHORT, FEW)


def make_member(channels: tuple[int, ...], place: str, horizon: int, images: int) -> GivenMember:
    """Return a plain host whose slots are one row of those it has."""
    task = Member(data="cifar16", train_size=images, horizon=horizon).task()
    options = task.config.host_options
    assert isinstance(options, CnnConfig)
    slots = tuple(f"r{ROWS[place]}c{column}" for column in range(len(channels)))
    host = options.replace(channels=channels, slots=slots)
    name = "-".join(map(str, channels))
    return GivenMember(
        f"{name}, {images} images, {horizon} epochs, slots after {place}",
        type(task)(task.config.replace(host_options=host)),
    )


def summarise(table: Table) -> str:
    """Return a table of what the best schedule of every member brings."""
    lines = [
        "| member | best schedules | test log ratio | parameters | FLOPs |",
        "|---|---|---|---|---|",
    ]
    for member, arms in table.items():
        seeds = next(iter(arms.values())).seeds
        gains, sizes, costs, names = [], [], [], []
        for place in range(len(seeds)):
            means = {
                name: fmean(value for at, value in enumerate(own.val) if at != place)
                for name, own in arms.items()
            }
            best = max(means, key=lambda name: means[name])
            names.append(best)
            gains.append(arms[best].test[place])
            sizes.append(arms[best].parameters[place])
            costs.append(arms[best].flops[place])
        error = stdev(gains) / len(gains) ** 0.5
        chosen = "; ".join(dict.fromkeys(names))
        lines.append(
            f"| {member} | {chosen} | {fmean(gains):+.3f} ± {error:.3f} "
            f"| {fmean(sizes):.2f} | {fmean(costs):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Search, or summarise what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", help="folder with cifar16.npz")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--rungs", nargs="+", default=["24x3"], help="plans x seeds")
    parser.add_argument("--rows", type=int, default=1100, help="networks at once")
    parser.add_argument("--horizon", type=int, default=0, help="epochs; 0: the members'")
    parser.add_argument("--only", type=int, help="only the host with this number, from 0")
    parser.add_argument("--summary", type=Path, help="print what a folder holds")
    asked = parser.parse_args()
    if asked.summary:
        results = ResultFile(asked.summary / RESULTS_FILE)
        print(summarise(read_table(list(results), "wait")))
        return
    if asked.out is None:
        parser.error("give --out FOLDER or --summary FOLDER")
    asked.out.mkdir(parents=True, exist_ok=True)
    members = list(make_members())
    if asked.only is not None:
        members = members[asked.only : asked.only + 1]
    play = PlayConfig(
        device=asked.device,
        rows=asked.rows,
        horizon=asked.horizon,
        data=asked.data,
        population=PopulationConfig(lifecycle=LIFE, use_bf16=asked.device == "cuda"),
    )

    def show(progress: Progress) -> None:
        print(f"{progress.seconds:.0f} s, {progress.done / progress.total:.0%} {progress.text}")

    config = SearchConfig(rungs=tuple(asked.rungs), heuristics=0, play=play)
    search = Search(config, members, asked.out, Player(play, show))
    search.run()
    print(json.dumps(search.conclude()["best_single"], indent=1))
    print(summarise(search.table()))


if __name__ == "__main__":
    main()
