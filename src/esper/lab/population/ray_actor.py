"""Many small tensors as a few strings of bytes, and back, bit for bit.

What is seen of rows is some sixty tensors of a few numbers each. One by one they cost more in
handling than in bytes: a copy from and to a device each, an object of the cluster each. So tensors
of one type are put end to end; whole numbers take as few bytes as the largest of their tensor
needs, and truths one bit. That is a third of the bytes, and Ray hands small answers over directly
instead of through its store.
"""

from __future__ import annotations

import math
import os
import pickle
import socket
import time
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lab.population.engine import PopulationConfig, Strategy
from esper.lab.population.population import Population
from esper.lab.tasks.splits import Split
from esper.lab.tasks.task import DataCache, Task, TaskConfig
from esper.leyline.actions import HEAD_NAMES
from esper.leyline.errors import DataError, EsperWarning, UsageError
from esper.leyline.rules import RuleView
from esper.leyline.signals import Signals
from esper.utils.process import choose_device, keep_freed_memory

_TYPES = (torch.bool, torch.int64, torch.float32, torch.float64)
"""What can be packed."""

_WIDTHS = (np.int8, np.int16, np.int32, np.int64)
"""What whole numbers are written as: the first that holds all of a tensor."""

_LARGEST = np.array([np.iinfo(width).max for width in _WIDTHS[:-1]])

_Field = tuple[str, torch.dtype, tuple[int, ...]]
"""A tensor's name, its type, and its shape without the rows."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Tensors of some rows; the first dimension of each is the rows."""

    layout: bytes
    """How many rows and which tensors; the same bytes for the same tensors."""
    bits: bytes
    """All truths."""
    widths: bytes
    """For every tensor of whole numbers, the index of its width."""
    whole: tuple[bytes, ...]
    """All whole numbers, by width."""
    single: bytes
    """All float32."""
    double: bytes
    """All float64."""


def pack(tensors: Mapping[str, Tensor]) -> Packed:
    """Return tensors [R, ...], all on one device, in a form that travels well."""
    rows = len(next(iter(tensors.values())))
    fields = tuple((name, each.dtype, tuple(each.shape[1:])) for name, each in tensors.items())
    layout = _dump_layout(rows, fields)
    bits, numbers, single, double = (_end_to_end(tensors, kind) for kind in _TYPES)
    widths, whole = _narrow(numbers, _load_layout(layout).sizes(torch.int64))
    return Packed(
        layout=layout,
        bits=np.packbits(bits).tobytes(),
        widths=widths.tobytes(),
        whole=whole,
        single=single.tobytes(),
        double=double.tobytes(),
    )


