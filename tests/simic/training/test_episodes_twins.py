from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.lab.population.population import Population
from esper.leyline.actions import placeholder_actions
from esper.leyline.errors import UsageError
from esper.simic.training.episodes import TwinCurves, _hold
from esper.simic.training.row_source import TaskRows
from esper.tamiyo.controllers import RandomController
from tests.simic.training.tiny import NAME, tiny_config


def make_twins(**changes: Any) -> tuple[TwinCurves, TaskRows]:
    config = tiny_config(episode_length=3, **changes)
    row_source = TaskRows(config)
    return TwinCurves(row_source, config), row_source


def test_a_twin_is_the_row_that_only_waits() -> None:
    twins, row_source = make_twins()
    plan = row_source.plan(0, 0)
    assert list(twins.prepare([plan])) == [(1, 4), (2, 4), (3, 4), (4, 4)]
    curves = twins.scores(plan)
    population = Population(NAME, 4, seed=3, device="cpu", strategy="sequential", horizon=4)
    scores = [population.reset(plan.env_seeds).val_score]
    scores += [population.step(placeholder_actions(4)).val_score for _ in range(3)]
    population.close()
    assert torch.equal(curves, torch.stack(scores, dim=1))


def test_rows_that_share_a_seed_share_their_twin() -> None:
    twins, row_source = make_twins()
    plan = row_source.plan(0, 0)
    list(twins.prepare([plan]))
    curves = twins.scores(plan)
    assert torch.equal(curves[0], curves[1])
    assert not torch.equal(curves[0], curves[2])
    assert len(twins.state_dict()["curves"]) == 2


def test_rows_that_share_a_seed_are_one_twin_to_the_regression() -> None:
    """Ten rows of two seeds know one other twin each, not nine."""
    twins, row_source = make_twins(rows=10, rows_per_seed=5)
    plan = row_source.plan(0, 0)
    list(twins.prepare([plan]))
    regression = twins.regression(plan)
    assert regression.own_share.tolist() == [1.0]
    curves = twins.scores(plan)
    assert torch.equal(regression.expect(curves, torch.full((10,), 2)), curves)


def test_rounds_ahead_are_trained_together_and_once() -> None:
    twins, row_source = make_twins()
    plans = [row_source.plan(number, 0) for number in range(2)]
    list(twins.prepare(plans))
    assert list(twins.prepare(plans[1:])) == []
    alone, other_world = make_twins()
    list(alone.prepare([other_world.plan(1, 0)]))
    assert torch.equal(twins.scores(plans[1]), alone.scores(plans[1]))


def test_twins_of_rounds_that_are_over_are_forgotten() -> None:
    twins, row_source = make_twins()
    list(twins.prepare([row_source.plan(0, 0)]))
    list(twins.prepare([row_source.plan(1, 0)]))
    assert len(twins.state_dict()["curves"]) == 2
    with pytest.raises(UsageError, match="not trained yet"):
        twins.scores(row_source.plan(0, 0))


def test_twins_beside_the_rows_are_trained_epoch_by_epoch_and_are_the_same() -> None:
    twins, row_source = make_twins()
    plans = [row_source.plan(number, 0) for number in range(2)]
    list(twins.prepare(plans[:1]))
    rows = row_source.environment(0, 0)
    twins.train_beside(rows, plans[1:])
    rows.reset()
    for _ in range(2):
        rows.step(placeholder_actions(4))
    assert len(twins.state_dict()["curves"]) == 2, "nothing is known of them before their end"
    assert list(twins.prepare(plans[1:])) == [(4, 4)]
    alone, other_world = make_twins()
    list(alone.prepare([other_world.plan(1, 0)]))
    assert torch.equal(twins.scores(plans[1]), alone.scores(plans[1]))
    twins.train_beside(rows, plans[1:])
    rows.reset()
    assert list(twins.prepare(plans[1:])) == [], "what is known is not trained again"
    row_source.close()


def test_twins_beside_the_rows_that_are_dropped_leave_nothing() -> None:
    twins, row_source = make_twins()
    plan, rows = row_source.plan(0, 0), row_source.environment(0, 0)
    twins.train_beside(rows, [plan])
    rows.reset()
    twins.close()
    rows.step(placeholder_actions(4))
    assert len(list(twins.prepare([plan]))) == 4
    twins.train_beside(rows, [])
    rows.reset()
    row_source.close()


def test_a_pool_of_seeds_is_trained_once() -> None:
    twins, row_source = make_twins(seed_pool=2)
    trained = sum(len(list(twins.prepare([row_source.plan(number, 0)]))) for number in range(6))
    assert trained <= 2 * 4
    assert len(twins.state_dict()["curves"]) <= 2


def test_twins_cut_short_leave_nothing() -> None:
    twins, row_source = make_twins()
    for step, _ in twins.prepare([row_source.plan(0, 0)]):
        if step == 2:
            break
    assert twins.state_dict()["curves"] == {}


def test_curves_are_kept_in_a_state() -> None:
    twins, row_source = make_twins()
    plan = row_source.plan(0, 0)
    list(twins.prepare([plan]))
    other, _ = make_twins()
    other.load_state_dict(twins.state_dict())
    assert list(other.prepare([plan])) == []
    assert torch.equal(other.scores(plan), twins.scores(plan))


def test_every_member_of_a_family_has_its_twin() -> None:
    twins, row_source = make_twins(tasks=("digits_family",), architectures_per_round=2)
    plan = row_source.plan(0, 0)
    list(twins.prepare([plan]))
    assert twins.scores(plan).isfinite().all()


def test_a_curve_stays_where_its_horizon_is() -> None:
    curves = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    held = _hold(curves, torch.tensor([2, 3]), 5)
    assert held.tolist() == [[1.0, 2.0, 2.0, 2.0, 2.0], [4.0, 5.0, 6.0, 6.0, 6.0]]


def test_on_a_cpu_twins_are_not_trained_ahead_unless_asked_for() -> None:
    assert make_twins()[0].rounds_ahead == 1
    assert make_twins(twin_rounds=3)[0].rounds_ahead == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_twins_beside_rows_that_act_are_those_trained_alone() -> None:
    curves = []
    for is_beside in (False, True):
        twins, row_source = make_twins(device="cuda", strategy="auto", rows=8, twin_rounds=1)
        assert twins.fit_beside_rows
        plan = row_source.plan(0, 0)
        if is_beside:
            rows, controller = row_source.environment(0, 0), RandomController(3)
            twins.train_beside(rows, [plan])
            signals = rows.reset()
            controller.reset(8, "cuda")
            for _ in range(3):
                signals = rows.step(controller.act(signals, rows.masks()))
        assert len(list(twins.prepare([plan]))) == (0 if is_beside else 4)
        curves.append(twins.scores(plan))
        row_source.close()
    assert torch.equal(*curves)
