from __future__ import annotations

import pytest

from esper.nissa.report.growing import heading, read_outcome, render_figures, render_lead
from esper.nissa.report.picture import growth_picture
from tests.nissa.report.runs import growing_run, make_epoch, summary_of


def test_test_split_is_told_where_it_was_used() -> None:
    history = growing_run()
    summary = summary_of(history, test_score=95.83, twin_test_score=94.44)
    outcome = read_outcome(history, summary)
    assert outcome is not None
    assert (outcome.split, outcome.twin) == ("test", 94.44)
    figures = render_figures(outcome, summary, summary.seeds)
    for text in ("+1.39 points", "test split", "Score, validation", "+43.0 %", "1 of 2"):
        assert text in figures
    assert figures.index("Test gain over the twin") < figures.index("Validation gain over the twin")


def test_lead_tells_what_became_of_the_seeds() -> None:
    history = growing_run()
    summary = summary_of(history)
    outcome = read_outcome(history, summary)
    assert outcome is not None
    lead = render_lead(outcome, summary.controller, summary.seeds)
    assert "In 60 epochs the controller heuristic germinated 2 seeds at 2 slots" in lead
    assert "1 became permanent (conv_light at r0c1); 1 was pruned." in lead


@pytest.mark.parametrize(
    ("score", "twin", "words"),
    [
        (96.0, 95.5, "0.50 more than its twin"),
        (95.0, 95.5, "0.50 fewer than its twin"),
        (95.0, 95.0, "as many as its twin"),
        (-0.25, -0.5, "0.2500 less than its twin"),
        (-0.25, -0.25, "as is its twin"),
    ],
)
def test_lead_compares_with_the_twin(score: float, twin: float, words: str) -> None:
    outcome = read_outcome([make_epoch(1, score, twin_score=twin)], None)
    assert outcome is not None
    assert words in render_lead(outcome, None, ())


def test_a_loss_is_not_told_in_points() -> None:
    history = [make_epoch(1, -0.25, twin_score=-0.5)]
    outcome = read_outcome(history, None)
    assert outcome is not None
    told = (
        render_lead(outcome, None, ()) + render_figures(outcome, None, ()) + growth_picture(history)
    )
    assert "points" not in told
    for text in ("loss is 0.2500", "Loss, validation", "twin 0.5000", "score, the loss, negative"):
        assert text in told


def test_a_network_that_kept_nothing_was_trained() -> None:
    history = [make_epoch(1, 50.0)]
    summary = summary_of(history)
    outcome = read_outcome(history, summary)
    assert outcome is not None
    assert heading(summary) == "digits: a trained network"
    assert "germinated no seed" in render_lead(outcome, summary, ())
    assert "unchanged" in render_figures(outcome, summary, ())


def test_without_epochs_there_is_no_outcome() -> None:
    assert read_outcome([], None) is None
