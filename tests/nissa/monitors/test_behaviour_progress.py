from __future__ import annotations

import pytest

from esper.nissa.monitors.behaviour import check_degradation, find_trend, trace_reasons
from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import RunRow
from tests.nissa.monitors.series_of import healthy_epochs, healthy_round, levels

GROWING = RunRow(kind="grow")


def test_a_controller_that_became_worse() -> None:
    steady = [80.0] * 10
    assert check_degradation([*steady, 72.0], 0.5) is None
    assert check_degradation([*steady, 71.9], 0.5) is not None
    assert check_degradation([*steady, 10.0], 0.05) is None
    assert check_degradation([*steady, 10.0], None) is not None
    assert check_degradation([80.0] * 9 + [10.0], 0.5) is None
    # Negative losses are scores as well.
    assert check_degradation([-2.0] * 10 + [-2.1], 0.5) is None
    assert check_degradation([-2.0] * 10 + [-2.3], 0.5) is not None


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (0.0, "plateau"),
        (0.49, "plateau"),
        (-0.49, "plateau"),
        (1.0, None),
        (2.0, "improvement"),
        (-1.9, None),
        (-2.0, "degradation"),
    ],
)
def test_trends(change: float, kind: str | None) -> None:
    found = find_trend([50.0] * 10 + [50.0 + change])
    assert (found[0] if found else None) == kind
    assert find_trend([50.0] * 9 + [50.0 + change]) is None


def test_the_monitors_read_the_rounds() -> None:
    rounds = [healthy_round(number, score_mean=80.0, score_rolling=80.0) for number in range(10)]
    worse = healthy_round(10, score_mean=60.0, score_rolling=77.0)
    assert levels("performance_degradation", *rounds, worse) == {None: "warning"}
    assert levels("trend", *rounds, worse) == {"degradation": "warning"}
    same = healthy_round(10, score_mean=80.0, score_rolling=80.1)
    assert levels("performance_degradation", *rounds, same) == {}
    assert levels("trend", *rounds, same) == {"plateau": "info"}


def test_reasons_to_look_closely() -> None:
    assert trace_reasons([1.0] * 5, [80.0] * 5) == {}
    found = trace_reasons([1.0] * 4 + [2.1], [80.0] * 4 + [75.0])
    assert set(found) == {"loss_spike", "score_drop"}
    assert found["loss_spike"] == (2.1, 2.0)
    # Too little is known at the start, and losses may fall as fast as they like.
    assert trace_reasons([1.0, 5.0], [50.0, 60.0]) == {}
    assert trace_reasons([5.0, 1.0, 0.5, 0.2], [10.0, 60.0, 70.0, 80.0]) == {}
    assert trace_reasons([], []) == {}
    assert trace_reasons([-1.0] * 5, [1.0] * 5) == {}


def test_epochs_of_one_network_are_watched_and_those_of_many_are_not() -> None:
    bad = EpochRow(step=61, val_loss=9.0, val_score=20.0)
    assert levels("sudden_change", *healthy_epochs(), run=GROWING) == {}
    assert levels("sudden_change", *healthy_epochs(), bad, run=GROWING) == {
        "loss_spike": "warning",
        "score_drop": "warning",
    }
    assert levels("sudden_change", *healthy_epochs(), bad, run=RunRow(rows=64)) == {}
