"""Monitors of the critic: does it explain the returns, and does it tell the ops apart?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from esper.nissa.monitors.monitor import Finding, Limits, Recent, findings, register_monitor
from esper.nissa.schema_runs import UpdateRow

EXPLAINED_VARIANCE: tuple[tuple[float, float], ...] = (
    (0.10, -0.5),
    (0.25, -0.2),
    (0.75, 0.0),
    (1.0, 0.1),
)
"""Up to this share of the run, explained variance must be at least that."""

LEARNING_ROUNDS = 10
"""Rounds in which a critic learns what there is to foresee. Until then it hardly varies, tells no
ops apart and explains nothing, in a healthy run as in a sick one; only worse than that is found."""

Q_VARIANCE = Limits(warning=0.01, is_floor=True)
Q_OP_SPREAD = Limits(warning=0.1, is_floor=True)
VALUE_SPREAD = 0.01
VALUE_LOSS_RATIO = 10.0
VALUE_LOSS_COUNT = 100
GERMINATION_COUNT = 30


def explained_variance_limit(progress: float) -> float:
    """Return the least explained variance that is all right at this share of the run."""
    for until, limit in EXPLAINED_VARIANCE:
        if progress <= until:
            return limit
    return EXPLAINED_VARIANCE[-1][1]


def has_learned(recent: Recent) -> bool:
    """Return whether the critic has had the rounds it needs before it can be judged."""
    return recent.updates[-1].round >= LEARNING_ROUNDS


def check_explained_variance(
    value: float | None,
    progress: float | None,
    return_std: float | None,
    low_variance: bool | None,
) -> Finding | None:
    """Find a critic that explains too little for this share of the run.

    Where the learner says that returns hardly vary, nothing is left to explain: then it says so.
    """
    if value is None:
        return None
    if low_variance:
        told = "" if return_std is None else f" (deviation {return_std:.3g})"
        message = f"returns hardly vary{told}, so explained variance says nothing"
        return Finding("info", message, return_std, subject="low_variance")
    limit = explained_variance_limit(1.0 if progress is None else progress)
    message = "explained variance is {value:.3g} (at least {limit:g} by now)"
    return Limits(warning=limit, is_floor=True).find(value, message)


def check_q_sensitivity(q_variance: float | None, q_op_spread: float | None) -> Iterator[Finding]:
    """Find a critic that ignores the op it is given."""
    told = "is {value:.3g} (at least {limit:g}): the critic hardly tells the ops apart"
    return findings(
        Q_VARIANCE.find(q_variance, f"q_variance {told}", subject="q_variance"),
        Q_OP_SPREAD.find(q_op_spread, f"q_op_spread {told}", subject="q_op_spread"),
    )


def check_advantage_bias(by_op: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Find ops whose advantages are off to one side by more than their spread."""
    for op, numbers in by_op.items():
        if not numbers.get("is_biased"):
            continue
        mean, std = numbers["mean"], numbers["std"]
        message = (
            f"advantages of {op} are biased: mean {mean:.3g}, deviation {std:.3g} over "
            f"{numbers['n']} decisions"
        )
        yield Finding("warning", message, mean, std, subject=op)


def check_value_loss_by_op(
    losses: Mapping[str, float | None], counts: Mapping[str, int]
) -> Iterator[Finding]:
    """Find ops whose values the critic misses by far more than those of the others.

    Only ops with enough decisions count; an op is compared with the mean of the others.
    """
    known = {
        op: loss
        for op, loss in losses.items()
        if loss is not None and counts.get(op, 0) >= VALUE_LOSS_COUNT
    }
    for op, loss in known.items():
        others = [other for name, other in known.items() if name != op]
        limit = VALUE_LOSS_RATIO * sum(others) / len(others) if others else 0.0
        if limit > 0 and loss > limit:
            message = (
                f"the value loss of {op} is {loss:.3g}, more than {VALUE_LOSS_RATIO:g} "
                "times that of the other ops"
            )
            yield Finding("warning", message, loss, limit, subject=op)


def check_value_after_germination(by_state: Mapping[str, Mapping[str, Any]]) -> Finding | None:
    """Find a critic that misjudges states with a new seed more than it errs elsewhere."""
    planted, other = by_state.get("germinated", {}), by_state.get("other", {})
    counts = [int(each.get("n") or 0) for each in (planted, other)]
    if min(counts) < GERMINATION_COUNT:
        return None
    off, limit = planted["error"] - other["error"], other["std"]
    if limit <= 0 or abs(off) <= limit:
        return None
    message = (
        f"right after a germination values are off by {off:+.3g} more than in other "
        f"states, whose errors deviate by {limit:.3g} ({counts[0]} such states)"
    )
    return Finding("warning", message, off, limit)


def check_value_collapse(
    value_std: float | None, return_std: float | None, low_variance: bool | None
) -> Finding | None:
    """Find a critic that says the same of every state although returns differ."""
    if return_std is None or low_variance:
        return None
    message = f"values hardly vary ({{value:.3g}}) while returns do ({return_std:.3g})"
    return Limits(warning=VALUE_SPREAD * return_std, is_floor=True).find(value_std, message)


