"""Gains that pages claim are ranges over seeds that hold on every processor.

A page states the range of the runs behind it. A single run elsewhere may lie outside that range,
but the median of a few must not. `make test-portable` checks this under every instruction set.
"""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks import demo, digits_heuristic, short_examples, tutorial
from tests.pages import claimed_range, section

pytestmark = [pytest.mark.slow, pytest.mark.figures, pytest.mark.timeout(1800)]

EXAMPLES = short_examples.PAGE.read_text(encoding="utf-8")
RESULTS = (short_examples.PAGE.parent / "results.md").read_text(encoding="utf-8")
TUTORIAL = tutorial.PAGE.read_text(encoding="utf-8")


def check(gains: list[float], claim: tuple[float, float]) -> None:
    least, most = claim
    assert least <= median(gains) <= most, (sorted(gains), claim)


@pytest.mark.parametrize("name", short_examples.SNIPPETS)
def test_the_short_examples_gain_what_their_page_claims(name: str) -> None:
    results = [short_examples.measure((seed, None), name) for seed in short_examples.SEEDS[:3]]
    gains = [result["grown"] - result["twin"] for result in results]
    check(gains, claimed_range(section(EXAMPLES, short_examples.SNIPPETS[name])))


def test_the_tutorial_gains_what_it_claims() -> None:
    gains = [tutorial.measure(seed)[0] for seed in tutorial.SEEDS[:3]]
    check(gains, claimed_range(TUTORIAL, "random seeds 0 to 4"))


def test_a_run_of_ten_epochs_ends_while_a_seed_is_blended_in() -> None:
    results = [tutorial.measure(seed, 10) for seed in tutorial.SEEDS[:3]]
    check([gain for gain, _ in results], claimed_range(TUTORIAL, "with 10 epochs instead of 50"))
    assert all(row[-1].endswith("blending") for _, row in results), results


def test_the_grown_network_of_the_demo_is_ahead_at_equal_compute() -> None:
    results = [demo.measure((arm, 0, None, 1.0)) for arm in range(3)]
    (gain,) = demo.gains_of(results)
    assert gain > 0.0, results


def test_growing_by_the_heuristic_pays_as_the_page_claims() -> None:
    results = [digits_heuristic.grow_one(seed, "digits", None) for seed in range(4)]
    gains = [result["test_score"] - result["twin_test_score"] for result in results]
    check(gains, claimed_range(section(RESULTS, "Does growing pay?")))
    # Growth comes from seeds that were kept, and the host has settled by itself before.
    assert all(result["latch"] is not None for result in results)
    assert all("fossilized" in {seed["fate"] for seed in result["seeds"]} for result in results)
