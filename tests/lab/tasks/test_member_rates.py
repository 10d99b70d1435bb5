from __future__ import annotations

import pytest

from esper.lab.tasks.member import RATES, tuned_rate
from esper.leyline.errors import ConfigError


@pytest.mark.parametrize(("data", "host"), RATES)
def test_measured_rates_are_kept_and_between_them_rates_rise_with_the_size(
    data: str, host: str
) -> None:
    known = RATES[data, host]
    assert list(known) == sorted(known)
    for size, rate in known:
        assert tuned_rate(data, host, size) == pytest.approx(rate)
    sizes = range(1, 60_000, 997)
    rates = [tuned_rate(data, host, size) for size in sizes]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (known[0][1], known[-1][1])


def test_between_two_sizes_the_rate_is_a_power_of_the_size() -> None:
    (small, low), (large, high) = RATES["cifar16", "plain"]
    middle = round((small * large) ** 0.5)
    assert tuned_rate("cifar16", "plain", middle) == pytest.approx((low * high) ** 0.5, rel=1e-3)


def test_what_was_not_measured_is_refused_with_the_command() -> None:
    with pytest.raises(ConfigError, match="benchmarks tune_hosts"):
        tuned_rate("stories", "plain", 100)
