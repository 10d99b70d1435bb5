"""Running on a device: CUDA graphs, streams, and out-of-memory errors that say what would fit.

`StackStream` lets stacks run side by side (`StackedEngine`); `GraphReplay` captures a training step
or a validation pass of one; `CudaStreams` runs seeds of different blueprints side by side
(`SlotForward`);
`naming_rows_that_fit` turns an allocator's complaint into advice (`Population`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from esper.leyline.process import capture_graph
from esper.population.engine import MemoryLimitError

Step = Callable[[], None]
"""Work on tensors that stay where they are; what changes from run to run are their numbers."""


_PRIORITIES = 4
"""How many PyTorch tells apart: 0 and those below, the lowest number first."""


class StackStream:
    """The stream of one stack, with memory that only its graphs use; without CUDA, nothing.

    Stacks on streams of their own fill a device together that none of them fills alone, and while
    the host is busy with one, the device works on the others. For that the first has to be ready
    before the last: earlier turns have precedence.
    """

    def __init__(self, device: torch.device, turn: int = 0) -> None:
        """Create a stream on a CUDA device."""
        self.is_on_cuda = device.type == "cuda"
        self.priority = min(0, turn + 1 - _PRIORITIES)
        self._stream: torch.cuda.Stream | None = None
        self._pool: tuple[Any, torch.cuda.CUDAGraph] | None = None
        if self.is_on_cuda:
            self._stream = torch.cuda.Stream(device, priority=self.priority)

    @contextmanager
    def use(self, *, is_awaited: bool = True) -> Iterator[None]:
        """Run a block on the stream, after what was begun before.

        Args:
            is_awaited: whether what begins after the block runs after it.
        """
        if self._stream is None:
            yield
            return
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        if is_awaited:
            here.wait_stream(self._stream)

    def capture(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        """Return a block whose work is recorded instead of done.

        All graphs of a stack share memory: one of them runs at a time, and what it leaves there is
        read before the next one runs.
        """
        # Other threads may go on, as the capture is none of theirs.
        return capture_graph(
            graph, pool=self._memory(), stream=self._stream, capture_error_mode="thread_local"
        )

    def _memory(self) -> Any:
        """Return the memory of graphs: it lives as long as a graph does, and an empty one does."""
        if self._pool is None:
            handle, anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            with capture_graph(anchor, pool=handle, stream=self._stream):
                torch.zeros(1, device="cuda")
            self._pool = handle, anchor
        return self._pool[0]


class GraphReplay:
    """Runs a step eagerly once, then captures it, then replays it in one launch.

    One graph serves until some tensor that the step works on has to be moved. The eager run warms
    everything up.
    """

    def __init__(self, stream: StackStream) -> None:
        """Create a runner that has seen nothing."""
        self._stream = stream
        self.captures = 0
        self.forget()

    def forget(self) -> None:
        """Drop the captured step: something it works on has moved."""
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: Step) -> None:
        """Carry out one step."""
        if not self._warm:
            step()
            self._warm = True
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with self._stream.capture(graph):
                step()
            self._graph = graph
            self.captures += 1
        self._graph.replay()


Job = tuple[Callable[[Tensor], Tensor], Tensor]
"""A function and the activation it works on."""

_SMALL = 2**24
"""Bytes of an activation above which one job alone fills the device."""


class CudaStreams:
    """Streams that independent jobs take turns on; without any, jobs run one after another.

    Small kernels leave most of a device idle. Autograd takes the way back on the same streams, and
    a captured step keeps them apart as branches.
    """

    def __init__(self, count: int = 0, priority: int = 0) -> None:
        """Create `count` streams on the current CUDA device."""
        self._streams = [torch.cuda.Stream(priority=priority) for _ in range(count)]

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
    except MemoryLimitError:
        raise
    except (MemoryError, RuntimeError) as error:
        is_about_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_about_memory and _CPU not in str(error):
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
