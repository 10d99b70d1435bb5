from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.slots import SlotConfig
from esper.nissa.schema_runs import RunRow, UpdateHeadRow, UpdateRow
from esper.nissa.store import open_store
from esper.simic.agent.report import ClampCounter, NonFinite, UpdateReport
from esper.tamiyo.policy.layout import BASE_INDEX, feature_names, feature_specs
from esper.tamiyo.policy.observation import DocumentsLayout
from tests.simic.agent.rollouts import collect, make_agent, small_policy

ONLY_ON_A_GPU = {"gpu_memory_share"}


def report_of(
    layout: str = "documents", critic: str = "op_marginal", **options: object
) -> UpdateReport:
    agent = make_agent(small_policy(layout=layout, critic=critic), **options)
    buffer = collect(agent.policy, rows=24, steps=14)
    buffer.batch().potentials[:, 3:] = 1.0
    return agent.update(buffer, progress=0.3, paid_off=0.4, round=3)


@pytest.mark.parametrize("layout", ["documents", "travelling"])
@pytest.mark.parametrize("minibatches", [1, 4])
def test_every_column_of_the_store_is_filled(minibatches: int, layout: str) -> None:
    rows = report_of(layout, epochs=3, target_kl=0.0, minibatches=minibatches).rows(
        round=3, env_steps=77
    )
    updates = [row for row in rows if isinstance(row, UpdateRow)]
    heads = [row for row in rows if isinstance(row, UpdateHeadRow)]
    assert [row.ordinal for row in updates] == [0, 1, 2]
    assert [row.is_last for row in updates] == [False, False, True]
    for row in updates:
        absent = {each.name for each in fields(row) if getattr(row, each.name) is None}
        assert absent == ONLY_ON_A_GPU
        assert (row.round, row.env_steps) == (3, 77)
        assert row.paid_off_rolling == pytest.approx(0.4)
        assert row.op_entropy_coef == pytest.approx(0.2)
    assert [row.head for row in heads] == list(HEAD_NAMES) * 3
    for row in heads:
        absent = {each.name for each in fields(row) if getattr(row, each.name) is None}
        assert absent == set(), row.head
    # Heads come before the update that closes them.
    assert rows.index(updates[0]) > max(rows.index(row) for row in heads)


def test_a_critic_without_the_op_has_no_value_of_an_op() -> None:
    """Recorded as 0 it would look like a critic that ignores its input."""
    (row,) = [
        row
        for row in report_of(critic="state", epochs=1).rows(round=0, env_steps=1)
        if isinstance(row, UpdateRow)
    ]
    assert row.q_variance is row.q_op_spread is row.q_by_op is None
    assert row.explained_variance is not None


def test_the_store_takes_it(tmp_path: Path) -> None:
    report = report_of(ratio="joint")
    with open_store(tmp_path, RunRow(kind="train"), sinks=()) as store:
        store.write(*report.rows(round=0, env_steps=10))


def test_the_last_row_is_what_people_ask_for() -> None:
    report = report_of(epochs=2, target_kl=0.0)
    assert report.approx_kl == report.updates[-1]["approx_kl"]
    assert report.explained_variance == report.updates[-1]["explained_variance"]
    assert report.potential_share == report.updates[-1]["potential_share"]
    assert report.steps
    assert report.seconds > 0


def test_what_could_not_be_measured_is_absent() -> None:
    agent = make_agent()
    buffer = collect(agent.policy)
    buffer.batch().rewards[0, 0] = math.nan
    report = agent.update(buffer, progress=0.0, paid_off=0.0, round=0)
    assert not report.steps
    assert math.isnan(report.approx_kl)
    rows = report.rows(round=0, env_steps=1)
    last = rows[-1]
    assert isinstance(last, UpdateRow)
    assert last.was_skipped
    assert last.approx_kl is None
    assert last.return_mean is None
    assert len(rows) == 9


def test_a_place_that_was_not_finite_says_where() -> None:
    assert str(NonFinite(2, "log_prob", ("op", "slot"))) == "log_prob of op, slot in epoch 2"
    assert str(NonFinite(0, "value")) == "value in epoch 0"


SLOTS = SlotConfig.of(1)
MEASURED = sum(spec.kind == "continuous" for spec in feature_specs(SLOTS))
BOTH = torch.tensor([True, True])


def observation() -> torch.Tensor:
    return torch.full((2, len(feature_names(SLOTS))), 0.5)


def counter_of_three() -> ClampCounter:
    return ClampCounter(DocumentsLayout(SLOTS.num_slots), "cpu")


def test_what_is_within_its_range_is_not_counted() -> None:
    counter = counter_of_three()
    counter.count(observation(), torch.zeros_like(observation()), BOTH)
    assert counter.share == 0.0
    assert counter.worst() == {}


def test_a_measurement_at_its_bound_is_counted() -> None:
    counter, raw = counter_of_three(), observation()
    raw[0, BASE_INDEX["loss_delta_norm"]] = -1.0
    raw[:, BASE_INDEX["plateau_norm"]] = 1.0
    counter.count(raw, torch.zeros_like(raw), BOTH)
    assert counter.share == 3 / (2 * MEASURED)
    assert counter.worst(1) == {"plateau_norm": 1.0}


def test_flags_and_natural_zeros_are_no_clamps() -> None:
    counter, raw = counter_of_three(), observation()
    raw[:, BASE_INDEX["host_stabilized"]] = 1.0
    raw[:, BASE_INDEX["plateau_norm"]] = 0.0
    counter.count(raw, torch.zeros_like(raw), BOTH)
    assert counter.share == 0.0


def test_the_normalisers_clip_counts_and_ended_rows_do_not() -> None:
    counter, raw = counter_of_three(), observation()
    far = torch.zeros_like(raw)
    far[:, BASE_INDEX["accuracy_norm"]] = 10.0
    counter.count(raw, far, torch.tensor([True, False]))
    assert counter.share == 1 / MEASURED


def test_counts_go_on_from_their_state() -> None:
    one, other, raw = (
        counter_of_three(),
        counter_of_three(),
        observation(),
    )
    raw[:, BASE_INDEX["plateau_norm"]] = 1.0
    one.count(raw, raw, BOTH)
    other.load_state_dict(one.state_dict())
    assert other.share == one.share > 0
    other.start()
    assert other.share == 0.0
