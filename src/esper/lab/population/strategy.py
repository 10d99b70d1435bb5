"""Chooses how rows run, and builds their engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import blueprint_by_id, offered
from esper.kasmina.slots.probe import hooked
from esper.lab.population.engine import (
    Condition,
    PopulationConfig,
    PopulationEngine,
    Strategy,
    divide,
)
from esper.lab.population.sequential import build_hosts, find_slots, make_sequential
from esper.lab.population.stacked import StackedEngine
from esper.lab.population.vmap_rules import host_problem, seed_problem
from esper.lab.population.worker_pool import may_start_processes, usable_cores
from esper.lab.population.workers import WorkerClient, WorkersEngine
from esper.lab.tasks.dataset import TaskData
from esper.lab.tasks.task import Task, get_task
from esper.leyline.errors import UsageError, warn

# - The number of rows of a stack: limited by the setting and by the memory


_COPIES = 4.0
"""Memory of a training step as a multiple of the host's activations, with half of the slots in use.
"""

_SHARE = 0.6
"""Share of a device's memory for training; the rest is for validation and permanent tensors."""


def most_rows_of(task: Task, config: PopulationConfig, device: torch.device) -> int:
    """Return the largest number of rows of a task in one stack."""
    if device.type != "cuda":
        return config.rows_per_stack
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(config.rows_per_stack, rows_that_memory_holds(task, config, memory))


def rows_that_memory_holds(task: Task, config: PopulationConfig, memory: int) -> int:
    """Return the number of rows that fit into a device's memory, at least one."""
    itemsize = 2 if config.use_bf16 else 8 if config.precision == "float64" else 4
    activations = count_activations(task.build_host(0), task.example_input(1))
    row = _COPIES * activations * task.config.batch_size * itemsize
    return max(1, int(_SHARE * memory / row)) if row else sys.maxsize


def count_activations(host: nn.Module, example: Tensor) -> int:
    """Return the number of values in the outputs of a host's modules for one sample."""
    total = 0

    def count(path: str, module: nn.Module, args: object, output: object) -> None:
        nonlocal total
        if isinstance(output, Tensor):
            total += output.numel()

    leaves = {
        name: each for name, each in host.named_modules() if next(each.children(), None) is None
    }
    with hooked(leaves, count), torch.no_grad():
        host(example)
    return total


_STRATEGIES = ("auto", "sequential", "stacked", "workers")


_SAMPLES_WORTH_PROCESSES = 200_000
"""Training samples of an episode from which starting processes pays."""


def pick_strategy(
    asked: Strategy,
    device: torch.device,
    config: PopulationConfig,
    *,
    rows: int,
    samples: int,
    has_processes: bool = False,
) -> tuple[Strategy, str]:
    """Return the strategy to use, and the reason.

    Args:
        asked: the caller's choice.
        device: where the rows run.
        config: settings shared by all rows.
        rows: number of rows.
        samples: training samples of all rows in one episode.
        has_processes: whether worker processes run already.
    """
    if asked not in _STRATEGIES:
        raise UsageError(f"strategy must be one of {', '.join(_STRATEGIES)}, got {asked!r}")
    if asked == "workers" and device.type != "cpu":
        raise UsageError(
            f"strategy 'workers' runs on the CPU, but the device is {device}; "
            "use device='cpu' or strategy='stacked'"
        )
    if asked != "auto":
        return asked, "it was asked for"
    if device.type == "cuda" and config.training_mode == "shadow":
        return "sequential", "the shadow pass is not stacked"
    if device.type == "cuda":
        return "stacked", "on an accelerator stacked rows share every kernel"
    if rows == 1:
        return "sequential", "there is one row"
    processes = count_processes(config, rows)
    if processes == 1:
        return "sequential", "there is one core for all rows"
    if not may_start_processes():
        return "sequential", "a daemonic process may not start others"
    if samples < _SAMPLES_WORTH_PROCESSES and not has_processes:
        return "sequential", f"an episode of {samples:,} samples is not worth starting processes"
    return "workers", f"on a CPU rows run one after another, here in {processes} processes"


def count_processes(config: PopulationConfig, rows: int) -> int:
    """Return the number of processes for some rows in the workers strategy."""
    return min(config.workers or usable_cores(), rows)


