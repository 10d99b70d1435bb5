"""The measurement behind `esper demo`."""

from __future__ import annotations

import pytest

from benchmarks import demo
from esper.scripts.cli.demo import ARMS


def record(
    arm: int, seed: int, loss: float, name: str = "avx2", compute: float = 1.0
) -> dict[str, object]:
    same = {"rate": 0.004, "compute": compute, "steps": 100, "flops": 1e9, "cpu_s": 1.0}
    return {"set": name, "network": ARMS[arm].name, "seed": seed, "test_loss": loss, **same}


def test_a_gain_is_over_the_best_static_network_of_the_same_seed_and_set() -> None:
    first = [record(0, 0, 2.0), record(1, 0, 2.5), record(2, 0, 1.9)]
    second = [record(0, 1, 2.5), record(1, 1, 2.0), record(2, 1, 2.1)]
    unfinished = [record(0, 0, 2.0, "avx512"), record(2, 0, 1.0, "avx512")]
    assert demo.gains_of([*first, *second, *unfinished]) == pytest.approx([5.0, -5.0])


def test_the_summary_has_a_row_for_each_network_and_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [record(arm, seed, 2.0 + arm + seed) for arm in range(3) for seed in range(2)]
    demo.summarize(runs)
    lines = capsys.readouterr().out.splitlines()
    assert sum("avx2" in line for line in lines) == 3
    assert "ahead in 0 of 2 runs" in lines[-1]


def test_budgets_have_rows_and_gains_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [record(arm, 0, loss, "avx2", 0.1) for arm, loss in enumerate((2.0, 2.5, 2.2))]
    runs += [record(arm, 0, loss) for arm, loss in enumerate((2.0, 2.5, 1.8))]
    assert demo.gains_of(runs) == pytest.approx([-10.0, 10.0])
    demo.summarize(runs)
    lines = capsys.readouterr().out.splitlines()
    assert sum("avx2" in line for line in lines) == 6
    assert "compute 0.1" in lines[-3]
    assert "-10.0 %" in lines[-3]
    assert "compute 1" in lines[-1]
    assert "+10.0 %" in lines[-1]
