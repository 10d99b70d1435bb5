"""The comparison with peers: equal compute, rates by validation, one table."""

from __future__ import annotations

import pytest

from benchmarks import peers


def record(arm: int, rate: float, seed: int, accuracy: float, val_loss: float) -> dict[str, object]:
    task, name, _, _ = peers.ARMS[arm]
    same = {"version": None, "test_loss": 0.5, "parameters": 100, "flops": 1e8, "cpu_s": 1.0}
    scores = {"test_accuracy": accuracy, "val_loss": val_loss}
    return {"task": task, "arm": name, "rate": rate, "seed": seed, **scores, **same}


def test_a_small_network_trains_longer_for_the_same_compute() -> None:
    epochs = {}
    for hidden in (peers.SMALL, peers.WIDE):
        budget, weights = peers.Budget(), peers.weights_of(peers.mlp(hidden))
        epochs[hidden] = sum(1 for _ in iter(lambda b=budget, w=weights: b.epoch(w), False))
        assert budget.spent == pytest.approx(budget.all, rel=0.02)
    assert epochs[peers.WIDE] == peers.EPOCHS
    assert epochs[peers.SMALL] > 2 * peers.EPOCHS


def test_no_arm_begins_with_more_than_the_limit() -> None:
    sizes = [sum(p.numel() for p in peers.mlp(n).parameters()) for n in (peers.SMALL, peers.WIDE)]
    assert sizes == [682, 2_047]
    assert max(sizes) <= peers.LIMIT


def test_rates_are_tried_until_the_best_lies_between_others() -> None:
    losses = {0.001: 0.9, 0.003: 0.5, 0.01: 0.4, 0.03: 0.3, 0.1: 0.2, 0.3: 0.6}
    found: list[dict[str, object]] = []
    while (rate := peers.next_rate(found)) is not None:
        found.append(record(0, rate, peers.TUNED_ON, 90.0, losses[rate]))
    assert [one["rate"] for one in found] == [0.003, 0.01, 0.03, 0.1, 0.3]
    assert peers.best_rate(found) == 0.1


def test_the_table_shows_seeds_at_the_rate_that_validation_chose(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tuned = [record(0, 0.01, peers.TUNED_ON, 99.0, 0.2), record(0, 0.03, peers.TUNED_ON, 99.0, 0.1)]
    judged = [record(0, 0.03, 0, 90.0, 0.3), record(0, 0.03, 1, 92.0, 0.3)]
    peers.summarize([*tuned, *judged, record(0, 0.01, 0, 10.0, 0.0)])
    (row,) = capsys.readouterr().out.splitlines()[2:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == ["grow", "plain, 8 neurons", "0.03", "2", "91.00", "90.00 to 92.00"]


@pytest.mark.slow
def test_an_arm_is_measured_as_it_is_said() -> None:
    found = peers.measure(0, 0.01, 0)
    assert (found["task"], found["arm"], found["parameters"]) == ("grow", "plain, 8 neurons", 682)
    assert found["test_accuracy"] > 50.0
