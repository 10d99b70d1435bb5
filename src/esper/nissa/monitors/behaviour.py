"""Monitors of what the controller does and sees: waiting, growth, observations, rollbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from esper.nissa.monitors.recent import Recent
from esper.nissa.monitors.table import Finding, register_monitor
from esper.nissa.schema import EpisodeRow, EpochRow, RoundRow

FREE_STEPS = 100
OBS_WARNING = 0.05
OBS_CRITICAL = 0.10
GROWTH_WARNING = 2.0
GROWTH_CRITICAL = 5.0
STILLBORN_SEEDS = 50


def wait_share(ops: Sequence[str], forced: Sequence[bool]) -> tuple[float | None, int]:
    """Return the share of WAIT among the free decisions, and how many of these there were."""
    free = [op for op, is_forced in zip(ops, forced, strict=True) if not is_forced]
    if not free:
        return None, 0
    return sum(op == "WAIT" for op in free) / len(free), len(free)


def check_wait_share(share: float | None, free_steps: int | None) -> Finding | None:
    """Find a controller that never acts where it could. A high share alone is right."""
    if share is None or share < 1.0 or (free_steps is not None and free_steps < FREE_STEPS):
        return None
    return Finding(
        severity="warning",
        value=share,
        threshold=1.0,
        message="the controller waited in every decision in which it could have acted",
    )


def check_obs_clamp(share: float | None) -> Finding | None:
    """Find observations of which too much lies at its clamp."""
    if share is None or share <= OBS_WARNING:
        return None
    is_critical = share > OBS_CRITICAL
    limit = OBS_CRITICAL if is_critical else OBS_WARNING
    return Finding(
        severity="critical" if is_critical else "warning",
        value=share,
        threshold=limit,
        message=f"{share:.1%} of the observation lies at its clamp (limit {limit:.0%})",
    )


def check_growth(ratio: float | None) -> Finding | None:
    """Find a network that has grown out of proportion."""
    if ratio is None or ratio <= GROWTH_WARNING:
        return None
    is_critical = ratio > GROWTH_CRITICAL
    limit = GROWTH_CRITICAL if is_critical else GROWTH_WARNING
    return Finding(
        severity="warning" if is_critical else "info",
        value=ratio,
        threshold=limit,
        message=f"a network has {ratio:.2f} times the parameters of its host (limit {limit:g})",
    )


def find_stillborn(fates: Mapping[str, Mapping[str, int]]) -> Iterator[Finding]:
    """Find blueprints that were tried often and never once kept."""
    for blueprint, counts in fates.items():
        germinated, fossilized = counts.get("germinated", 0), counts.get("fossilized", 0)
        if germinated >= STILLBORN_SEEDS and fossilized == 0:
            yield Finding(
                severity="warning",
                subject=blueprint,
                value=float(germinated),
                threshold=float(STILLBORN_SEEDS),
                message=f"none of {germinated} seeds of {blueprint} was ever fossilized",
            )


@register_monitor(
    "never_acts",
    reads=RoundRow,
    thresholds="WAIT in 100 % of at least 100 free decisions: warning; 99 % is right",
    meaning="The op head has collapsed to WAIT: the controller is a WAIT-only baseline.",
    advice="Raise the op's entropy bonus, weaken the sentinel prior, or start on tasks where "
    "growth usually pays.",
)
def never_acts(recent: Recent) -> Iterator[Finding]:
    """Look at the newest round."""
    newest = recent.rounds[-1]
    found = check_wait_share(newest.wait_share_free, newest.free_steps)
    if found is not None:
        yield found


@register_monitor(
    "observation_clamp",
    reads=RoundRow,
    thresholds="> 5 % warning, > 10 % critical",
    meaning="The observation saturates, so the controller cannot tell situations apart.",
    advice="Look which features are at their clamp: a task with losses or gradients of another "
    "scale needs its own normaliser statistics.",
)
def observation_clamp(recent: Recent) -> Iterator[Finding]:
    """Look at the newest round."""
    found = check_obs_clamp(recent.rounds[-1].obs_clamp_share)
    if found is not None:
        yield found


@register_monitor(
    "growth_of_rows",
    reads=RoundRow,
    thresholds="> 2 times the host info, > 5 times warning",
    meaning="Some network grew far beyond its host.",
    advice="Raise the rent, or set max_parameters.",
)
def growth_of_rows(recent: Recent) -> Iterator[Finding]:
    """Look at the newest round."""
    found = check_growth(recent.rounds[-1].growth_ratio)
    if found is not None:
        yield found


@register_monitor(
    "growth",
    reads=EpochRow,
    thresholds="> 2 times the host info, > 5 times warning",
    meaning="The network grew far beyond its host.",
    advice="Set max_parameters or max_seeds if that is more than the task deserves.",
)
def growth(recent: Recent) -> Iterator[Finding]:
    """Look at the newest epoch of one network."""
    newest = recent.epochs[-1]
    if (recent.run.rows or 1) > 1 or not newest.host_parameters or newest.parameters is None:
        return
    found = check_growth(newest.parameters / newest.host_parameters)
    if found is not None:
        yield found


@register_monitor(
    "stillborn_blueprint",
    reads=RoundRow,
    thresholds="at least 50 seeds of a blueprint and none fossilized: warning",
    meaning="Seeds of this blueprint never help, or cannot learn.",
    advice="Run the blueprint's conformance battery: does every parameter get a gradient?",
)
def stillborn_blueprint(recent: Recent) -> Iterator[Finding]:
    """Look at the counts up to the newest round."""
    fates = recent.rounds[-1].blueprint_fates
    if isinstance(fates, Mapping):
        yield from find_stillborn(fates)


@register_monitor(
    "governor_rollback",
    reads=EpisodeRow,
    thresholds="every rollback: warning",
    meaning="The governor found a network beyond saving and took it back to its last good state.",
    advice="One is bad luck; many mean that blends are too sudden or the learning rate too high.",
    is_event=True,
)
def governor_rollback(recent: Recent) -> Iterator[Finding]:
    """Look at the newest episode."""
    newest = recent.episodes[-1]
    if newest.rolled_back:
        yield Finding(
            severity="warning",
            subject=newest.rollback_reason,
            message=f"row {newest.row} was rolled back ({newest.rollback_reason or 'no reason'})",
        )
