"""Members that benchmarks measure, their data, and how many of them are run side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import torch

from esper.kasmina.training import OptimizerName, Schedule, SeedRate
from esper.lab.tasks.dataset import TaskData
from esper.lab.tasks.family import FamilySplit, get_family
from esper.lab.tasks.member import SCHEDULE, Member
from esper.lab.tasks.task import DataCache, Task


@dataclass(frozen=True)
class Recipe:
    """How the networks of the arena are trained, apart from the learning rate."""

    optimizer: OptimizerName = "sgd"
    weight_decay: float = 5e-4
    schedule: Schedule = SCHEDULE
    seed_rate: SeedRate = "host"
    seed_factor: float = 1.0
    seed_warmup: int = 0

    @classmethod
    def of(cls, options: argparse.Namespace) -> Recipe:
        """Return what the command line says; what it has no option for is left as it is."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in vars(options)]
        return cls(**{name: vars(options)[name] for name in names})

    def task(self, member: Member, learning_rate: float) -> Task:
        """Return a member's task, trained in this way."""
        return member.task(learning_rate=learning_rate, **dataclasses.asdict(self))


def add_recipe_options(parser: argparse.ArgumentParser, *, for_seeds: bool) -> None:
    """Add what a `Recipe` is made of to a command line."""
    parser.add_argument("--schedule", default=SCHEDULE, choices=get_args(Schedule))
    parser.add_argument("--optimizer", default="sgd", choices=get_args(OptimizerName))
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    if for_seeds:
        parser.add_argument(
            "--seed-rate",
            default="host",
            choices=get_args(SeedRate),
            help="what the rates of seeds follow",
        )
        parser.add_argument("--seed-factor", type=float, default=1.0, help="of the rates of seeds")
        parser.add_argument(
            "--seed-warmup", type=int, default=0, help="epochs in which a seed's rate goes up"
        )


MEMBERS: tuple[Member, ...] = (
    Member(data="cifar16", width=8, train_size=20_000),
    Member(data="cifar16", width=4, train_size=20_000),
    Member(data="cifar16", width=16, train_size=20_000),
    Member(data="fashion14", width=8, train_size=20_000),
    Member(data="cifar16", width=8, train_size=2_000),
    Member(data="cifar16", width=8, train_size=20_000, label_noise=0.3),
    Member(data="fashion14", width=4, train_size=20_000),
    Member(data="cifar16", host="residual", width=8, train_size=20_000),
    Member(data="fashion14", host="residual", width=8, train_size=20_000),
    Member(data="cifar16", host="residual", width=8, train_size=2_000),
)
"""What is measured where no family is named, those that say most first."""

STATIC_FACTORS = (1.5, 2.0)
"""How much wider the hosts are that growing is compared with."""


def wider(member: Member, factor: float) -> Member:
    """Return the same task with a wider host."""
    return dataclasses.replace(member, width=round(factor * member.width))


def members_of(family: str | None, split: FamilySplit, parts: Sequence[str] | None) -> list[Member]:
    """Return members at their tuned rate: of a family's split, or `MEMBERS`.

    Args:
        family: name of the family; None for `MEMBERS`.
        split: which of its splits.
        parts: parts of labels, one of which a member has; all by default.
    """
    every = MEMBERS if family is None else get_family(family).members(split)
    return [
        member
        for member in every
        if member.rate_factor == 1.0
        and (parts is None or any(part in member.label for part in parts))
    ]


def add_member_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which members are measured."""
    parser.add_argument("--family", help="measure members of this family")
    parser.add_argument(
        "--split", default="select", choices=("train", "select"), help="which of them"
    )
    parser.add_argument("--members", nargs="+", help="parts of labels; all by default")


def load(task: Task, folder: Path | None, test_limit: int | None) -> TaskData:
    """Return the data of a task, which other tasks may share in part."""
    data = _data_cache(folder).load(task)
    if test_limit is None:
        return data
    splits = data.splits
    shorter = dataclasses.replace(
        splits,
        samples={**splits.samples, "test": splits.samples["test"][:test_limit]},
        targets={**splits.targets, "test": splits.targets["test"][:test_limit]},
    )
    return dataclasses.replace(data, splits=shorter)


@lru_cache(maxsize=1)
def _data_cache(folder: Path | None) -> DataCache:
    return DataCache(folder, "cpu")


def pick_jobs(asked: int, device: str) -> int:
    """Return how many processes run at once: several share a CUDA device, one a CPU."""
    if asked:
        return asked
    return 6 if is_cuda(device) else 1


def is_cuda(device: str) -> bool:
    """Return whether rows run on a CUDA device."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def work_through(
    work: Callable[[Any], dict[str, Any]], items: Sequence[Any], jobs: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """Yield `work(item)` as each is done, until the deadline (of `time.time`) at the latest.

    Work that fails yields `{"error": ...}`, so that one failure does not cost the rest.
    """
    guarded = _Guarded(work)
    if jobs <= 1:
        for item in items:
            if time.time() >= deadline:
                return
            yield guarded(item)
        return
    context = multiprocessing.get_context("spawn")
    # Leaving the block ends what still runs.
    with context.Pool(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        results = pool.imap_unordered(guarded, items)
        for _ in items:
            try:
                yield results.next(max(0.1, deadline - time.time()))
            except multiprocessing.TimeoutError:
                return


class _Guarded:
    """Work whose failure is a result; a class, so that it can be sent to another process."""

    def __init__(self, work: Callable[[Any], dict[str, Any]]) -> None:
        self.work = work

    def __call__(self, item: Any) -> dict[str, Any]:
        try:
            return self.work(item)
        except Exception as error:
            return {
                "error": f"{type(error).__name__}: {error}",
                "item": str(item),
                "traceback": traceback.format_exc(limit=-4),
            }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines, but for one that was broken off."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records
