"""Public benchmarks: members of the arena under a name and a version that mean one thing for ever.

A benchmark fixes members, seeds, limits, horizons and how rows live, so that scores of different
people can be put in one table. Its checksum covers all of that; a change of any part, here or in
the arena, needs a new version. docs/how-to/enter-the-benchmark.md has the rules.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from esper.leyline.errors import UsageError, unknown_name
from esper.population.engine import EXECUTION_SETTINGS
from esper.proof.arm import WAIT
from esper.proof.member import Member, MemberChoice
from esper.proof.play import PlayConfig
from esper.proof.prove import ProveConfig
from esper.tasks.family import FamilySplit

CONTROLS = (WAIT, "random", "periodic", "plateau", "heuristic")
"""What every entry is played against, in the same run."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A named and versioned set of tasks."""

    name: str
    """Such as digits-v1; what it means never changes."""
    summary: str
    checksum: str
    """Of everything that decides scores; a test keeps it."""
    family: str
    split: FamilySplit = "select"
    seeds: int = 8
    count: int = 0
    horizon: int = 0

    def config(self, entry: str | None = None) -> ProveConfig:
        """Return the proof of an entry against the controls; of the controls alone without one."""
        return ProveConfig(
            benchmark=self.name,
            arms=CONTROLS if entry is None else (entry, *CONTROLS),
            seeds=self.seeds,
            members=MemberChoice(family=self.family, split=self.split, count=self.count),
            play=PlayConfig(horizon=self.horizon),
        )

    def tasks(self) -> dict[str, Member]:
        """Return the tasks by name, such as digits-v1/03."""
        members = self.config().members.find()
        return {f"{self.name}/{number:02}": each for number, each in enumerate(members, start=1)}

    def scores(self) -> dict[str, Any] | None:
        """Return what the controls came to, as published; None where that was not measured yet."""
        file = resources.files("esper.proof") / "scores" / f"{self.name}.json"
        if not file.is_file():
            return None
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


BENCHMARKS: dict[str, Benchmark] = {
    each.name: each
    for each in (
        Benchmark(
            name="digits-quick-v1",
            summary="4 members of the digits, 4 seeds, 30 epochs: minutes on two cores",
            checksum="72c9efc31b6bc4e4",
            family="digits_family",
            seeds=4,
            count=4,
            horizon=30,
        ),
        Benchmark(
            name="digits-v1",
            summary="16 members of the digits with few images and wrong labels; fits a CPU",
            checksum="d0465104fdcd29e1",
            family="digits_family",
        ),
        Benchmark(
            name="image16-v1",
            summary="32 members of CIFAR-10 at 16x16; a GPU",
            checksum="6d0311153ac19e45",
            family="image16_family",
        ),
    )
}
"""Every benchmark by name."""


def get_benchmark(name: str) -> Benchmark:
    """Return the benchmark with a name, or raise with the nearest known one."""
    if name not in BENCHMARKS:
        raise unknown_name("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]


def describe_benchmarks() -> dict[str, dict[str, Any]]:
    """Return all benchmarks with their tasks and the controls' scores, as plain data."""
    return {
        name: {
            "summary": each.summary,
            "checksum": each.checksum,
            "tasks": {task: member.label for task, member in each.tasks().items()},
            "seeds": each.seeds,
            "scores": each.scores(),
        }
        for name, each in BENCHMARKS.items()
    }


def checksum(config: ProveConfig) -> str:
    """Return a checksum of what decides scores: not of arms, devices, data paths and widths."""
    population = {
        name: value
        for name, value in config.play.population.to_mapping().items()
        if name not in EXECUTION_SETTINGS
    }
    decides = {
        "seeds": config.seeds,
        "opening": config.opening,
        "confidence": config.confidence,
        "limits": [config.play.param_limit, config.play.flop_limit],
        "horizon": config.play.horizon,
        "population": population,
        "tasks": [
            [each.label, each.task().name, each.task().config.to_mapping()]
            for each in config.members.find(config.opening)
        ],
    }
    text = json.dumps(decides, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_entry(config: ProveConfig) -> None:
    """Refuse a proof that bears a benchmark's name and is not the benchmark."""
    benchmark = get_benchmark(config.benchmark)
    if checksum(config) != benchmark.checksum:
        raise UsageError(
            f"{benchmark.name} fixes members, seeds, limits and lifecycle; leave out what changes "
            "them, or prove without --benchmark"
        )
    missing = [name for name in CONTROLS if name not in config.arms]
    if missing:
        raise UsageError(
            f"{benchmark.name} is played against all controls; add {', '.join(missing)}"
        )


def publishable(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of all arms of a finished benchmark in the form that is published."""
    arms = {
        name: {key: arm[key] for key in ("test_score", "error", "parameters", "flops")}
        for name, arm in found["arms"].items()
    }
    for name, score in found["ranking"].items():
        arms[name]["score"] = score
    name = found["benchmark"]
    return {"benchmark": name, "checksum": get_benchmark(name).checksum, "arms": arms}
