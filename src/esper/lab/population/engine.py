"""The interface of population engines, their settings, and the tools to run them on a device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.blueprints.kin import Kin
from esper.kasmina.blueprints.registry import blueprint_names, drawn_names
from esper.kasmina.engine import EvaluatedEngine
from esper.kasmina.lifecycle import LifecycleConfig, TrainingMode
from esper.kasmina.row_group import RowConfig
from esper.kasmina.training import ObjectiveName, OptimizerName
from esper.lab.tasks.data.source import Kind
from esper.lab.tasks.dataset import TaskData
from esper.lab.tasks.splits import Split
from esper.lab.tasks.task import Task
from esper.leyline.config import Config, option
from esper.leyline.errors import EsperError
from esper.leyline.slots import Symmetry, Topology
from esper.utils.process import capture_graph, grouped


class StrategyError(EsperError, RuntimeError):
    """A host or blueprint cannot run in the strategy that was asked for."""


class MemoryLimitError(EsperError, MemoryError):
    """The rows do not fit into the device's memory."""


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """The activation at a slot of the host."""

    name: str
    path: str
    topology: Topology
    shape: tuple[int, ...]
    channels: int
    symmetry: Symmetry = "bidirectional"
    """What the host makes of the order of positions."""
    kin: Kin = field(default_factory=Kin)
    """Whether the block in front of it can be copied, and what that costs."""


class PopulationEngine(EvaluatedEngine, Protocol):
    """An engine over rows of one architecture, each under its own condition.

    A row rests after the horizon of its task: later epochs do not change it.
    """

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The activation at every slot of the host."""

    @property
    def is_stacked(self) -> bool:
        """Whether all rows are in memory at the same time, including their activations."""

    def score(self, split: Split) -> Tensor:
        """Return float64 [R, 2]: score in points and loss of every row on a whole split.

        Only for the end of an evaluation: no learner and no controller may see the test split.
        """

    def close(self) -> None:
        """Free resources that garbage collection does not free."""


Strategy = Literal["auto", "sequential", "stacked", "workers"]


@dataclass(frozen=True, kw_only=True)
class PopulationConfig(RowConfig):
    """Settings shared by all rows."""

    lifecycle: LifecycleConfig = option(LifecycleConfig, "The life of a seed.")
    training_mode: TrainingMode = option(
        "straight_through", "How a seed in TRAINING learns while the host is left alone."
    )
    copies: bool = option(
        False, "Whether blocks of hosts can be copied: whether `kin` can be germinated."
    )
    precision: Literal["float32", "float64"] = option("float32", "Precision of the weights.")
    use_bf16: bool = option(False, "Run hosts in BF16; weights and statistics stay as they are.")
    use_graphs: bool = option(True, "Capture training and validation in CUDA graphs.")
    rows_per_stack: int = option(
        1024,
        "Most rows trained as one stack; more are several stacks, one after another.",
        minimum=1,
    )
    workers: int = option(
        0, "Processes of the workers strategy; 0 is one for every core.", minimum=0
    )

    @property
    def blueprints(self) -> tuple[str, ...]:
        """Name of every blueprint that rows know, at the index that is its id."""
        return blueprint_names() if self.copies else drawn_names()


EXECUTION_SETTINGS = frozenset({"use_bf16", "use_graphs", "rows_per_stack", "workers"})
"""Settings that change how rows are executed, but not their results."""


# ---- Conditions of rows, and the stacks they form


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """A task and its data."""

    task: Task
    data: TaskData

    @property
    def horizon(self) -> int:
        """Epochs of an episode; the row rests after the last one."""
        return self.task.config.horizon

    @property
    def compute_budget(self) -> int:
        """Training FLOPs of an episode, `NO_BUDGET` without a budget."""
        return self.task.compute_budget(len(self.data.subset))


@dataclass(frozen=True, slots=True)
class StackKey:
    """Properties that the rows of one stack share: shapes, and the operations of one step."""

    builder: Callable[..., Any]
    """Function that builds the host; tasks share it unless they override it."""
    host: str
    host_options: Config
    input_shape: tuple[int, ...]
    num_classes: int | None
    objective: ObjectiveName
    batch_size: int
    samples_per_step: int
    optimizer: OptimizerName
    validation_samples: int
    kind: Kind
    stored: torch.dtype
    """Data type of the stored samples."""
    has_budget: bool
    """Whether epochs are shares of a budget, which consist of whole batches only."""

    @classmethod
    def of(cls, condition: Condition) -> StackKey:
        """Return the key of a row under this condition."""
        task, data = condition.task, condition.data
        config = task.config
        return cls(
            builder=type(task).build_host,
            host=config.host,
            host_options=config.host_options,
            input_shape=config.input_shape,
            num_classes=config.num_classes,
            objective=config.objective,
            batch_size=config.batch_size,
            samples_per_step=data.samples_per_step,
            optimizer=config.optimizer,
            validation_samples=len(data.subset),
            kind=data.kind,
            stored=data.splits.samples["train"].dtype,
            has_budget=config.budget is not None,
        )


@dataclass(frozen=True, slots=True)
class Roster:
    """Assignment of rows to conditions, and of rows to stacks."""

    conditions: tuple[Condition, ...]
    """One condition for every task."""
    task_of_row: tuple[int, ...]
    """Index of every row's condition; rows are ordered by task."""
    architectures: dict[StackKey, list[int]]
    """The rows of every architecture, in order of first occurrence."""

    @classmethod
    def of(cls, conditions: Sequence[Condition], task_of_row: Sequence[int]) -> Roster:
        """Return the roster of rows under these conditions."""
        known = [StackKey.of(condition) for condition in conditions]
        found = grouped((known[index], row) for row, index in enumerate(task_of_row))
        return cls(tuple(conditions), tuple(task_of_row), found)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.task_of_row)

    def condition(self, row: int) -> Condition:
        """Return the condition of a row."""
        return self.conditions[self.task_of_row[row]]

    def take(self, rows: Sequence[int]) -> tuple[Roster, list[int]]:
        """Return the roster of some rows, and their indices in its order, task by task."""
        chosen = sorted(rows, key=lambda row: self.task_of_row[row])
        kept = sorted({self.task_of_row[row] for row in chosen})
        conditions = [self.conditions[index] for index in kept]
        return Roster.of(conditions, [kept.index(self.task_of_row[row]) for row in chosen]), chosen


