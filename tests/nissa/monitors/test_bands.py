from __future__ import annotations

import math

import pytest

from esper.nissa.monitors.bands import BANDS, light


@pytest.mark.parametrize(
    ("metric", "good", "watch", "bad"),
    [
        ("explained_variance", 0.3, 0.29, -0.01),
        ("clipfrac", 0.24, 0.25, 0.3),
        ("approx_kl", 0.014, 0.015, 0.03),
        ("grad_norm", 4.9, 5.0, 10.0),
        ("ratio_max", 1.4, 1.5, 2.0),
        ("growth_ratio", 1.9, 2.0, 5.0),
        ("obs_clamp_share", 0.04, 0.05, 0.1),
        ("stale_s", 1.0, 2.0, 5.0),
        ("anti_gaming_share", 0.04, 0.05, 0.1),
    ],
)
def test_colours(metric: str, good: float, watch: float, bad: float) -> None:
    assert [light(metric, value) for value in (good, watch, bad)] == ["good", "watch", "bad"]


def test_waiting_99_percent_is_good_and_always_is_bad() -> None:
    assert light("wait_share_free", 0.99) == "good"
    assert light("wait_share_free", 1.0) == "bad"


def test_what_is_not_known_has_no_colour() -> None:
    assert light("approx_kl", None) == "unknown"
    assert light("approx_kl", math.nan) == "unknown"
    assert light("somebody_elses", 1.0) == "unknown"
    assert all(band.meaning for band in BANDS.values())