def unpack(
    parts: Sequence[Packed], order: Sequence[int] | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Return the tensors of the rows of several packets.

    Args:
        parts: packets of the same tensors.
        order: row r is row order[r] of the parts one after another; by default as they stand.
        device: where the tensors are wanted; all of a type are one copy.
    """
    layouts = tuple(part.layout for part in parts)
    found: dict[str, Tensor] = {}
    for kind in _TYPES:
        plan = _plan(layouts, None if order is None else tuple(order), kind)
        if plan.names:
            values = np.concatenate([_values(part, kind) for part in parts])[plan.places]
            pieces = torch.from_numpy(values).to(device).split(plan.sizes)
            for name, shape, piece in zip(plan.names, plan.shapes, pieces, strict=True):
                found[name] = piece.view(shape)
    return found


@dataclass(frozen=True)
class _Layout:
    """Which tensors there are, and of how many rows."""

    rows: int
    fields: tuple[_Field, ...]

    def of(self, kind: torch.dtype) -> list[tuple[str, tuple[int, ...]]]:
        """Return the tensors of a type, each with the shape of a row."""
        return [(name, tail) for name, own, tail in self.fields if own == kind]

    def sizes(self, kind: torch.dtype) -> list[int]:
        """Return how many numbers every tensor of a type has."""
        return [self.rows * math.prod(tail) for _, tail in self.of(kind)]


@lru_cache(maxsize=64)
def _dump_layout(rows: int, fields: tuple[_Field, ...]) -> bytes:
    return pickle.dumps((rows, [(name, _TYPES.index(kind), tail) for name, kind, tail in fields]))


@lru_cache(maxsize=64)
def _load_layout(layout: bytes) -> _Layout:
    rows, fields = pickle.loads(layout)
    return _Layout(rows, tuple((name, _TYPES[index], tail) for name, index, tail in fields))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How all tensors of a type come out of the parts."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    sizes: list[int]
    places: NDArray[np.int64]
    """Where each number stands in the parts one after another."""


@lru_cache(maxsize=64)
def _plan(layouts: tuple[bytes, ...], order: tuple[int, ...] | None, kind: torch.dtype) -> _Plan:
    """Work out where numbers go; that is the same in every step of a round."""
    parts = [_load_layout(each) for each in layouts]
    whole = _Layout(sum(part.rows for part in parts), parts[0].fields)
    assert all(part.fields == whole.fields for part in parts), "parts have the same tensors"
    picked = np.arange(whole.rows) if order is None else np.array(order)
    # Places go the way that the numbers will go.
    pieces: list[list[NDArray[np.int64]]] = [[] for _ in whole.of(kind)]
    start = 0
    for part in parts:
        for own, size in zip(pieces, part.sizes(kind), strict=True):
            own.append(np.arange(start, start + size).reshape(part.rows, -1))
            start += size
    places = [np.concatenate(own)[picked].ravel() for own in pieces]
    return _Plan(
        names=[name for name, _ in whole.of(kind)],
        shapes=[(whole.rows, *tail) for _, tail in whole.of(kind)],
        sizes=whole.sizes(kind),
        places=np.concatenate([np.empty(0, np.int64), *places]),
    )


def _end_to_end(tensors: Mapping[str, Tensor], kind: torch.dtype) -> NDArray[Any]:
    """Return all tensors of a type as one array; that is one copy from a device."""
    own = [tensor.reshape(-1) for tensor in tensors.values() if tensor.dtype == kind]
    joined: NDArray[Any] = (torch.cat(own) if own else torch.empty(0, dtype=kind)).cpu().numpy()
    return joined


def _narrow(
    numbers: NDArray[np.int64], sizes: Sequence[int]
) -> tuple[NDArray[np.uint8], tuple[bytes, ...]]:
    """Return the width of every tensor, and all numbers by width."""
    widths = np.zeros(len(sizes), dtype=np.uint8)
    filled = [index for index, size in enumerate(sizes) if size]
    if filled:
        starts = np.cumsum([0, *sizes])[filled]
        low, high = np.minimum.reduceat(numbers, starts), np.maximum.reduceat(numbers, starts)
        # A negative number needs what its complement needs: -128 fits where 127 does.
        widths[filled] = np.searchsorted(_LARGEST, np.maximum(high, ~low))
    by_number = np.repeat(widths, sizes)
    return widths, tuple(
        numbers[by_number == index].astype(width).tobytes() for index, width in enumerate(_WIDTHS)
    )


def _values(part: Packed, kind: torch.dtype) -> NDArray[Any]:
    """Return all numbers of a type as they were before they were packed."""
    if kind == torch.float32:
        return np.frombuffer(part.single, np.float32)
    if kind == torch.float64:
        return np.frombuffer(part.double, np.float64)
    sizes = _load_layout(part.layout).sizes(kind)
    if kind == torch.bool:
        bits = np.unpackbits(np.frombuffer(part.bits, np.uint8), count=sum(sizes))
        return bits.view(np.bool_)
    numbers = np.empty(sum(sizes), dtype=np.int64)
    by_number = np.repeat(np.frombuffer(part.widths, np.uint8), sizes)
    for index, width in enumerate(_WIDTHS):
        numbers[by_number == index] = np.frombuffer(part.whole[index], width)
    return numbers


# ---- What travels between a program and the actors of its cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsWanted:
    """All that an actor needs to know to have a population of some rows."""

    tasks: Sequence[tuple[type[Task], TaskConfig]]
    """What rows are of; classes travel by name."""
    rows: Sequence[int]
    """How many of every task."""
    num_slots: int
    """Slots of the row with the most of them, be it here or in another actor."""
    seed: int
    strategy: Strategy
    data: str | None
    """Where data files lie on the actor's machine; the usual places if None."""
    fingerprints: Mapping[Hashable, str]
    """By splits: the checksum of the program's data, which the actor's must have."""
    blueprints: tuple[str, ...]
    """What the program has registered, in its order."""
    config: PopulationConfig


@dataclass(frozen=True, slots=True)
class Lived:
    """What an actor answers after an epoch of its rows."""

    seen: Packed
    """Signals and panics."""
    view: Packed
    """What legality depends on."""
    seconds: float
    """How long the rows took there, without packing."""
    processor_seconds: float
    """Time that the process had the processor for them."""
    warnings: tuple[str, ...]
    """What was warned of for the first time."""

    @classmethod
    def pack(
        cls,
        signals: Signals,
        panics: Tensor,
        view: RuleView,
        spent: tuple[float, float],
        warnings: tuple[str, ...] = (),
    ) -> Lived:
        """Return the answer; `spent` is by the clock and by the processor."""
        seen = {**signals.state_dict(), _PANICS: panics}
        return cls(pack(seen), pack(view.state_dict()), *spent, warnings)

    @staticmethod
    def unpack(
        parts: Sequence[Lived], order: Sequence[int], device: torch.device
    ) -> tuple[Signals, Tensor, RuleView]:
        """Return signals and panics on a device, and the view: row r is row order[r] of the parts.

        As in a population of this process, the view is not on the device.
        """
        seen = unpack([part.seen for part in parts], order, device)
        panics = seen.pop(_PANICS)
        view = unpack([part.view for part in parts], order)
        return Signals(**seen), panics, RuleView(**view)


ACTIONS = "actions"
"""Name of what is packed for a step: int64 [R, heads], one column for each of `HEAD_NAMES`."""

_PANICS = "panics"


# - `PopulationActor`: one process of a cluster with one device, and the populations it is asked for


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
        self._shelves: dict[str | None, DataCache] = {}
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
        own = wanted.config.blueprints
        if own != wanted.blueprints:
            other = sorted(set(wanted.blueprints) ^ set(own)) or ["their order"]
            raise UsageError(
                f"the blueprints on {socket.gethostname()} are not those of the program "
                f"({', '.join(other)}); install what registers them on every node"
            )
        tasks = [kind(config) for kind, config in wanted.tasks]
        shelf = self._shelves.setdefault(wanted.data, DataCache(wanted.data, self._device))
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
