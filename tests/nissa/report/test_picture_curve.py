from __future__ import annotations

import math

from esper.nissa.report.picture import growth_picture, read_curves
from tests.nissa.report.reading import having, parse, told
from tests.nissa.report.runs import make_epoch


def test_gaps_split_the_curve() -> None:
    scores = (50.0, 51.0, math.nan, 53.0)
    history = [make_epoch(epoch, score) for epoch, score in enumerate(scores, 1)]
    path = having(parse(growth_picture(history)), "curve", "grown")[0].get("d", "")
    assert path.count("M") == 2


def test_a_twin_that_ran_for_some_epochs_is_drawn_there() -> None:
    history = [
        make_epoch(epoch, 50.0 + epoch, twin_score=50.0 if epoch < 3 else None)
        for epoch in range(1, 6)
    ]
    root = parse(growth_picture(history))
    assert having(root, "curve", "twin")[0].get("d", "").count("L") == 1
    tips = told(root)
    assert "epoch 2: score 52.00, twin 50.00" in tips
    assert "epoch 3: score 53.00" in tips


def test_better_is_higher() -> None:
    root = parse(growth_picture([make_epoch(1, 10.0, twin_score=5.0)]))
    grown, twin = having(root, "end", "grown")[0], having(root, "end", "twin")[0]
    assert float(grown.get("cy", "nan")) < float(twin.get("cy", "nan"))


def test_thinning_keeps_the_extremes() -> None:
    scores = [50.0] * 5000
    scores[1234], scores[4321] = 99.0, 1.0
    history = [make_epoch(epoch, score) for epoch, score in enumerate(scores, 1)]
    curves = read_curves(history)
    root = parse(growth_picture(history))
    path = having(root, "curve", "grown")[0].get("d", "")
    heights = [float(pair.split()[1]) for pair in path.removeprefix("M").split("L")]
    assert len(heights) <= 1200
    low, high = 50.0 - 1.0, 99.0 - 50.0
    middle = heights[0]
    assert math.isclose((max(heights) - middle) / low, (middle - min(heights)) / high, rel_tol=1e-3)
    assert (curves.low, curves.high) == (1.0 - 0.06 * 98, 99.0 + 0.06 * 98)
