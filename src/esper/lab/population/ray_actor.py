"""The process behind an actor of a Ray cluster, and how tensors travel to and from it.

The signals of rows are about sixty small tensors. Sent one by one, each costs a device copy and a
Ray object. So tensors of one type are concatenated; integers use the fewest bytes that hold their
tensor's largest value, and booleans one bit. This takes a third of the bytes, and Ray passes small
answers directly instead of through its object store. Unpacked tensors are bit-identical.
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
"""Types that can be packed."""

_WIDTHS = (np.int8, np.int16, np.int32, np.int64)
"""Types of packed integers; the first one that holds all values of a tensor is used."""

_LARGEST = np.array([np.iinfo(width).max for width in _WIDTHS[:-1]])

_Field = tuple[str, torch.dtype, tuple[int, ...]]
"""A tensor's name, its type, and its shape without the rows."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Tensors of some rows; the first dimension of each is the rows."""

    layout: bytes
    """Number of rows, and names and types of the tensors; equal bytes for equal layouts."""
    bits: bytes
    """All booleans."""
    widths: bytes
    """For every integer tensor, the index of its type."""
    whole: tuple[bytes, ...]
    """All integers, by type."""
    single: bytes
    """All float32."""
    double: bytes
    """All float64."""


def pack(tensors: Mapping[str, Tensor]) -> Packed:
    """Pack tensors [R, ...], all on one device, into a few byte strings."""
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
        order: row r is row order[r] of the concatenated parts; by default r.
        device: device of the tensors; all tensors of a type are copied at once.
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
    """Names, types and shapes of tensors, and their number of rows."""

    rows: int
    fields: tuple[_Field, ...]

    def of(self, kind: torch.dtype) -> list[tuple[str, tuple[int, ...]]]:
        """Return the tensors of a type, each with the shape of a row."""
        return [(name, tail) for name, own, tail in self.fields if own == kind]

    def sizes(self, kind: torch.dtype) -> list[int]:
        """Return the number of values of every tensor of a type."""
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
    """Positions of all tensors of a type in the parts."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    sizes: list[int]
    places: NDArray[np.int64]
    """Index of each value in the concatenated parts."""


@lru_cache(maxsize=64)
def _plan(layouts: tuple[bytes, ...], order: tuple[int, ...] | None, kind: torch.dtype) -> _Plan:
    """Compute the positions of all values; they are the same in every step of a round."""
    parts = [_load_layout(each) for each in layouts]
    whole = _Layout(sum(part.rows for part in parts), parts[0].fields)
    assert all(part.fields == whole.fields for part in parts), "parts have the same tensors"
    picked = np.arange(whole.rows) if order is None else np.array(order)
    # Indices are rearranged in the same way as the values.
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
    """Return all tensors of a type as one array, with a single device copy."""
    own = [tensor.reshape(-1) for tensor in tensors.values() if tensor.dtype == kind]
    joined: NDArray[Any] = (torch.cat(own) if own else torch.empty(0, dtype=kind)).cpu().numpy()
    return joined


def _narrow(
    numbers: NDArray[np.int64], sizes: Sequence[int]
) -> tuple[NDArray[np.uint8], tuple[bytes, ...]]:
    """Return the type index of every tensor, and all values by type."""
    widths = np.zeros(len(sizes), dtype=np.uint8)
    filled = [index for index, size in enumerate(sizes) if size]
    if filled:
        starts = np.cumsum([0, *sizes])[filled]
        low, high = np.minimum.reduceat(numbers, starts), np.maximum.reduceat(numbers, starts)
        # A negative number needs as many bits as its complement: -128 fits where 127 does.
        widths[filled] = np.searchsorted(_LARGEST, np.maximum(high, ~low))
    by_number = np.repeat(widths, sizes)
    return widths, tuple(
        numbers[by_number == index].astype(width).tobytes() for index, width in enumerate(_WIDTHS)
    )


def _values(part: Packed, kind: torch.dtype) -> NDArray[Any]:
    """Return all values of a type, unpacked."""
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


# ---- Messages between the driver and the actors of its cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsWanted:
    """What an actor needs to build a population of some rows."""

    tasks: Sequence[tuple[type[Task], TaskConfig]]
    """Tasks of the rows; classes are sent by name."""
    rows: Sequence[int]
    """Number of rows of every task."""
    num_slots: int
    """Most slots of any row, in this actor or another one."""
    seed: int
    strategy: Strategy
    data: str | None
    """Path of the data files on the actor's machine; the usual places if None."""
    fingerprints: Mapping[Hashable, str]
    """Checksum of the driver's data by splits; the actor's data must have the same."""
    blueprints: tuple[str, ...]
    """Blueprints registered in the driver, in order."""
    config: PopulationConfig


