"""Networks that are kept while they live on, and scored as they were."""

from __future__ import annotations

import pytest
import torch

from esper.lab.population.engine import Strategy
from esper.lab.tasks.task import Task
from tests.lab.population.tiny_tasks import (
    TinyImages,
    TinyText,
    advance,
    do,
    germinate,
    make_population,
    populations,
)

pytestmark = pytest.mark.usefixtures("kept_processes")

ADAMW = {"optimizer": "adamw", "learning_rate": 0.003}

# For two text rows: stages deepened and doubled; a seed that is blended through a gate. The others
# only wait. Behind every step: which text rows are kept then.
LIFE = [
    ([germinate("kin"), germinate("norm", 0, 3)], [True, False, False]),
    ([germinate("kin", 1), advance()], [False, False, True]),
    ([germinate("kin"), advance()], [False, True, False]),
    ([germinate("kin", 1)], [True, False, False]),
    ([germinate("kin"), advance()], [False, False, False]),
    ([], [False, False, True]),
]


def tasks() -> list[Task]:
    return [TinyText(TinyText.defaults.replace(**ADAMW)), TinyImages()]


@pytest.mark.parametrize("strategy", ["sequential", "stacked", "workers"])
def test_rows_are_scored_as_they_were_when_they_were_kept(strategy: Strategy) -> None:
    population = make_population(tasks(), [3, 1], strategy, copies=True, precision="float64")
    with populations(population):
        signals = population.reset()
        population.keep_networks(torch.ones(4, dtype=torch.bool))
        known, flops = population.results_on("test"), signals.flops
        for choices, kept in LIFE:
            signals = do(population, *choices)
            which = torch.tensor([*kept, False])
            population.keep_networks(which)
            now = population.results_on("test")
            known = tuple(torch.where(which, a, b) for a, b in zip(now, known, strict=True))
            flops = torch.where(which, signals.flops, flops)
        last = population.results_on("test")[1]
        assert signals.copies[0].tolist()[:2] == [7, 3]
        population.bring_back()
        scores, losses = population.results_on("test")
        assert torch.allclose(losses, known[1], rtol=1e-12, atol=0)
        assert torch.equal(scores, known[0]) or torch.allclose(scores, known[0], rtol=1e-12)
        assert torch.equal(population.signals().flops, flops)
        # The last row of texts was kept in the last step, the others have trained on.
        assert (losses == last).tolist() == [False, False, True, False]
        # Everything begins anew afterwards.
        assert torch.equal(population.reset().flops, population.signals().host_flops)
