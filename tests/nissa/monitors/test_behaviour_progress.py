from __future__ import annotations

import pytest

from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import RunRow
from tests.nissa.monitors.series_of import (
    as_levels,
    findings,
    healthy_epochs,
    healthy_round,
    levels,
)

GROWING = RunRow(kind="grow")


@pytest.mark.parametrize(
    ("scores", "planned", "is_found"),
    [
        ([80.0] * 10 + [72.0], 22, False),
        ([80.0] * 10 + [71.9], 22, True),
        ([80.0] * 10 + [10.0], 220, False),
        ([80.0] * 10 + [10.0], None, True),
        ([80.0] * 9 + [10.0], 22, False),
        # Negative losses are scores as well.
        ([-2.0] * 10 + [-2.1], 22, False),
        ([-2.0] * 10 + [-2.3], 22, True),
    ],
)
def test_a_controller_that_became_worse(
    scores: list[float], planned: int | None, is_found: bool
) -> None:
    rows = [healthy_round(number, score_mean=score) for number, score in enumerate(scores)]
    found = levels("performance_degradation", *rows, run=RunRow(kind="train", rounds=planned))
    assert found == as_levels("warning" if is_found else None)


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
    rows = [healthy_round(number, score_rolling=50.0) for number in range(10)]
    newest = healthy_round(10, score_rolling=50.0 + change)
    assert list(levels("trend", *rows, newest)) == ([kind] if kind else [])
    assert levels("trend", *rows[1:], newest) == {}


def test_the_monitors_read_the_rounds() -> None:
    rounds = [healthy_round(number, score_mean=80.0, score_rolling=80.0) for number in range(10)]
    worse = healthy_round(10, score_mean=60.0, score_rolling=77.0)
    assert levels("performance_degradation", *rounds, worse) == {None: "warning"}
    assert levels("trend", *rounds, worse) == {"degradation": "warning"}
    same = healthy_round(10, score_mean=80.0, score_rolling=80.1)
    assert levels("performance_degradation", *rounds, same) == {}
    assert levels("trend", *rounds, same) == {"plateau": "info"}


@pytest.mark.parametrize(
    ("losses", "scores", "subjects"),
    [
        ([1.0] * 5, [80.0] * 5, []),
        ([1.0] * 4 + [2.1], [80.0] * 4 + [75.0], ["loss_spike", "score_drop"]),
        # Too little is known at the start, and losses may fall as fast as they like.
        ([1.0, 5.0], [50.0, 60.0], []),
        ([5.0, 1.0, 0.5, 0.2], [10.0, 60.0, 70.0, 80.0], []),
        ([None], [None], []),
        ([-1.0] * 5, [1.0] * 5, []),
    ],
)
def test_sudden_changes(
    losses: list[float | None], scores: list[float | None], subjects: list[str]
) -> None:
    rows = [
        EpochRow(step=step, val_loss=loss, val_score=score)
        for step, (loss, score) in enumerate(zip(losses, scores, strict=True))
    ]
    found = findings("sudden_change", *rows, run=GROWING)
    assert [one.subject for one in found] == subjects
    if found:
        assert (found[0].value, found[0].threshold) == (2.1, 2.0)


def test_epochs_of_one_network_are_watched_and_those_of_many_are_not() -> None:
    bad = EpochRow(step=61, val_loss=9.0, val_score=20.0)
    assert levels("sudden_change", *healthy_epochs(), run=GROWING) == {}
    assert levels("sudden_change", *healthy_epochs(), bad, run=GROWING) == {
        "loss_spike": "warning",
        "score_drop": "warning",
    }
    assert levels("sudden_change", *healthy_epochs(), bad, run=RunRow(rows=64)) == {}
