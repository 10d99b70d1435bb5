"""The learning rate at which a host that only waits does best, by data, host and training images.

Measured under the schedule below, over 60 epochs, by `python -m benchmarks tune_hosts`. The number
of images moves the best rate by a factor of four; width and label noise hardly do: one rate is
within 0.7 validation points of the best for every host with as many images. Between two sizes the
rate is a power of the size, beyond them it stays. docs/arena.md says what was measured.
"""

from __future__ import annotations

import math
from itertools import pairwise

from esper.leyline.errors import ConfigError
from esper.tasks.training import Schedule

SCHEDULE: Schedule = "wsd"
"""How the learning rate of every member of a family moves, unless something else is asked for."""
WARM_UP = 0.05
"""Share of a run in which it rises."""
SEED_WARM_UP = 3
"""Epochs in which the rate of a new seed rises; it helped where growing helps most."""

RATES: dict[tuple[str, str], tuple[tuple[int, float], ...]] = {
    ("digits", "plain"): ((1_079, 0.2),),
    ("cifar16", "plain"): ((2_000, 0.02), (20_000, 0.1)),
    ("cifar16", "residual"): ((2_000, 0.025), (8_000, 0.1)),
    ("fashion14", "plain"): ((2_000, 0.02), (20_000, 0.1)),
    ("fashion14", "residual"): ((2_000, 0.02), (20_000, 0.1)),
    ("cifar_baseline", "plain"): ((2_000, 0.02), (20_000, 0.1)),
}
"""(training images, rate) for every data set and host, by rising size."""


def tuned_rate(data: str, host: str, train_size: int) -> float:
    """Return the rate for a host of this kind on so many images."""
    try:
        known = RATES[data, host]
    except KeyError:
        raise ConfigError(
            f"no learning rate is known for {host} hosts on {data}; measure it with "
            f"`python -m benchmarks tune_hosts` and add it to esper.tasks.rates"
        ) from None
    if train_size <= known[0][0]:
        return known[0][1]
    for (small, low), (large, high) in pairwise(known):
        if train_size <= large:
            share = math.log(train_size / small) / math.log(large / small)
            return math.exp((1.0 - share) * math.log(low) + share * math.log(high))
    return known[-1][1]
