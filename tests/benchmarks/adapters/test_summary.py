"""Differences are taken seed by seed, between runs at their tuned rates."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.adapters.summary import difference, judged, print_summary


def record(arm: str, rate: float, seed: int, score: float) -> dict[str, Any]:
    return {
        **{"case": "cnn", "arm": arm, "rate": rate, "seed": seed, "score": score},
        **{"val_loss": -score, "loss": 1.0, "parameters": 10, "seconds": 1.0, "before": 20.0},
    }


RECORDS = [
    *(
        record(arm, rate, seed, 50 + rate)
        for arm in ("peft", "esper")
        for rate in (1, 2, 3)
        for seed in (100, 101)
    ),
    *(record("peft", 3, seed, 60.0 + seed) for seed in range(4)),
    *(record("esper", 3, seed, 61.0 + seed + 0.1 * (seed % 2)) for seed in range(4)),
    record("esper", 1, 0, 99.0),
]


def test_only_runs_at_the_tuned_rate_are_judged() -> None:
    found = judged(RECORDS)
    assert found["cnn", "esper"][0]["score"] == 61.0
    assert sorted(found["cnn", "peft"]) == [0, 1, 2, 3]


def test_the_interval_is_that_of_paired_differences() -> None:
    found = judged(RECORDS)
    mean, low, high = difference(found["cnn", "esper"], found["cnn", "peft"])
    assert mean == pytest.approx(1.05)
    # Student's t with three degrees of freedom, deviation 0.0577 over four seeds.
    assert high - mean == pytest.approx(3.1824 * 0.057735 / 2, rel=1e-3)
    assert mean - low == pytest.approx(high - mean)
    assert difference(found["cnn", "esper"], {0: found["cnn", "peft"][0]}) is None


def test_the_table_names_rates_at_the_edge(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(RECORDS)
    said = capsys.readouterr().out
    assert "3 (edge)" in said
    assert "+1.05 [+0.96, +1.14]" in said
    assert "cnn +1.05" in said
