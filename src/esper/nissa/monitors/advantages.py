"""Monitors of advantages: their shape, and whether some op is always thought better or worse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from esper.nissa.monitors.recent import Recent
from esper.nissa.monitors.table import Finding, register_monitor
from esper.nissa.schema import UpdateRow

SKEW = 3.0
KURTOSIS = 10.0
POSITIVE = (0.15, 0.85)
UPDATES = 3


def check_shape(
    skew: float | None, kurtosis: float | None, positive: float | None
) -> Iterator[Finding]:
    """Find advantages that a few decisions dominate, or that lie almost all on one side."""
    if skew is not None and abs(skew) > SKEW:
        yield Finding(
            severity="info",
            subject="skew",
            value=skew,
            threshold=SKEW,
            message=f"advantages are skewed by {skew:.3g} (limit {SKEW:g} either way)",
        )
    if kurtosis is not None and kurtosis > KURTOSIS:
        yield Finding(
            severity="info",
            subject="kurtosis",
            value=kurtosis,
            threshold=KURTOSIS,
            message=f"advantages have heavy tails: excess kurtosis {kurtosis:.3g} (limit "
            f"{KURTOSIS:g})",
        )
    low, high = POSITIVE
    if positive is not None and not low <= positive <= high:
        yield Finding(
            severity="warning",
            subject="positive",
            value=positive,
            threshold=low if positive < low else high,
            message=f"{positive:.0%} of the advantages are above 0 (healthy: {low:.0%} to "
            f"{high:.0%})",
        )


def check_lasting_shape(updates: Sequence[UpdateRow]) -> Iterator[Finding]:
    """Find what is out of shape in each of the last few updates; once is chance."""
    last = list(updates)[-UPDATES:]
    if len(last) < UPDATES:
        return
    each = [
        {
            found.subject: found
            for found in check_shape(
                row.advantage_skew, row.advantage_kurtosis, row.advantage_positive
            )
        }
        for row in last
    ]
    for subject, found in each[-1].items():
        if all(subject in one for one in each):
            yield found


@register_monitor(
    "advantage_shape",
    reads=UpdateRow,
    thresholds="in 3 updates in a row: |skewness| > 3 info, excess kurtosis > 10 info, share above "
    "0 outside 15 to 85 % warning",
    meaning="A few decisions carry the whole update, or almost every decision looks worse than "
    "expected: the baseline is off.",
    advice="Look at explained variance first; then at which op and which reward term those few "
    "decisions have in common.",
)
def advantage_shape(recent: Recent) -> Iterator[Finding]:
    """Look at the newest updates."""
    yield from check_lasting_shape(recent.updates)