@register_monitor(
    reads=UpdateRow,
    thresholds="from the second round on, < -0.5 until 10 % of the run and at least for 10 rounds, "
    "< -0.2 until 25 %, < 0 until 75 %, then < 0.1; info when what the critic is to foresee hardly "
    "varies (the learner's flag: a deviation below 1e-3)",
    advice="Check the scale of value targets, train the critic more per update, and that the "
    "baseline is the marginal over ops, not the value of the sampled op.",
)
def explained_variance(recent: Recent) -> Iterator[Finding | None]:
    """The critic predicts returns worse than it should by now, so advantages are noise."""
    newest = recent.updates[-1]
    if newest.round:  # before the first update nobody had taught the critic
        yield check_explained_variance(
            newest.explained_variance,
            recent.progress if has_learned(recent) else 0.0,
            newest.return_std,
            newest.low_variance,
        )


@register_monitor(
    reads=UpdateRow,
    thresholds="after 10 rounds, where the critic sees the op: variance of Q over ops < 0.01, "
    "spread of mean Q < 0.1: warning",
    advice="Look whether rewards differ by op at all; if they do, strengthen the op's input "
    "(an embedding, or a small encoder before it joins the state).",
)
def critic_op_sensitivity(recent: Recent) -> Iterator[Finding]:
    """Q(s, op) has become V(s): conditioning on the op has no effect."""
    newest = recent.updates[-1]
    if has_learned(recent):
        yield from check_q_sensitivity(newest.q_variance, newest.q_op_spread)


@register_monitor(
    reads=UpdateRow,
    thresholds="after 10 rounds, per op, |mean| > deviation over more than 100 decisions: warning",
    advice="Look at the reward terms of that op's decisions and at its value loss.",
)
def advantage_bias(recent: Recent) -> Iterator[Finding]:
    """The critic systematically misjudges this op, or its reward is misattributed."""
    by_op = recent.updates[-1].advantage_by_op
    if has_learned(recent) and isinstance(by_op, Mapping):
        yield from check_advantage_bias(by_op)


@register_monitor(
    reads=UpdateRow,
    thresholds="after 10 rounds, value loss of an op > 10 times the mean of the others, "
    "100 decisions each: warning",
    advice="Look at how its rewards vary; a rare op needs more data, not a larger step.",
)
def value_loss_by_op(recent: Recent) -> Iterator[Finding]:
    """The critic has not learned what this op leads to."""
    newest = recent.updates[-1]
    losses, by_op = newest.value_loss_by_op, newest.advantage_by_op
    if has_learned(recent) and isinstance(losses, Mapping) and isinstance(by_op, Mapping):
        counts = {op: int(numbers.get("n") or 0) for op, numbers in by_op.items()}
        yield from check_value_loss_by_op(losses, counts)


@register_monitor(
    reads=UpdateRow,
    thresholds="after 10 rounds, mean of value - return right after a germination further "
    "from that of the other states than their deviation, 30 states each: warning",
    advice="Look at the value loss by op, and whether returns after a germination differ by "
    "blueprint: the critic knows the blueprint from the state alone.",
)
def value_after_germination(recent: Recent) -> Iterator[Finding | None]:
    """The critic does not see what a new seed leads to."""
    newest = recent.updates[-1]
    if has_learned(recent) and isinstance(newest.value_by_state, Mapping):
        yield check_value_after_germination(newest.value_by_state)


@register_monitor(
    reads=UpdateRow,
    thresholds="after 10 rounds, deviation of values < 1 % of that of what they are to foresee: "
    "warning",
    advice="Look at the critic's gradient norm and at the scale of its targets.",
)
def value_collapse(recent: Recent) -> Iterator[Finding | None]:
    """The critic says the same of every state."""
    newest = recent.updates[-1]
    if has_learned(recent):
        yield check_value_collapse(newest.value_std, newest.return_std, newest.low_variance)


@register_monitor(
    reads=UpdateRow,
    thresholds="the deviation of raw advantages was below its floor: info",
    advice="Nothing, if it passes; if it stays, rewards carry too little signal.",
)
def advantage_floored(recent: Recent) -> Iterator[Finding]:
    """Advantages hardly differ, so normalising them would mostly amplify noise."""
    newest = recent.updates[-1]
    if newest.advantage_floored:
        message = "the deviation of advantages was below its floor"
        yield Finding("info", message, newest.advantage_std_raw)


SKEW = Limits(info=3.0)
SKEW_DOWN = Limits(info=-3.0, is_floor=True)
KURTOSIS = Limits(info=10.0)
POSITIVE = (0.15, 0.85)
UPDATES = 3


def check_shape(
    skew: float | None, kurtosis: float | None, positive: float | None
) -> Iterator[Finding]:
    """Find advantages that a few decisions dominate, or that lie almost all on one side."""
    told = "advantages are skewed by {value:.3g} (limit {limit:g})"
    tails = "advantages have heavy tails: excess kurtosis {value:.3g} (limit {limit:g})"
    yield from findings(
        SKEW.find(skew, told, subject="skew"),
        SKEW_DOWN.find(skew, told, subject="skew"),
        KURTOSIS.find(kurtosis, tails, subject="kurtosis"),
    )
    low, high = POSITIVE
    if positive is not None and not low <= positive <= high:
        message = f"{positive:.0%} of the advantages are above 0 (healthy: {low:.0%} to {high:.0%})"
        yield Finding(
            "warning", message, positive, low if positive < low else high, subject="positive"
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
    reads=UpdateRow,
    thresholds="in 3 updates in a row: |skewness| > 3 info, excess kurtosis > 10 info, share above "
    "0 outside 15 to 85 % warning",
    advice="Look at explained variance first; then at which op and which reward term those few "
    "decisions have in common.",
)
def advantage_shape(recent: Recent) -> Iterator[Finding]:
    """A few decisions carry the whole update, or most look worse than expected: a poor baseline."""
    yield from check_lasting_shape(recent.updates)
