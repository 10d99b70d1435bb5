"""Members that benchmarks measure: their jobs, data and options, and how jobs run in parallel."""

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
    """Training settings of the networks, apart from the learning rate."""

    optimizer: OptimizerName = "sgd"
    weight_decay: float = 5e-4
    schedule: Schedule = SCHEDULE
    seed_rate: SeedRate = "host"
    seed_factor: float = 1.0
    seed_warmup: int = 0

    @classmethod
    def of(cls, options: argparse.Namespace) -> Recipe:
        """Return the recipe of the command line; fields without an option keep their defaults."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in vars(options)]
        return cls(**{name: vars(options)[name] for name in names})

    def task(self, member: Member, learning_rate: float) -> Task:
        """Return a member's task with these settings."""
        return member.task(learning_rate=learning_rate, **dataclasses.asdict(self))


def add_recipe_options(parser: argparse.ArgumentParser, *, for_seeds: bool) -> None:
    """Add the options of a `Recipe`."""
    parser.add_argument("--schedule", default=SCHEDULE, choices=get_args(Schedule))
    parser.add_argument("--optimizer", default="sgd", choices=get_args(OptimizerName))
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    if for_seeds:
        parser.add_argument(
            "--seed-rate",
            default="host",
            choices=get_args(SeedRate),
            help="rate that seeds follow",
        )
        parser.add_argument(
            "--seed-factor", type=float, default=1.0, help="factor on the rates of seeds"
        )
        parser.add_argument(
            "--seed-warmup", type=int, default=0, help="warm-up epochs of a seed's rate"
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
"""Members to measure without a family, the most informative first."""

STATIC_FACTORS = (1.5, 2.0)
"""Factors of width of the static hosts that growing is compared with."""


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
    """Add the options that select members."""
    parser.add_argument("--family", help="measure members of this family")
    parser.add_argument(
        "--split", default="select", choices=("train", "select"), help="which of them"
    )
    parser.add_argument("--members", nargs="+", help="parts of labels; all by default")


@dataclass(frozen=True, kw_only=True)
class MemberJob:
    """One population on a member."""

    member: Member
    learning_rate: float
    recipe: Recipe
    seeds: tuple[int, ...]
    folder: Path | None
    device: str
    strategy: str
    bf16: bool
    test_limit: int | None
    deadline: float

    @staticmethod
    def settings_of(options: argparse.Namespace) -> dict[str, Any]:
        """Return the fields that the command line sets for all jobs."""
        on_cuda = is_cuda(options.device)
        return {
            "recipe": Recipe.of(options),
            "seeds": tuple(range(options.first_seed, options.first_seed + options.seeds)),
            "folder": options.data,
            "device": options.device,
            "strategy": options.strategy or ("stacked" if on_cuda else "sequential"),
            "bf16": on_cuda and not options.fp32,
            "test_limit": options.test_limit,
        }

    def facts(self) -> dict[str, Any]:
        """Return the entries of its record that do not depend on results."""
        member = self.member
        return {
            "member": member.label,
            "data": member.data,
            "host": member.host,
            "train_size": member.train_size,
            "width": member.width,
            "learning_rate": self.learning_rate,
            **dataclasses.asdict(self.recipe),
            "seeds": list(self.seeds),
        }


def add_run_options(
    parser: argparse.ArgumentParser, *, out: str, seconds: float, seeds: int, first_seed: int
) -> None:
    """Add the options of `MemberJob` and of the output; the arguments are their defaults."""
    parser.add_argument("--data", type=Path, help="folder of the data; the usual places by default")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--summary", type=Path, help="print the tables of this file and end")
    parser.add_argument("--seconds", type=float, default=seconds, help="time limit")
    parser.add_argument("--seeds", type=int, default=seeds, help="networks of each kind")
    parser.add_argument("--first-seed", type=int, default=first_seed)
    parser.add_argument("--horizon", type=int, help="epochs; the members' own by default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--strategy", default=None, help="stacked on a CUDA device by default")
    parser.add_argument("--fp32", action="store_true", help="no BF16 on a CUDA device")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 chooses")
    parser.add_argument("--test-limit", type=int, help="number of test images, for trials")


def load(task: Task, folder: Path | None, test_limit: int | None) -> TaskData:
    """Return the data of a task; tasks share the data of the same source."""
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


def record_all(
    work: Callable[[Any], dict[str, Any]],
    items: Sequence[Any],
    jobs: int,
    options: argparse.Namespace,
    describe: Callable[[dict[str, Any]], str],
) -> list[dict[str, Any]]:
    """Append the record of each item to `options.out`, print a line about it, and return all."""
    started = time.time()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    records = []
    with options.out.open("a", encoding="utf-8") as file:
        for record in work_through(work, items, jobs, started + options.seconds):
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            text = f"failed: {record['error']}" if "error" in record else describe(record)
            spent = time.time() - started
            print(f"[{spent:4.0f} s] {len(records)}/{len(items)} {text}", flush=True)
    print(f"{len(records)} of {len(items)} done after {time.time() - started:.0f} s\n")
    return records


class _Guarded:
    """Turns an error of the work into a record; a class, so that it can be pickled."""

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
    """Return the records of a file of JSON lines, without incomplete lines."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records
