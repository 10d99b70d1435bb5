from __future__ import annotations

from esper.nissa.columns import Row
from esper.nissa.monitors import MONITORS, Watch
from esper.nissa.schema import AlarmRow, EpochRow
from esper.nissa.schema_runs import EpisodeRow, RunRow
from tests.nissa.monitors.series_of import (
    RUN,
    healthy_epochs,
    healthy_head,
    healthy_records,
    healthy_round,
    healthy_update,
)


def watched(records: list[Row], run: RunRow = RUN) -> list[AlarmRow]:
    watch = Watch(run)
    return [alarm for record in records for alarm in watch.observe(record)]


def test_a_healthy_training_run_has_no_alarms() -> None:
    """Although one head was always masked, 92 % of steps were forced and WAIT's share is 99 %."""
    assert watched(healthy_records()) == []


def test_the_first_rounds_of_a_healthy_run_raise_nothing() -> None:
    """What the documents' smoke run measures: five rounds of 40 decisions, a critic that is new."""
    ratios = [(0.037, 1.7), (0.049, 1.1), (0.80, 1.2), (0.51, 5.7), (0.31, 4.2)]
    explained = [-0.0007, -0.025, 0.02, -0.1, 0.05]
    records: list[Row] = []
    for number, (least, most) in enumerate(ratios):
        records += [
            EpisodeRow(round=number, row=row, env_seed=number, episodic_return=-0.1, gain=0.0)
            for row in range(4)
        ]
        records += [
            healthy_round(number, wait_share_free=0.5, idle_share_free=0.6),
            healthy_update(
                number,
                ratio_min=least,
                ratio_max=most,
                explained_variance=explained[number],
                q_variance=1.5e-6,
                q_op_spread=0.003,
                value_std=0.0005,
                return_std=0.4,
                usable_steps=40,
            ),
        ]
    alarms = watched(records, RunRow(kind="train", rounds=5, rows=4))
    assert [alarm for alarm in alarms if alarm.severity != "info"] == []


def test_a_healthy_growing_run_has_no_alarms() -> None:
    assert watched(healthy_epochs(), RunRow(kind="grow")) == []


def test_an_alarm_is_raised_once_and_cleared_once() -> None:
    kls = [0.01, 0.2, 0.3, 0.2, 0.01, 0.01]
    alarms = watched([healthy_update(number, approx_kl=kl) for number, kl in enumerate(kls)])
    assert [(alarm.round, alarm.monitor, alarm.state) for alarm in alarms] == [
        (1, "kl_spike", "raised"),
        (4, "kl_spike", "cleared"),
    ]
    raised, cleared = alarms
    assert (raised.severity, raised.value, raised.threshold) == ("warning", 0.2, 0.1)
    assert raised.advice == MONITORS.get("kl_spike").advice
    assert (cleared.severity, cleared.advice) == ("info", None)


def test_getting_worse_is_news() -> None:
    kls = [0.2, 0.6, 0.6, 0.2]
    alarms = watched([healthy_update(number, approx_kl=kl) for number, kl in enumerate(kls)])
    assert [(alarm.round, alarm.severity) for alarm in alarms] == [
        (0, "warning"),
        (1, "critical"),
        (3, "warning"),
    ]


def test_subjects_are_told_apart() -> None:
    records: list[Row] = []
    for number in range(3):
        records += [
            healthy_head("slot", number, ratio_max=4.0 if number else 1.2),
            healthy_head("style", number, ratio_max=1.2 if number else 4.0),
            healthy_update(number),
        ]
    alarms = watched(records)
    assert [(alarm.round, alarm.subject, alarm.state) for alarm in alarms] == [
        (0, "style", "raised"),
        (1, "slot", "raised"),
        (1, "style", "cleared"),
    ]


def test_events_are_told_every_time() -> None:
    alarms = watched([EpisodeRow(row=row, rolled_back=True) for row in range(3)])
    assert [(alarm.row, alarm.state) for alarm in alarms] == [
        (0, "raised"),
        (1, "raised"),
        (2, "raised"),
    ]


def test_earlier_epochs_of_an_update_set_nothing_off() -> None:
    assert watched([healthy_update(0, is_last=False, approx_kl=9.0)]) == []
    assert watched([healthy_update(0), healthy_update(1, is_last=False, approx_kl=9.0)]) == []


def test_alarms_stand_where_their_record_stands() -> None:
    epochs: list[Row] = [EpochRow(step=step, val_loss=1.0, val_score=80.0) for step in range(1, 6)]
    alarms = watched([*epochs, EpochRow(step=6, val_score=70.0)], RunRow())
    assert [(alarm.step, alarm.monitor) for alarm in alarms] == [(6, "sudden_change")]
    (alarm,) = watched([healthy_round(7, obs_clamp_share=0.5)])
    assert (alarm.round, alarm.row, alarm.step) == (7, 0, 0)


def test_the_sick_run_of_the_briefing_sets_off_what_it_should() -> None:
    """Entropies, KL and value deviation of the run of 10 January, ten rounds apart."""
    blueprint = [0.125, 0.120, 0.105, 0.082, 0.055, 0.038, 0.027, 0.018, 0.012, 0.008, 0.007]
    records: list[Row] = []
    for number, entropy in enumerate(blueprint):
        records += [
            healthy_round(number, wait_share_free=0.8, idle_share_free=0.8),
            healthy_head("blueprint", number, entropy_conditional=entropy, entropy_nats=entropy),
            healthy_update(
                number,
                approx_kl=5e-9,
                clipfrac=0.0,
                explained_variance=0.0001,
                value_std=0.002,
                grad_norm=43.0 if number == 8 else 10.0,
            ),
        ]
    run = RunRow(kind="train", rounds=200, rows=10)
    found = {alarm.monitor for alarm in watched(records, run) if alarm.state == "raised"}
    assert {
        "head_collapse",
        "sparse_head_entropy",
        "head_entropy_nats",
        "policy_stagnation",
        "value_collapse",
    } <= found
    assert "never_acts" not in found
