"""One stretch of the campaign: the next stages, one after another, for as long as there is time.

    python research/campaign/stretch.py STATE --data DATA --seconds 540
    python research/campaign/stretch.py STATE --data DATA --seconds 540 --only tuned
    python research/campaign/stretch.py STATE --list

A stage is a command of `esper` that writes into its own folder of STATE and can be resumed. What
came to its end is marked there; what did not is stopped in time (SIGTERM, as a batch system does)
and goes on in the next stretch. STATE begins as what is known: `state.tar.xz` beside this file.
Stages that do not wait for each other can share a device: `--only` names those of a process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ARCHIVE = Path(__file__).resolve().with_name("state.tar.xz")
FAMILIES = Path(__file__).resolve().with_name("families.py")


def name_members(conditions: Sequence[str]) -> tuple[str, ...]:
    """Return the labels of all train architectures with these images and labels."""
    return tuple(
        f"cifar16 plain {width}x{depth} pooled, {condition}, 60 epochs"
        for depth in (2, 3)
        for width in (4, 8, 16)
        for condition in conditions
    )


LARGE, MIDDLE, SMALL, FEW = (f"{count} images" for count in (20000, 6000, 2000, 600))
SEARCHED = name_members([LARGE, MIDDLE, SMALL, f"{LARGE}, noise 0.4", f"{SMALL}, noise 0.4"])
"""Every architecture with much, some and little data, with right and with wrong labels."""
NOISES = ("", ", noise 0.2", ", noise 0.4")
EASIER = ("classes 0-2-4-6-8", "classes 0-6-9")
TAUGHT = name_members(
    [f"{images}{noise}" for images in (LARGE, MIDDLE, SMALL, FEW) for noise in NOISES]
    + [
        f"{classes}, {images}{noise}"
        for classes in EASIER
        for images in (MIDDLE, SMALL, FEW)
        for noise in NOISES
    ]
)
"""What lies between those, fewer images, and easier tasks: no other rates or horizons."""

PLAYED = "--family image16_family --device cuda --set play.population.use_bf16=true"

FRESH_S = 20
"""Seconds below which no stage is begun: a process needs as many to start."""


@dataclass(frozen=True)
class Stage:
    """One step of the campaign; it works in the folder of its name."""

    name: str
    command: str
    """What follows `esper`."""
    members: tuple[str, ...] = ()
    seconds: int | None = None
    """Most seconds of one stretch that it may take: it then counts as done."""

    def arguments(self, state: Path) -> list[str]:
        """Return what to run: from the start, or on from where it stopped."""
        verb, *asked = self.command.split()
        if self.members:
            asked += ["--members", *self.members]
        if (state / self.name / "config.yaml").exists():
            asked = ["--resume"]
        return [sys.executable, "-m", "esper", verb, *asked, "--out", self.name]


PPO = """train arena --set evaluate_every=3 --set evaluation_seeds=16 --device cuda
    --set ppo.anchor_kl=0.3 --set rows=512 --set ppo.learning_rate=0.0005
    --set ppo.exploration_kl=0.001 --set ppo.exploration.sparse_curiosity=0"""
CANDIDATES = "tuned wider clone gentle"

STAGES = (
    Stage(
        "search",
        "search --rungs 32x1 10x3 --children 24 24 --heuristics 32 --set lessons=1 "
        f"--rows 640 {PLAYED}",
        SEARCHED,
    ),
    Stage(
        "clone",
        "clone search --rounds 4 --episodes 288 --set smoothing=0.03 --device cuda",
        TAUGHT,
    ),
    Stage("tuned", f"{PPO} --set start=clone", seconds=300),
    Stage("wider", f"{PPO} --set start=gentle", seconds=560),
    Stage(
        "select",
        f"prove {CANDIDATES} wait heuristic:search/heuristic.json schedule:search/schedule.json "
        f"contextual:search/contextual.json --seeds 4 --split select {PLAYED}",
    ),
    Stage(
        "few",
        f"prove {CANDIDATES} wait schedule:search/schedule.json --seeds 4 --import {FAMILIES} "
        f"--split select {PLAYED.replace('image16_family', 'image16_few')}",
    ),
)


def run(stage: Stage, state: Path, data: Path | None, seconds: float) -> bool:
    """Carry a stage on for some seconds at most; return whether it is done."""
    limit = seconds if stage.seconds is None else min(seconds, stage.seconds)
    command = stage.arguments(state)
    # Stages begin on one machine and go on at another, where the data may lie elsewhere.
    place = {} if data is None else {"ESPER_DATA": str(data.resolve())}
    with (state / f"{stage.name}.txt").open("a") as log:
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=state, env={**os.environ, **place}, stdout=log, stderr=log
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
        spent = time.monotonic() - began
    is_over = stage.seconds is not None and limit == stage.seconds and spent >= limit
    said = (state / f"{stage.name}.txt").read_text().splitlines()
    print(f"{stage.name}: exit {code} after {spent:.0f} s: {said[-1] if said else ''}", flush=True)
    return code == 0 or is_over


def main() -> None:
    """Go through the stages."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("state", type=Path, help="folder of all stages")
    parser.add_argument("--data", type=Path, help="folder of the data")
    parser.add_argument("--seconds", type=float, default=540, help="of this stretch")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="some of the stages")
    parser.add_argument("--list", action="store_true", help="say what is done and what is next")
    asked = parser.parse_args()
    state = asked.state.resolve()
    if not state.exists():
        state.mkdir(parents=True)
        if ARCHIVE.exists():
            with tarfile.open(ARCHIVE) as archive:
                archive.extractall(state, filter="data")
    began = time.monotonic()
    for stage in STAGES:
        if asked.only and stage.name not in asked.only:
            continue
        done = state / f"{stage.name}.done"
        if asked.list:
            command = " ".join(stage.arguments(state)[2:])
            print(f"{'done' if done.exists() else 'next':5} {command}")
        elif not done.exists():
            left = asked.seconds - (time.monotonic() - began)
            if left < FRESH_S or not run(stage, state, asked.data, left):
                break
            done.touch()


if __name__ == "__main__":
    main()
