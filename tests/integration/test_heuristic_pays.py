"""The promise of the first milestone: on digits, growing by the heuristic beats waiting."""

from __future__ import annotations

import pytest

from benchmarks.digits_heuristic import grow_one
from esper.simic.training.evaluation import paired_interval


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_heuristic_ends_a_point_above_its_twin_on_digits() -> None:
    results = [grow_one(seed, "digits", None) for seed in range(10)]
    assert results[0]["parameters_before"] == 1030
    gain = paired_interval([r["test_score"] - r["twin_test_score"] for r in results])
    assert gain.mean >= 1.0, gain
    assert gain.low > 0.0, gain
    # Growth must come from seeds that were kept, and the host must have settled by itself first.
    assert all(r["latch"] is not None and 5 <= r["latch"] <= 30 for r in results)
    fossils = [s for r in results for s in r["seeds"] if s["fate"] == "fossilized"]
    assert len(fossils) >= len(results)
