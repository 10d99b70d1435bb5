"""The rows of one task that run together, and their scores on the test split.

The test split is for the end of an evaluation; nothing that learns or decides may see it. Any
engine can hand out a row's weights, so no engine needs to know about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from esper.kasmina.contribution import values_in_points
from esper.kasmina.row_group import RowGroup
from esper.population.engine import PopulationConfig, PopulationEngine
from esper.population.strategy import fitting_blueprints, make_sequential
from esper.tasks.dataset import TaskData
from esper.tasks.task import Task


class TaskGroup(RowGroup):
    """Rows of one task on one engine.

    Args:
        task: what the rows are networks for.
        keys: names of the rows' random streams.
        engine: trains the rows.
        config: the settings of the population.
        horizon: epochs of an episode.
    """

    engine: PopulationEngine
    config: PopulationConfig

    def __init__(
        self,
        task: Task,
        keys: Sequence[int],
        engine: PopulationEngine,
        config: PopulationConfig,
        horizon: int,
    ) -> None:
        """Start at epoch 0."""
        super().__init__(
            engine,
            keys,
            config,
            fits=fitting_blueprints(task),
            horizon=horizon,
            budget=task.config.param_budget,
            chance_loss=task.config.baseline_loss,
        )
        self.task = task


def score_test_split(group: TaskGroup, data: TaskData) -> Tensor:
    """Return float64 [R]: the score in points of every row on the whole test split."""
    engine = make_sequential(group.task, _in_place_of_val(data), group.keys[:1], group.config)
    everything = torch.ones((1, group.state.num_slots), dtype=torch.bool)
    scores = []
    for row in range(group.rows):
        state = group.state.select([row])
        engine.sync(state)
        engine.write(0, group.engine.read(row), state)
        loss, correct = engine.measure([everything])
        scores.append(values_in_points(loss, correct).mean().to(torch.float64).cpu())
    return torch.stack(scores)


def _in_place_of_val(data: TaskData) -> TaskData:
    """Return the data with the whole test split where engines look for validation samples."""
    return dataclasses.replace(
        data,
        samples={**data.samples, "val": data.samples["test"]},
        targets=data.targets if not data.targets else {**data.targets, "val": data.targets["test"]},
        subset=torch.arange(data.size("test"), device=data.device),
    )
