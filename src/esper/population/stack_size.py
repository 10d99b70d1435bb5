"""How many rows a stack has: as many as are asked for at most, and as its memory is sure to hold.

A stack keeps the activations of all its rows for the way back. What they take follows from the host
and the batch; seeds, gradients and passing values come on top by a factor that was measured.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from esper.kasmina.probe import hooked
from esper.population.engine import PopulationConfig
from esper.tasks.task import Task

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
