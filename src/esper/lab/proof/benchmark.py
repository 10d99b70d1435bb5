"""Public benchmarks: sets of members with a name and a version that never change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from esper.lab.population.engine import EXECUTION_SETTINGS
from esper.lab.proof.arm import WAIT
from esper.lab.proof.play import PlayConfig
from esper.lab.proof.prove import REPORTED_ONLY, ProveConfig
from esper.lab.tasks.family import FamilySplit, MemberChoice
from esper.lab.tasks.member import AnyMember
from esper.leyline.errors import UsageError, unknown_name

CONTROLS = (WAIT, "random", "periodic", "plateau", "heuristic")
"""The arms that every entry is compared with."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A named and versioned set of tasks."""

    name: str
    """Such as digits-v1; its definition never changes."""
    summary: str
    checksum: str
    """Checksum of all settings that affect scores; a test compares it."""
    family: str
    split: FamilySplit = "select"
    seeds: int = 8
    count: int = 0
    horizon: int = 0

    def config(self, entry: str | None = None) -> ProveConfig:
        """Return the settings that compare an entry with the controls, or the controls alone."""
        return ProveConfig(
            benchmark=self.name,
            arms=CONTROLS if entry is None else (entry, *CONTROLS),
            seeds=self.seeds,
            members=MemberChoice(family=self.family, split=self.split, count=self.count),
            play=PlayConfig(horizon=self.horizon),
        )

    def tasks(self) -> dict[str, AnyMember]:
        """Return the tasks by name, such as digits-v1/03."""
        members = self.config().members.find()
        return {f"{self.name}/{number:02}": each for number, each in enumerate(members, start=1)}

    def scores(self) -> dict[str, Any] | None:
        """Return the published scores of the controls; None if not measured yet."""
        file = resources.files("esper.lab.proof") / "scores" / f"{self.name}.json"
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
            checksum="939c4d26384cb392",
            family="digits_family",
            seeds=4,
            count=4,
            horizon=30,
        ),
        Benchmark(
            name="digits-v1",
            summary="16 members of the digits with few images and wrong labels; fits a CPU",
            checksum="261a97375e12c198",
            family="digits_family",
        ),
        Benchmark(
            name="image16-v1",
            summary="32 members of CIFAR-10 at 16x16; a GPU",
            checksum="e4618f517c52e6f9",
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
    """Return a checksum of what affects scores: not of arms, devices, data paths and widths."""
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
        # The published checksums are older than these choices.
        **({} if config.play.keep == "last" else {"keep": config.play.keep}),
        **({"wilcoxon": True} if config.wilcoxon else {}),
        **({} if config.reported == REPORTED_ONLY else {"reported": config.reported}),
        "population": _without(_NEWER_OF_POPULATIONS, population),
        "tasks": [
            [
                each.label,
                each.task().name,
                _without(_NEWER_OF_TASKS, each.task().config.to_mapping()),
            ]
            for each in config.members.find(config.opening)
        ],
    }
    text = json.dumps(decides, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


_NEWER_OF_POPULATIONS = {
    "copies": False,
    "lifecycle": {"immediate": "auto", "rules": {"max_copies": 7}},
}
_NEWER_OF_TASKS = {"budget": None, "level": None}
"""Settings that the published checksums are older than; their defaults have no effect on scores."""


def _without(newer: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those of `newer` that have the value there."""
    kept = {}
    for name, value in settings.items():
        if isinstance(newer.get(name), Mapping):
            kept[name] = _without(newer[name], value)
        elif name not in newer or value != newer[name]:
            kept[name] = value
    return kept


def check_entry(config: ProveConfig) -> None:
    """Raise if the settings differ from those of the named benchmark."""
    benchmark = get_benchmark(config.benchmark)
    if checksum(config) != benchmark.checksum:
        raise UsageError(
            f"{benchmark.name} fixes members, seeds, limits and lifecycle; leave out options that "
            "change them, or leave out --benchmark"
        )
    missing = [name for name in CONTROLS if name not in config.arms]
    if missing:
        raise UsageError(f"{benchmark.name} needs all controls; add the arms {', '.join(missing)}")


def publishable(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of all arms of a finished benchmark, in the published form."""
    arms = {
        name: {key: arm[key] for key in ("test_score", "error", "parameters", "flops")}
        for name, arm in found["arms"].items()
    }
    for name, score in found["ranking"].items():
        arms[name]["score"] = score
    name = found["benchmark"]
    return {"benchmark": name, "checksum": get_benchmark(name).checksum, "arms": arms}
