"""Choosing how rows run, and building the engines that run them."""

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

# - How many rows a stack has: as many as are asked for at most, and as its memory is sure to hold


_COPIES = 4.0
"""Bytes of a training step for every byte of the host's activations, half of the slots in use."""

_SHARE = 0.6
"""Share of a device's memory for training; validation and everything that stays have the rest."""


def most_rows_of(task: Task, config: PopulationConfig, device: torch.device) -> int:
    """Return how many rows of a task one stack has at most."""
    if device.type != "cuda":
        return config.rows_per_stack
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(config.rows_per_stack, rows_that_memory_holds(task, config, memory))


def rows_that_memory_holds(task: Task, config: PopulationConfig, memory: int) -> int:
    """Return for how many rows the bytes of a device suffice; one in any case."""
    itemsize = 2 if config.use_bf16 else 8 if config.precision == "float64" else 4
    activations = count_activations(task.build_host(0), task.example_input(1))
    row = _COPIES * activations * task.config.batch_size * itemsize
    return max(1, int(_SHARE * memory / row)) if row else sys.maxsize


def count_activations(host: nn.Module, example: Tensor) -> int:
    """Return how many values the modules of a host put out for one sample."""
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
"""Training samples of an episode that take longer than starting processes for them."""


def pick_strategy(
    asked: Strategy,
    device: torch.device,
    config: PopulationConfig,
    *,
    rows: int,
    samples: int,
    has_processes: bool = False,
) -> tuple[Strategy, str]:
    """Return the strategy to use and why.

    Args:
        asked: what the caller wants.
        device: where the rows run.
        config: settings shared by all rows.
        rows: how many there are.
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
    """Return how many processes share some rows in the workers strategy."""
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
        conditions: what each row trains under.
        keys: names of the rows' random streams.
        strategy: how they run.
        config: settings shared by all rows.
        client: processes that know the conditions, for workers.
        take_stack: hands out a stack of that many rows of the architecture, which begins again.
        first_turn: how many other stacks have their turn before these.
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
    """Return why a task's rows cannot be stacked, or None when they can."""
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
    """Return tasks by name or as they are, with another horizon where there is one."""
    named = [tasks] if isinstance(tasks, str | Task) else list(tasks)
    made = [get_task(each) if isinstance(each, str) else each for each in named]
    if horizon is None:
        return made
    # Schedules of the learning rate follow the horizon too.
    return [type(task)(task.config.replace(horizon=horizon)) for task in made]


def place_data(
    tasks: Sequence[Task], data: Sequence[TaskData], device: torch.device
) -> list[TaskData]:
    """Return data that was given for every task on the device; sources stay shared."""
    if len(data) != len(tasks):
        raise UsageError(f"{len(tasks)} tasks need as many data sets, got {len(data)}")
    sources = {id(each.splits): each.splits for each in data}
    moved = {name: splits.to(device) for name, splits in sources.items()}
    return [
        each if moved[id(each.splits)] is each.splits else each.on(moved[id(each.splits)])
        for each in data
    ]


def share_out(rows: int | Sequence[int], tasks: int) -> list[int]:
    """Return how many rows every task gets: as asked for, or all alike and the first ones more."""
    counts = (
        list(rows)
        if not isinstance(rows, int)
        else [rows // tasks + (index < rows % tasks) for index in range(tasks)]
    )
    if len(counts) != tasks or min(counts, default=0) < 1:
        raise UsageError(f"every one of {tasks} tasks needs at least one row, got rows={rows!r}")
    return counts
