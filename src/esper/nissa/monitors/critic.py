"""Monitors of the critic: does it explain the returns, and does it tell the ops apart?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from esper.nissa.monitors.monitor import Finding, Limits, Recent, find_lasting, register_monitor
from esper.nissa.schema_runs import UpdateRow

EXPLAINED_VARIANCE: tuple[tuple[float, float], ...] = (
    (0.10, -0.5),
    (0.25, -0.2),
    (0.75, 0.0),
    (1.0, 0.1),
)
"""Up to this share of the run, explained variance must be at least that."""

LEARNING_ROUNDS = 10
"""Rounds before a critic is judged: until then it explains little and hardly tells ops apart, in
healthy runs too."""

Q_VARIANCE = Limits(warning=0.01, is_floor=True)
Q_OP_SPREAD = Limits(warning=0.1, is_floor=True)
VALUE_SPREAD = 0.01
VALUE_LOSS_RATIO = 10.0
VALUE_LOSS_COUNT = 100
GERMINATION_COUNT = 30


def has_learned(recent: Recent) -> bool:
    """Return whether the critic has had enough rounds to be judged."""
    return recent.updates[-1].round >= LEARNING_ROUNDS


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
    value, spread = newest.explained_variance, newest.return_std
    if not newest.round or value is None:  # before the first update the critic is untrained
        return
    if newest.low_variance:
        text = "" if spread is None else f" (deviation {spread:.3g})"
        message = f"returns hardly vary{text}, so explained variance says nothing"
        yield Finding("info", message, spread, subject="low_variance")
        return
    progress = recent.progress if has_learned(recent) else 0.0
    share = 1.0 if progress is None else min(progress, 1.0)
    limit = next(limit for until, limit in EXPLAINED_VARIANCE if share <= until)
    message = "explained variance is {value:.3g} (at least {limit:g} by now)"
    yield Limits(warning=limit, is_floor=True).find(value, message)


@register_monitor(
    reads=UpdateRow,
    thresholds="after 10 rounds, where the critic sees the op: variance of Q over ops < 0.01, "
    "spread of mean Q < 0.1: warning",
    advice="Look whether rewards differ by op at all; if they do, strengthen the op's input "
    "(an embedding, or a small encoder before it joins the state).",
)
def critic_op_sensitivity(recent: Recent) -> Iterator[Finding | None]:
    """Q(s, op) has become V(s): conditioning on the op has no effect."""
    newest = recent.updates[-1]
    if has_learned(recent):
        for limits, name in ((Q_VARIANCE, "q_variance"), (Q_OP_SPREAD, "q_op_spread")):
            message = (
                f"{name} is {{value:.3g}} (at least {{limit:g}}): the critic hardly tells the "
            )
            yield limits.find(getattr(newest, name), message + "ops apart", subject=name)


@register_monitor(
    reads=UpdateRow,
    thresholds="after 10 rounds, per op, |mean| > deviation over more than 100 decisions: warning",
    advice="Look at the reward terms of that op's decisions and at its value loss.",
)
def advantage_bias(recent: Recent) -> Iterator[Finding]:
    """The critic systematically misjudges this op, or its reward is misattributed."""
    by_op = recent.updates[-1].advantage_by_op
    if not has_learned(recent) or not isinstance(by_op, Mapping):
        return
    for op, numbers in by_op.items():
        if numbers.get("is_biased"):
            mean, std = numbers["mean"], numbers["std"]
            message = (
                f"advantages of {op} are biased: mean {mean:.3g}, deviation {std:.3g} over "
                f"{numbers['n']} decisions"
            )
            yield Finding("warning", message, mean, std, subject=op)


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
    if not (has_learned(recent) and isinstance(losses, Mapping) and isinstance(by_op, Mapping)):
        return
    known = {
        op: loss
        for op, loss in losses.items()
        if loss is not None and (by_op.get(op, {}).get("n") or 0) >= VALUE_LOSS_COUNT
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


@register_monitor(
    reads=UpdateRow,
    thresholds="after 10 rounds, mean of value - return right after a germination further "
    "from that of the other states than their deviation, 30 states each: warning",
    advice="Look at the value loss by op, and whether returns after a germination differ by "
    "blueprint: the critic knows the blueprint from the state alone.",
)
def value_after_germination(recent: Recent) -> Iterator[Finding | None]:
    """The critic does not see what a new seed leads to."""
    by_state = recent.updates[-1].value_by_state
    if not has_learned(recent) or not isinstance(by_state, Mapping):
        return
    planted, other = by_state.get("germinated", {}), by_state.get("other", {})
    counts = [int(each.get("n") or 0) for each in (planted, other)]
    if min(counts) < GERMINATION_COUNT:
        return
    off, limit = planted["error"] - other["error"], other["std"]
    if abs(off) > limit > 0:
        message = (
            f"right after a germination values are off by {off:+.3g} more than in other "
            f"states, whose errors deviate by {limit:.3g} ({counts[0]} such states)"
        )
        yield Finding("warning", message, off, limit)


@register_monitor(
    reads=UpdateRow,
    thresholds="after 10 rounds, deviation of values < 1 % of that of what they are to foresee: "
    "warning",
    advice="Look at the critic's gradient norm and at the scale of its targets.",
)
def value_collapse(recent: Recent) -> Iterator[Finding | None]:
    """The critic says the same of every state."""
    newest = recent.updates[-1]
    spread = newest.return_std
    if has_learned(recent) and spread is not None and not newest.low_variance:
        message = f"values hardly vary ({{value:.3g}}) while returns do ({spread:.3g})"
        limits = Limits(warning=VALUE_SPREAD * spread, is_floor=True)
        yield limits.find(newest.value_std, message)


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


def _shape(row: UpdateRow) -> Iterator[Finding | None]:
    skewed = "advantages are skewed by {value:.3g} (limit {limit:g})"
    tails = "advantages have heavy tails: excess kurtosis {value:.3g} (limit {limit:g})"
    yield SKEW.find(row.advantage_skew, skewed, subject="skew")
    yield SKEW_DOWN.find(row.advantage_skew, skewed, subject="skew")
    yield KURTOSIS.find(row.advantage_kurtosis, tails, subject="kurtosis")
    (low, high), share = POSITIVE, row.advantage_positive
    if share is not None and not low <= share <= high:
        message = f"{share:.0%} of the advantages are above 0 (healthy: {low:.0%} to {high:.0%})"
        limit = low if share < low else high
        yield Finding("warning", message, share, limit, subject="positive")


@register_monitor(
    reads=UpdateRow,
    thresholds="in 3 updates in a row: |skewness| > 3 info, excess kurtosis > 10 info, share above "
    "0 outside 15 to 85 % warning",
    advice="Look at explained variance first; then at which op and which reward term those few "
    "decisions have in common.",
)
def advantage_shape(recent: Recent) -> Iterator[Finding]:
    """A few decisions carry the whole update, or most look worse than expected: a poor baseline."""
    yield from find_lasting(recent.updates, UPDATES, _shape)
