"""`PopulationActor`: one process of a cluster with one device, and the populations it is asked for.

It knows nothing of Ray: whatever carries its methods' arguments and answers will do.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import drawn_names
from esper.leyline.actions import HEAD_NAMES
from esper.leyline.errors import DataError, EsperWarning, UsageError
from esper.leyline.process import choose_device, keep_freed_memory
from esper.leyline.signals import Signals
from esper.population.cluster.messages import ACTIONS, Lived, RowsWanted
from esper.population.cluster.packing import Packed, unpack
from esper.population.population import Population
from esper.tasks.shelf import DataShelf
from esper.tasks.splits import Split


class PopulationActor:
    """Populations on one device, by number.

    Args:
        device: 'cpu' or 'cuda'; on a CPU one thread is used, whatever the machine has.
    """

    def __init__(self, device: str) -> None:
        """Take the device; nothing is read yet."""
        self._device = choose_device(device)
        if self._device.type == "cpu":
            torch.set_num_threads(1)
        keep_freed_memory()
        self._shelves: dict[str | None, DataShelf] = {}
        self._fingerprints: dict[Hashable, str] = {}
        self._populations: dict[int, Population] = {}
        self._warnings: dict[str, bool] = {}
        """What was warned of, and whether the program knows."""

    def describe(self) -> dict[str, Any]:
        """Return where this is."""
        name = torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu"
        return {"host": socket.gethostname(), "pid": os.getpid(), "device": name}

    def open(self, number: int, wanted: RowsWanted) -> None:
        """Have a population under a number, in place of one that was there; it has no rows yet."""
        if drawn_names() != wanted.blueprints:
            other = sorted(set(wanted.blueprints) ^ set(drawn_names())) or ["their order"]
            raise UsageError(
                f"the blueprints on {socket.gethostname()} are not those of the program "
                f"({', '.join(other)}); install what registers them on every node"
            )
        tasks = [kind(config) for kind, config in wanted.tasks]
        shelf = self._shelves.setdefault(wanted.data, DataShelf(wanted.data, self._device))
        data = [shelf.load(task) for task in tasks]
        for task, each in zip(tasks, data, strict=True):
            read = wanted.data, task.splits_key
            if read not in self._fingerprints:
                self._fingerprints[read] = each.splits.fingerprint()
            if self._fingerprints[read] != wanted.fingerprints[task.splits_key]:
                raise DataError(
                    f"the data of {task.name!r} on {socket.gethostname()} are not those of the "
                    "program; give every node the same files"
                )
        population = self._populations.get(number)
        if population is not None:
            population.assign(tasks, wanted.rows, data)
        else:
            population = self._populations[number] = Population(
                tasks,
                wanted.rows,
                seed=wanted.seed,
                device=str(self._device),
                strategy=wanted.strategy,
                data=data,
                config=wanted.config,
            )
        # Signals of all actors are put together, so all have as many slots.
        population.num_slots = wanted.num_slots
        shelf.forget_all_but(task for each in self._populations.values() for task in each.tasks)

    def reset(self, number: int, row_seeds: Sequence[int]) -> Lived:
        """Build every row afresh and live its first epoch."""
        started = _now()
        with self._noting_warnings():
            signals = self._populations[number].reset(row_seeds)
        return self._lived(number, signals, started)

    def step(self, number: int, actions: Packed) -> Lived:
        """Carry out one action per row and live through the epoch that follows."""
        table = unpack([actions])[ACTIONS]
        chosen = dict(zip(HEAD_NAMES, table.unbind(1), strict=True))
        started = _now()
        with self._noting_warnings():
            signals = self._populations[number].step(chosen)
        return self._lived(number, signals, started)

    def restore(
        self, number: int, seed: int, row_seeds: Sequence[int], rows: Sequence[dict[str, Any]]
    ) -> Lived:
        """Bring every row into a saved state."""
        started = _now()
        with self._noting_warnings():
            signals = self._populations[number].restore_rows(seed, row_seeds, rows)
        return self._lived(number, signals, started)

    def snapshot(self, number: int) -> list[dict[str, Any]]:
        """Return the state of every row, each by itself."""
        return self._populations[number].snapshot_rows()

    def results_on(self, number: int, split: Split) -> tuple[Tensor, Tensor]:
        """Return scores and losses on a whole split."""
        scores, losses = self._populations[number].results_on(split)
        return scores.cpu(), losses.cpu()

    def close(self, number: int) -> None:
        """Forget a population."""
        population = self._populations.pop(number, None)
        if population is not None:
            population.close()

    def _lived(self, number: int, signals: Signals, started: tuple[float, float]) -> Lived:
        population = self._populations[number]
        view, panics, now = population.view(), population.panics(), _now()
        spent = now[0] - started[0], now[1] - started[1]
        news = tuple(text for text, is_known in self._warnings.items() if not is_known)
        self._warnings |= dict.fromkeys(news, True)
        return Lived.pack(signals, panics, view, spent, news)

    @contextmanager
    def _noting_warnings(self) -> Iterator[None]:
        """Keep what is warned of for the program, which would not see it otherwise."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", EsperWarning)
            yield
        for each in caught:
            if issubclass(each.category, EsperWarning):
                self._warnings.setdefault(str(each.message), False)
            else:
                warnings.showwarning(each.message, each.category, each.filename, each.lineno)


def _now() -> tuple[float, float]:
    """Return the clock and the processor's time."""
    return time.perf_counter(), time.process_time()
