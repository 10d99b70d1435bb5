"""Running on a device: CUDA graphs, streams, and out-of-memory errors that say what would fit.

`GraphReplay` captures a training step (`StackedEngine`) or a validation pass (`ValidationPass`);
`CudaStreams` runs seeds of different blueprints side by side (`SlotForward`);
`naming_rows_that_fit` turns an allocator's complaint into advice (`Population`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from esper.leyline.process import without_collections
from esper.population.engine import MemoryLimitError

Step = Callable[[], None]
"""Work on tensors that stay where they are; what changes from run to run are their numbers."""


class GraphReplay:
    """Runs a step eagerly once, then captures it, then replays it in one launch.

    One graph serves until some tensor that the step works on has to be moved. The eager run warms
    everything up.
    """

    def __init__(self) -> None:
        """Create a runner that has seen nothing."""
        self.captures = 0
        self.forget()

    def forget(self) -> None:
        """Drop the captured step: something it works on has moved."""
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: Step) -> None:
        """Carry out one step."""
        if not self._warm:
            self._run_beside(step)
            self._warm = True
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on: the sampler draws the next epoch meanwhile.
            capture = torch.cuda.graph(graph, pool=_pool()[0], capture_error_mode="thread_local")
            with without_collections(), capture:
                step()
            self._graph = graph
            self.captures += 1
        self._graph.replay()

    def _run_beside(self, step: Step) -> None:
        """Run on a side stream, as capture will: libraries set up what they need there."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)


@lru_cache(maxsize=1)
def _pool() -> tuple[Any, torch.cuda.CUDAGraph]:
    """Return the memory that all graphs share.

    One graph runs at a time, and what it leaves there is read before the next one runs. A pool
    lives as long as some graph uses it; the empty one returned with it keeps it.
    """
    pool = torch.cuda.graph_pool_handle()
    anchor = torch.cuda.CUDAGraph()
    with torch.cuda.graph(anchor, pool=pool):
        torch.zeros(1, device="cuda")
    return pool, anchor


Job = tuple[Callable[[Tensor], Tensor], Tensor]
"""A function and the activation it works on."""

_SMALL = 2**24
"""Bytes of an activation above which one job alone fills the device."""


class CudaStreams:
    """Streams that independent jobs take turns on; without any, jobs run one after another.

    Small kernels leave most of a device idle. Autograd takes the way back on the same streams, and
    a captured step keeps them apart as branches.
    """

    def __init__(self, count: int = 0) -> None:
        """Create `count` streams on the current CUDA device."""
        self._streams = [torch.cuda.Stream() for _ in range(count)]

    def run(self, jobs: Sequence[Job]) -> list[Tensor]:
        """Return what the functions return for their activations."""
        largest = max((x.numel() * x.element_size() for _, x in jobs), default=0)
        if not self._streams or largest > _SMALL or len(jobs) < 2:
            return [function(x) for function, x in jobs]
        here = torch.cuda.current_stream()
        used = self._streams[: len(jobs)]
        for stream in used:
            stream.wait_stream(here)
        results = []
        for number, (function, x) in enumerate(jobs):
            stream = used[number % len(used)]
            # Its memory must not be given away while the stream still reads it.
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                results.append(function(x))
        for stream in used:
            here.wait_stream(stream)
        return results


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"

_WANTED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_CAPACITY = re.compile(rf"total capacity of {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_HELD = re.compile(rf"{_SIZE} is allocated by PyTorch")
_SPARE = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_CPU = "DefaultCPUAllocator"


@contextmanager
def naming_rows_that_fit(rows: int, *, at_once: bool, resident: int = 0) -> Iterator[None]:
    """Within the block, an out-of-memory error becomes one that names how many rows would fit.

    Args:
        rows: how many rows share the memory that ran out.
        at_once: whether they are one stack, which can be divided into several.
        resident: bytes that were taken before, whatever the number of rows.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _explain(str(error), rows, at_once, resident) from error
    except MemoryError as error:
        if isinstance(error, MemoryLimitError):
            raise
        raise _explain(str(error), rows, at_once, resident) from error
    except RuntimeError as error:
        if _CPU not in str(error):
            raise
        raise _explain(str(error), rows, at_once, resident) from error


def rows_that_fit(message: str, rows: int, resident: int = 0) -> int:
    """Return how many of `rows` rows would fit, from what the allocator said.

    The rows had taken what was allocated when the error came, less what was resident before, and
    wanted at least the piece that was refused. How much more they would have wanted nobody knows,
    so the answer is the power of two below the quotient, and below the number that failed.
    """
    wanted, held = _find(_WANTED, message), _find(_HELD, message)
    available = held + _find(_FREE, message) + _find(_SPARE, message) - resident
    need = held + wanted - resident
    fitting = rows * available / need if held and need > 0 else rows / 2
    most = max(1, min(int(fitting), rows - 1))
    return 1 << (most.bit_length() - 1)


def _explain(message: str, rows: int, at_once: bool, resident: int) -> MemoryLimitError:
    capacity = _find(_CAPACITY, message)
    place = f"the device's {capacity / 2**30:.1f} GiB" if capacity else "memory"
    if rows == 1:
        return MemoryLimitError(
            f"not even one row fits into {place}; use a smaller batch_size or a smaller host"
        )
    fitting = rows_that_fit(message, rows, resident)
    if at_once:
        return MemoryLimitError(
            f"{rows} rows at once do not fit into {place}, {fitting} would; "
            f"use PopulationConfig(rows_per_stack={fitting}) or rows={fitting}"
        )
    return MemoryLimitError(
        f"{rows} rows do not fit into {place}, {fitting} would; use rows={fitting}"
    )


def _find(pattern: re.Pattern[str], message: str) -> float:
    """Return the size in bytes that an allocator's message names, 0 where it does not."""
    found = pattern.search(message)
    return float(found[1]) * _UNITS[found[2]] if found else 0.0
