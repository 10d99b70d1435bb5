"""How many rows a stack has."""

from __future__ import annotations

import torch
from torch import nn

from esper.lab.population.engine import PopulationConfig
from esper.lab.population.strategy import count_activations, most_rows_of, rows_that_memory_holds
from esper.lab.tasks import get_task
from tests.lab.population.tiny_tasks import TinyValues

GIB = 2**30


def test_outputs_of_all_modules_are_counted() -> None:
    host = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 2)))
    assert count_activations(host, torch.zeros(1, 5)) == 6 + 6 + 2
    assert not any(module._forward_hooks for module in host.modules())


def test_memory_limits_the_rows_of_large_hosts() -> None:
    small, large = get_task("cifar_baseline"), get_task("cifar_highres")
    exact, rough = PopulationConfig(), PopulationConfig(use_bf16=True)
    for task in (small, large):
        assert rows_that_memory_holds(task, rough, 80 * GIB) >= 2 * rows_that_memory_holds(
            task, exact, 80 * GIB
        )
        assert rows_that_memory_holds(task, exact, 1) == 1
    assert rows_that_memory_holds(small, exact, 80 * GIB) > rows_that_memory_holds(
        large, exact, 80 * GIB
    )
    # A thousand rows of the reference host have room on a device of 139 GiB.
    assert rows_that_memory_holds(small, rough, 139 * GIB) >= 1024


def test_on_a_cpu_rows_are_as_many_as_asked_for() -> None:
    assert most_rows_of(TinyValues(), PopulationConfig(), torch.device("cpu")) == 1024
    asked = PopulationConfig(rows_per_stack=7)
    assert most_rows_of(TinyValues(), asked, torch.device("cpu")) == 7
