from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.lab.population.population import Population
from esper.leyline.actions import LifecycleOp, placeholder_actions

pytestmark = pytest.mark.usefixtures("kept_processes")


def grown(strategy: Any) -> Population:
    """Three small rows; the middle one has a seed blended in."""
    population = Population("digits_mlp", 3, seed=1, device="cpu", strategy=strategy, horizon=4)
    population.reset()
    actions = placeholder_actions(3)
    actions["op"][1] = int(LifecycleOp.GERMINATE)
    actions["blueprint"][1] = int(population.masks().blueprint_by_slot[1, 0].nonzero()[0])
    population.step(actions)
    return population


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_every_row_is_scored_on_the_whole_test_split(strategy: Any) -> None:
    population = grown(strategy)
    scores = population.test_scores()
    assert scores.shape == (3,)
    assert scores.dtype == torch.float64
    size = population.conditions[0].data.size("test")
    right = scores / 100.0 * size
    assert torch.allclose(right, right.round(), atol=1e-4)
    assert scores.unique().numel() > 1
    population.close()


def test_scoring_changes_nothing() -> None:
    one, other = grown("sequential"), grown("sequential")
    one.test_scores()
    wait = placeholder_actions(3)
    assert torch.equal(one.step(wait).val_score, other.step(wait).val_score)


def test_strategies_agree() -> None:
    one, other = grown("sequential"), grown("stacked")
    assert torch.allclose(one.test_scores(), other.test_scores(), atol=1.0)


@pytest.mark.parametrize(
    ("strategy", "split"),
    [("sequential", "test"), ("stacked", "test"), ("stacked", "val"), ("workers", "val")],
)
def test_losses_come_with_the_scores(strategy: Any, split: Any) -> None:
    population = grown(strategy)
    scores, losses = population.results_on(split)
    population.close()
    plain = grown("sequential")
    expected = torch.zeros(3, dtype=torch.float64)
    data = plain.conditions[0].data
    samples, targets = data.batch(split, torch.arange(data.size(split)))
    for row in range(3):
        group, place = plain.locate(row)
        host = plain.conditions[0].task.build_host(0)
        host.load_state_dict(group.engine.read(place).host)
        with torch.no_grad():
            expected[row] = torch.nn.functional.cross_entropy(host(samples), targets).double()
    # The seed of the middle row is still alone, so it is no part of the network.
    assert torch.allclose(losses, expected, atol=1e-3)
    assert torch.equal(plain.results_on(split)[0], scores) or strategy == "stacked"
    plain.close()
