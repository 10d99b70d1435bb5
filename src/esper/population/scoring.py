"""Scores on the test split: every row's network is put into a plain garden and evaluated once.

The split is for the end of an evaluation; nothing that learns or decides may see it. Any engine can
hand out a row's weights, so no engine needs to know about it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from esper.kasmina.contribution import values_in_points
from esper.population.cohort import Cohort
from esper.population.strategy import make_sequential
from esper.tasks.dataset import TaskData


def score_test_split(cohort: Cohort, data: TaskData) -> Tensor:
    """Return float64 [R]: the score in points of every row on the whole test split."""
    engine = make_sequential(cohort.task, _in_place_of_val(data), cohort.keys[:1], cohort.config)
    everything = torch.ones((1, cohort.state.num_slots), dtype=torch.bool)
    scores = []
    for row in range(cohort.rows):
        state = cohort.state.select([row])
        engine.sync(state)
        engine.write(0, cohort.engine.read(row), state)
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