def divide(rows: Sequence[int], most: int) -> list[list[int]]:
    """Split rows into the fewest parts of at most `most` rows; sizes differ by at most one."""
    parts = -(-len(rows) // most)
    return [part.tolist() for part in np.array_split(rows, parts)]


# ---- Running on a device: CUDA graphs, streams, out-of-memory errors


Step = Callable[[], None]
"""Work on tensors at fixed addresses; only their values change between runs."""


_PRIORITIES = 4
"""Number of stream priorities in PyTorch: 0 and below; the lowest number is served first."""


class StackStream:
    """The CUDA stream of one stack, with the memory pool of its graphs; does nothing without CUDA.

    Several stacks on separate streams use a device better than one: while the host processes one
    stack, the device works on the others. Earlier stacks have priority, so that the first is ready
    before the last.
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
        """Run a block on the stream, after all work that was queued before.

        Args:
            is_awaited: whether later work waits for the block.
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
        """Return a context in which work is captured instead of run.

        All graphs of a stack share one memory pool: only one runs at a time, and its results are
        read before the next one runs.
        """
        # Other threads may use CUDA during the capture.
        return capture_graph(
            graph, pool=self._memory(), stream=self._stream, capture_error_mode="thread_local"
        )

    def _memory(self) -> Any:
        """Return the memory pool of the graphs; an empty graph keeps it alive."""
        if self._pool is None:
            handle, anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            with capture_graph(anchor, pool=handle, stream=self._stream):
                torch.zeros(1, device="cuda")
            self._pool = handle, anchor
        return self._pool[0]


class GraphReplay:
    """Runs a step eagerly the first time, captures it the second time, then replays it.

    A graph is valid until one of its tensors moves. The eager run is the warm-up.
    """

    def __init__(self, stream: StackStream) -> None:
        """Create a runner without a graph."""
        self._stream = stream
        self.captures = 0
        self.forget()

    def forget(self) -> None:
        """Drop the captured step, because one of its tensors has moved."""
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
"""A function and its input activation."""

_SMALL = 2**24
"""Size of an activation in bytes above which a single job uses the whole device."""


class CudaStreams:
    """Streams for independent jobs, used in turn; without streams, jobs run one after another.

    Small kernels use little of a device. Autograd runs the backward pass on the same streams, and a
    captured step keeps them as parallel branches.
    """

    def __init__(self, count: int = 0, priority: int = 0) -> None:
        """Create `count` streams on the current CUDA device."""
        self._streams = [torch.cuda.Stream(priority=priority) for _ in range(count)]

    def run(self, jobs: Sequence[Job]) -> list[Tensor]:
        """Run all jobs; return their results."""
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
            # Its memory must not be reused while the stream still reads it.
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
    """Within the block, an out-of-memory error says how many rows would fit.

    Args:
        rows: number of rows that share the memory.
        at_once: whether they form one stack, which can be split.
        resident: bytes in use before, independent of the number of rows.
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
    """Return how many of `rows` rows would fit, from the allocator's message.

    The rows need at least the memory allocated at the error, minus `resident`, plus the refused
    block. They may need more, so the result is rounded down to a power of two, below the number of
    rows that failed.
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
    """Return the size in bytes in an allocator's message, 0 if there is none."""
    found = pattern.search(message)
    return float(found[1]) * _UNITS[found[2]] if found else 0.0
