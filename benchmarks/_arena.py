"""Small image tasks on which growth can matter, and how many of them are run side by side."""

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
from typing import Any, ClassVar, get_args

import torch

from esper.kasmina.hosts import CnnConfig, doubling
from esper.tasks.data import Source, open_data
from esper.tasks.dataset import TaskData
from esper.tasks.task import DataPath, Task, TaskConfig
from esper.tasks.training import OptimizerName, Schedule, SeedRate

DEPTH = 3
SHAPES: dict[str, tuple[int, int, int]] = {"cifar16": (3, 16, 16), "fashion14": (1, 14, 14)}
"""Shape of an image of every data set, which is `NAME.npz` in the data folder."""


@dataclass(frozen=True)
class Recipe:
    """How the networks of the arena are trained, apart from the learning rate."""

    optimizer: OptimizerName = "sgd"
    weight_decay: float = 5e-4
    schedule: Schedule = "constant"
    seed_rate: SeedRate = "host"
    seed_factor: float = 1.0
    seed_warmup: int = 0

    @classmethod
    def of(cls, options: argparse.Namespace) -> Recipe:
        """Return what the command line says; what it has no option for is left as it is."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in vars(options)]
        return cls(**{name: vars(options)[name] for name in names})


PLAIN = Recipe()


def add_recipe_options(parser: argparse.ArgumentParser, *, for_seeds: bool) -> None:
    """Add what a `Recipe` is made of to a command line."""
    parser.add_argument("--schedule", default="cosine", choices=get_args(Schedule))
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


class SmallImages(Task):
    """Images in one npz file with a plain conv host."""

    name: ClassVar[str] = "small_images"

    def read(self, data_path: DataPath | None) -> Source:
        """Return the images of the given file."""
        if data_path is None:
            raise ValueError("small images need the path of their npz file")
        return open_data(data_path)


@dataclass(frozen=True)
class Member:
    """One task of the arena: data, how much and how clean it is, and how wide the host."""

    data: str
    width: int
    train_size: int = 20_000
    label_noise: float = 0.0

    @property
    def label(self) -> str:
        """A name that says everything."""
        noise = f", noise {self.label_noise:g}" if self.label_noise else ""
        return f"{self.data} width {self.width}, {self.train_size} images{noise}"

    def wider(self, factor: float) -> Member:
        """Return the same task with a wider host."""
        return dataclasses.replace(self, width=round(factor * self.width))

    def task(
        self,
        *,
        learning_rate: float,
        horizon: int,
        samples: int,
        batch: int,
        recipe: Recipe = PLAIN,
    ) -> Task:
        """Return the task, trained in this way."""
        shape = SHAPES[self.data]
        return SmallImages(
            TaskConfig(
                host="cnn",
                host_options=CnnConfig(
                    channels=doubling(self.width, DEPTH), in_channels=shape[0], num_classes=10
                ),
                input_shape=shape,
                batch_size=batch,
                samples_per_step=samples,
                horizon=horizon,
                learning_rate=learning_rate,
                **dataclasses.asdict(recipe),
                train_size=self.train_size,
                label_noise=self.label_noise,
            )
        )


MEMBERS: tuple[Member, ...] = (
    Member("cifar16", 8),
    Member("cifar16", 4),
    Member("cifar16", 16),
    Member("fashion14", 8),
    Member("cifar16", 8, train_size=2_000),
    Member("cifar16", 8, label_noise=0.3),
    Member("fashion14", 4),
)
"""The members of the arena, those that say most first."""

STATIC_FACTORS = (1.5, 2.0)
"""How much wider the hosts are that growing is compared with."""


@lru_cache(maxsize=8)
def load(member: Member, folder: Path, samples: int, test_limit: int | None) -> TaskData:
    """Return a member's data, which does not depend on the learning rate or the width."""
    data = _load(dataclasses.replace(member, width=1), folder, samples)
    if test_limit is None:
        return data
    return dataclasses.replace(
        data,
        samples={**data.samples, "test": data.samples["test"][:test_limit]},
        targets={**data.targets, "test": data.targets["test"][:test_limit]},
    )


@lru_cache(maxsize=8)
def _load(member: Member, folder: Path, samples: int) -> TaskData:
    task = member.task(learning_rate=0.1, horizon=1, samples=samples, batch=1)
    return task.load(folder / f"{member.data}.npz")


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