def make_engines(
    conditions: Sequence[Condition],
    keys: Sequence[int],
    strategy: Strategy,
    config: PopulationConfig,
    client: WorkerClient | None = None,
    take_stack: Callable[[int], StackedEngine | None] = lambda rows: None,
    first_turn: int = 0,
) -> Iterator[tuple[list[int], PopulationEngine]]:
    """Yield (rows, engine) for rows of one architecture, in order.

    Args:
        conditions: condition of each row.
        keys: names of the rows' random streams.
        strategy: how they run.
        config: settings shared by all rows.
        client: worker processes with the conditions loaded, for the workers strategy.
        take_stack: returns an unused stack with that many rows of the architecture.
        first_turn: number of stacks that run before these.
    """
    rows = list(range(len(keys)))
    if strategy == "workers":
        assert client is not None, "the workers strategy needs processes that know the task"
        yield rows, WorkersEngine(client, conditions, keys, config)
        return
    if strategy == "stacked":
        task, device = conditions[0].task, conditions[0].data.device
        # Blueprints may have been registered since the stacks were made.
        problem = stacking_problem(task, config)
        if problem is None:
            parts = divide(rows, most_rows_of(task, config, device))
            for turn, part in enumerate(parts, start=first_turn):
                own = [conditions[row] for row in part], [keys[row] for row in part]
                hosts = build_hosts(*own, config)
                stack = take_stack(len(part))
                if stack is not None:
                    stack.renew(hosts, *own)
                else:
                    stack = StackedEngine(
                        hosts,
                        find_slots(hosts[0], task, config),
                        *own,
                        use_bf16=config.use_bf16,
                        use_graphs=config.use_graphs,
                        turn=turn,
                    )
                yield part, stack
            return
        warn(f"task {task.name!r} cannot be stacked: {problem}; its rows run one after another")
    yield rows, make_sequential(conditions, keys, config)


def stacking_problem(task: Task, config: PopulationConfig) -> str | None:
    """Return why a task's rows cannot be stacked; None if they can."""
    if config.training_mode == "shadow":
        return "the shadow pass is not stacked"
    hosts = [task.build_host(key) for key in range(2)]
    problem = host_problem(hosts, task.example_input(), in_bf16=config.use_bf16)
    if problem is not None:
        return f"host {task.config.host!r}: {problem}"
    for slot in find_slots(hosts[0], task, config.replace(precision="float32")):
        if not slot.kin.problem and slot.kin.positional + len(slot.kin.names) > 1:
            return (
                f"blueprint 'kin': {slot.path!r} is given several arguments, and its copies would "
                "be given one"
            )
        for choice in offered(slot.topology, slot.symmetry):
            blueprint = blueprint_by_id(choice)
            problem = seed_problem(blueprint, slot, in_bf16=config.use_bf16)
            if problem is not None:
                return f"blueprint {blueprint.name!r}: {problem}"
    return None


def find_tasks(tasks: str | Task | Sequence[str | Task], horizon: int | None) -> list[Task]:
    """Return tasks, looked up by name, with another horizon if one is given."""
    named = [tasks] if isinstance(tasks, str | Task) else list(tasks)
    made = [get_task(each) if isinstance(each, str) else each for each in named]
    if horizon is None:
        return made
    # Schedules of the learning rate follow the horizon too.
    return [type(task)(task.config.replace(horizon=horizon)) for task in made]


def place_data(
    tasks: Sequence[Task], data: Sequence[TaskData], device: torch.device
) -> list[TaskData]:
    """Return the given data of every task on the device; sources stay shared."""
    if len(data) != len(tasks):
        raise UsageError(f"{len(tasks)} tasks need as many data sets, got {len(data)}")
    sources = {id(each.splits): each.splits for each in data}
    moved = {name: splits.to(device) for name, splits in sources.items()}
    return [
        each if moved[id(each.splits)] is each.splits else each.on(moved[id(each.splits)])
        for each in data
    ]


def share_out(rows: int | Sequence[int], tasks: int) -> list[int]:
    """Return the number of rows of every task: as given, or about the same for all."""
    counts = (
        list(rows)
        if not isinstance(rows, int)
        else [rows // tasks + (index < rows % tasks) for index in range(tasks)]
    )
    if len(counts) != tasks or min(counts, default=0) < 1:
        raise UsageError(f"every one of {tasks} tasks needs at least one row, got rows={rows!r}")
    return counts