@dataclass(frozen=True, slots=True)
class Lived:
    """Answer of an actor after an epoch of its rows."""

    seen: Packed
    """Signals and panics."""
    view: Packed
    """Inputs of the legality rules."""
    seconds: float
    """Seconds that the rows took, without packing."""
    processor_seconds: float
    """CPU seconds of the process."""
    warnings: tuple[str, ...]
    """Warnings that are new since the last answer."""

    @classmethod
    def pack(
        cls,
        signals: Signals,
        panics: Tensor,
        view: RuleView,
        spent: tuple[float, float],
        warnings: tuple[str, ...] = (),
    ) -> Lived:
        """Pack an answer; `spent` is wall-clock and CPU time."""
        seen = {**signals.state_dict(), _PANICS: panics}
        return cls(pack(seen), pack(view.state_dict()), *spent, warnings)

    @staticmethod
    def unpack(
        parts: Sequence[Lived], order: Sequence[int], device: torch.device
    ) -> tuple[Signals, Tensor, RuleView]:
        """Return signals and panics on a device, and the view; row r is row order[r] of the parts.

        The view is on the CPU, as in a population of this process.
        """
        seen = unpack([part.seen for part in parts], order, device)
        panics = seen.pop(_PANICS)
        view = unpack([part.view for part in parts], order)
        return Signals(**seen), panics, RuleView(**view)


ACTIONS = "actions"
"""Name of the packed actions of a step: int64 [R, heads], a column for each of `HEAD_NAMES`."""

_PANICS = "panics"


# - `PopulationActor`: a process of a cluster with one device and its populations


class PopulationActor:
    """The populations of one device, by number.

    Args:
        device: 'cpu' or 'cuda'; a CPU actor uses one thread.
    """

    def __init__(self, device: str) -> None:
        """Choose the device; nothing is read yet."""
        self._device = choose_device(device)
        if self._device.type == "cpu":
            torch.set_num_threads(1)
        keep_freed_memory()
        self._shelves: dict[str | None, DataCache] = {}
        self._fingerprints: dict[Hashable, str] = {}
        self._populations: dict[int, Population] = {}
        self._warnings: dict[str, bool] = {}
        """Warnings so far, and whether each was sent to the driver."""

    def describe(self) -> dict[str, Any]:
        """Return the node and the process of the actor."""
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
        # Signals of all actors are merged, so all have the same number of slots.
        population.num_slots = wanted.num_slots
        shelf.forget_all_but(task for each in self._populations.values() for task in each.tasks)

    def reset(self, number: int, row_seeds: Sequence[int]) -> Lived:
        """Build every row and train its first epoch."""
        started = _now()
        with self._noting_warnings():
            signals = self._populations[number].reset(row_seeds)
        return self._lived(number, signals, started)

    def step(self, number: int, actions: Packed) -> Lived:
        """Carry out one action per row, then train and measure one epoch."""
        table = unpack([actions])[ACTIONS]
        chosen = dict(zip(HEAD_NAMES, table.unbind(1), strict=True))
        started = _now()
        with self._noting_warnings():
            signals = self._populations[number].step(chosen)
        return self._lived(number, signals, started)

    def restore(
        self, number: int, seed: int, row_seeds: Sequence[int], rows: Sequence[dict[str, Any]]
    ) -> Lived:
        """Restore every row from a saved state."""
        started = _now()
        with self._noting_warnings():
            signals = self._populations[number].restore_rows(seed, row_seeds, rows)
        return self._lived(number, signals, started)

    def snapshot(self, number: int) -> list[dict[str, Any]]:
        """Return the state of each row separately."""
        return self._populations[number].snapshot_rows()

    def keep_networks(self, number: int, which: Sequence[bool]) -> None:
        """Keep copies of the networks of these rows."""
        self._populations[number].keep_networks(torch.tensor(which))

    def bring_back(self, number: int) -> None:
        """Replace every network by its kept copy."""
        self._populations[number].bring_back()

    def results_on(self, number: int, split: Split) -> tuple[Tensor, Tensor]:
        """Return scores and losses on a whole split."""
        scores, losses = self._populations[number].results_on(split)
        return scores.cpu(), losses.cpu()

    def close(self, number: int) -> None:
        """Remove a population."""
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
        """Collect warnings for the driver, which would not see them otherwise."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", EsperWarning)
            yield
        for each in caught:
            if issubclass(each.category, EsperWarning):
                self._warnings.setdefault(str(each.message), False)
            else:
                warnings.showwarning(each.message, each.category, each.filename, each.lineno)


def _now() -> tuple[float, float]:
    """Return the wall-clock and the CPU time."""
    return time.perf_counter(), time.process_time()
