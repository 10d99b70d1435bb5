"""Text about runs: why a controller waits or prunes, why nothing grew, records and figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

from esper.leyline.learning import why_not_learned
from esper.leyline.records import (
    DEEPEN,
    DecisionRecord,
    EpochRecord,
    RunSummary,
    SeedRecord,
    SlotRecord,
    StackRecord,
    kept_record,
    removed_later,
    seeds_at_end,
    stacks_at_end,
)
from esper.leyline.stages import SeedStage


class Why(StrEnum):
    """Why nothing was germinated, or why a seed was pruned.

    The reason of a decision begins with one of these, so that the reasons of a run can be counted.
    """

    NOT_SETTLED = "the network had not settled yet"
    NO_PLATEAU = "its score was still improving"
    EARLY = "it was too early in the run"
    RESTING = "a seed had just been pruned"
    TOO_LATE = "too few epochs were left for a seed"
    FULL = "no slot could take a seed"
    NO_COPY = "no block could be copied"
    STEEP = "a deeper network would not have paid yet"
    RISING = "its loss was rising"
    DEVELOPING = "a seed was developing"
    LEARNED = "it expected nothing from a seed"
    SHORT_RUN = "the run is much shorter than those it has learned in"
    NOT_FINITE = "the validation loss was not finite"
    HARM = "it did harm"
    RANSOM = "the network had only come to depend on it"
    WORTHLESS = "it was worth too little"


ADVICE: dict[Why, str] = {
    Why.NOT_SETTLED: "train for more epochs, or let a schedule decide (controller='schedule:FILE')",
    Why.NO_PLATEAU: "train for more epochs: growth begins when the score no longer rises by itself",
    Why.EARLY: "train for more epochs",
    Why.TOO_LATE: "train for more epochs",
    Why.FULL: "raise the limits (max_growth=3.0, max_seeds, max_parameters, max_added_flops; where "
    "there are none, a learned controller keeps its own) or name more slots",
    Why.NO_COPY: "let blocks return x + f(x), or write controller='trial', which needs no copies",
    Why.LEARNED: "train for more epochs, or let a rule decide (controller='trial')",
    Why.SHORT_RUN: "train for more epochs, or let a rule decide (controller='trial')",
    Why.STEEP: "train for more epochs: depth pays once the loss falls slowly",
    Why.RISING: "train on more data: a deeper network learns what there is by heart even sooner",
    Why.NOT_FINITE: "lower the learning rate, clip gradients or check the data",
    Why.DEVELOPING: "train for more epochs: the last seed had not been blended in",
}

_CHANGE = "To change that:"
_PRUNED = (
    "name other slots (esper.suggest_slots(model, example) finds some) or write "
    "controller='heuristic', unless the network has all it needs"
)
_MOST_REASONS = 2
"""Most reasons to wait that are named."""
_BLENDED = 0.9
"""Share of its amplitude from which a seed counts as blended in."""


@runtime_checkable
class Explaining(Protocol):
    """A controller that gives reasons for its decisions."""

    def reasons(self) -> Sequence[str]:
        """Return the reason for every row's last decision, empty where there is none."""


def is_grown(seeds: Sequence[SeedRecord]) -> bool:
    """Return whether any seed is part of the network at the end."""
    return any(seed.fate not in ("pruned", "dropped") for seed in seeds)


def why_not_grown(
    history: Sequence[EpochRecord],
    kept_epoch: int | None = None,
    stopped: str = "",
    chance_loss: float | None = None,
) -> tuple[str, ...]:
    """Return sentences on why a network has not learned, not grown, or not finished growing.

    There are none if something grew, no seed is half blended in, and none that is part of the
    network was pruned later.

    Args:
        history: all epochs of a finished run.
        kept_epoch: the epoch whose network is kept; the last by default.
        stopped: why the run ended before its last epoch; empty if it did not.
        chance_loss: loss of a network that only guesses; None if it is not known.
    """
    if not history:
        return ()
    if history[-1].depth is not None:
        not_deep = _why_not_deep(history, kept_epoch, stopped)
        return tuple(filter(None, (why_not_learned(history, chance_loss), not_deep)))
    seeds = seeds_at_end(history, kept_epoch)
    slots = kept_record(history, kept_epoch).slots
    held = {slot.name for slot in slots if slot.stage == SeedStage.HOLDING.name}
    idle = [s for s in seeds if s.fate == "dropped" and s.has_no_effect and s.slot in held]
    not_learned = why_not_learned(history, chance_loss)
    no_effect = [
        f"{_named(seed)} made no difference (a contribution of 0 ± 0), and was dropped."
        for seed in idle
    ]
    not_grown = _why_not_grown(history, seeds, idle, kept_epoch, stopped)
    if not_learned:
        # Other slots or more epochs are no remedy for a network that does not learn.
        not_grown = tuple(line for line in not_grown if not line.startswith(_CHANGE))
    return tuple(filter(None, (not_learned, *no_effect, *not_grown)))


def _why_not_deep(history: Sequence[EpochRecord], kept_epoch: int | None, stopped: str) -> str:
    """Return why the network that is kept has fewer blocks awake than planned, if it has."""
    last = history[-1].epoch
    stacks, at_end = stacks_at_end(history, kept_epoch), stacks_at_end(history)
    now = format_stacks(stacks)
    if stacks != at_end:
        return (
            f"The best validation score is that of epoch {kept_epoch}, with {now} awake; "
            f"keep='last' returns the network of epoch {last}, with {format_stacks(at_end)}."
        )
    refused = [
        each
        for one in history
        if one.depth is not None
        for each in one.depth.deepenings
        if each.outcome != "done"
    ]
    if refused:
        return f"No more than {now} woke: {refused[-1].reason}."
    if stopped and any(stack.awake < stack.blocks for stack in stacks):
        return f"The run stopped after epoch {last} ({stopped}), with {now} awake."
    return ""


def _why_not_grown(
    history: Sequence[EpochRecord],
    seeds: Sequence[SeedRecord],
    idle: Sequence[SeedRecord],
    kept_epoch: int | None,
    stopped: str,
) -> tuple[str, ...]:
    early = _stopped_lines(history[-1], stopped) if stopped else ()
    if is_grown(seeds):
        removed = _removed_lines(history, kept_epoch)
        return (*early, *removed, *_unfinished_lines(history, kept_epoch))
    later = [seed for seed in seeds_at_end(history) if seed.fate not in ("pruned", "dropped")]
    if later:
        names = ", ".join(f"the {seed.blueprint} at {seed.slot}" for seed in later)
        not_kept = (
            f"Nothing that grew was kept: the best validation score is that of epoch {kept_epoch}, "
            f"before {names} had any effect; keep='last' returns the network of epoch "
            f"{history[-1].epoch}."
        )
        return (*early, not_kept)
    pruned = [seed for seed in seeds if seed.fate == "pruned"]
    dropped = [seed for seed in seeds if seed.fate == "dropped" and seed not in idle]
    lines = list(early)
    if pruned or dropped:
        lines.append(_tried_line(pruned, dropped, history))
    elif not idle:
        lines.append(_waiting_line(history))
    advice = _advice(history)
    if dropped:
        advice = ADVICE[Why.DEVELOPING]
    elif pruned or idle:
        advice = _PRUNED
    return (*lines, f"{_CHANGE} {advice}.") if advice else tuple(lines)


def _removed_lines(history: Sequence[EpochRecord], kept_epoch: int | None) -> tuple[str, ...]:
    """Return which seeds of the network that is kept were pruned after its epoch was measured."""
    kept, last = kept_record(history, kept_epoch), history[-1]
    is_last = kept.epoch == last.epoch
    which = "the last" if is_last else "the best validated"
    advice = f"; keep='last' returns that of epoch {last.epoch} without it"
    advice += f" ({format_score(last.val_score)})"
    return tuple(
        f"The returned network is that of epoch {kept.epoch}, {which} "
        f"({format_score(kept.val_score)}), and holds the {seed.blueprint} at {seed.slot} "
        f"({seed.parameters:,} parameters), which was pruned at epoch {seed.ended}"
        f"{_reason_of_prune(seed, history)}{'' if is_last else advice}."
        for seed in removed_later(history, kept_epoch)
    )


def _unfinished_lines(history: Sequence[EpochRecord], kept_epoch: int | None) -> tuple[str, ...]:
    """Return which seeds are half blended in in the epoch that is kept."""
    kept = kept_record(history, kept_epoch)
    is_last = kept.epoch == history[-1].epoch
    when = "when the run ended" if is_last else f"at epoch {kept.epoch}, whose network is kept"
    lines = [
        f"The {slot.blueprint} at {slot.name} was still being blended in {when}, at "
        f"{slot.alpha / slot.alpha_target:.0%} of its amplitude."
        for slot in kept.slots
        if slot.stage == SeedStage.BLENDING.name and _is_half_blended(slot)
    ]
    advice = "train for more epochs" if is_last else "train for more epochs, or keep='last'"
    return (*lines, f"{_CHANGE} {advice}.") if lines else ()


def _stopped_lines(last: EpochRecord, stopped: str) -> tuple[str, ...]:
    """Return which seeds were unfinished when a run stopped early."""
    states = {
        SeedStage.GERMINATED.name: "had not begun to learn",
        SeedStage.TRAINING.name: "was still learning",
        SeedStage.BLENDING.name: "was still being blended in",
    }
    return tuple(
        f"The run stopped after epoch {last.epoch} ({stopped}), when the {slot.blueprint} at "
        f"{slot.name} {states[slot.stage]}."
        for slot in last.slots
        if slot.stage in states and (slot.alpha_target <= 0 or _is_half_blended(slot))
    )


def _is_half_blended(slot: SlotRecord) -> bool:
    """Return whether a seed has not reached its target amplitude."""
    return slot.alpha < _BLENDED * slot.alpha_target


def _tried_line(
    pruned: Sequence[SeedRecord], dropped: Sequence[SeedRecord], history: Sequence[EpochRecord]
) -> str:
    """Return what became of the last seed that was tried, and how many were before."""
    count = len(pruned) + len(dropped)
    seed = (*pruned, *dropped)[-1]
    last = f"{count} seeds were tried, and the last, " if count > 1 else ""
    what = f"Nothing grew: {last}the {seed.blueprint} at {seed.slot},"
    if dropped:
        return (
            f"{what} germinated at epoch {seed.germinated}, was not yet blended in when the run "
            f"ended, and was dropped{_refusals(seed, history)}."
        )
    what = what if last else what.removesuffix(",")
    return f"{what} was pruned at epoch {seed.ended}{_reason_of_prune(seed, history)}."


def _waiting_line(history: Sequence[EpochRecord]) -> str:
    """Return how often the controller waited, and why."""
    decisions = [record.decision for record in history if record.decision is not None]
    reasons_given = [one.reason for one in decisions if one.op == "WAIT" and one.reason]
    # The figures in brackets differ between decisions; those of the last one are shown.
    counts = Counter(reason.partition(" (")[0] for reason in reasons_given)
    last = {reason.partition(" (")[0]: reason for reason in reasons_given}
    waited = sum(decision.op == "WAIT" for decision in decisions)
    if not decisions:
        return (
            f"Nothing grew: the run ended after epoch {history[-1].epoch}, before the first "
            "decision; train for more epochs."
        )
    line = f"Nothing grew: the controller waited in {waited} of {len(decisions)} decisions"
    # Figures are those of the most frequent reason; the rarest reasons are left out.
    reasons = [
        f"{count} because {why if rank else _with_figures(last[why], count)}"
        for rank, (why, count) in enumerate(counts.most_common(_MOST_REASONS))
    ]
    return f"{line}: {', '.join(reasons)}." if reasons else f"{line}."


def _with_figures(reason: str, count: int) -> str:
    """Return a reason; if it was given several times, its figures are called the last ones."""
    return reason.replace(" (", " (at last: ", 1) if count > 1 else reason


def _reason_of_prune(seed: SeedRecord, history: Sequence[EpochRecord]) -> str:
    for record in history:
        decision = record.decision
        if record.rollback is not None and record.epoch == seed.ended:
            return f" by a rollback ({record.rollback})"
        if decision is None or (decision.op, decision.slot) != ("PRUNE", seed.slot):
            continue
        if record.epoch == seed.ended and decision.reason:
            return f" because {decision.reason}"
    return ""


def _refusals(seed: SeedRecord, history: Sequence[EpochRecord]) -> str:
    """Return how often a gate refused to advance a seed, and its last reason."""
    refused = [
        record.decision.reason
        for record in history
        if record.decision is not None
        and record.epoch > seed.germinated
        and (record.decision.slot, record.decision.outcome) == (seed.slot, "gate_failed")
    ]
    if not refused:
        return ""
    wanted = refused[-1].partition(": ")[2] or refused[-1]
    if len(refused) == 1:
        return f"; it was held back once because {wanted}"
    return f"; it was held back {len(refused)} times, at last because {wanted}"


def _advice(history: Sequence[EpochRecord]) -> str | None:
    """Return the advice for the most frequent reason to wait."""
    waits = [one.decision for one in history if one.decision and one.decision.op == "WAIT"]
    counts = Counter(why for one in waits for why in ADVICE if one.reason.startswith(why))
    return ADVICE[counts.most_common(1)[0][0]] if counts else None


def _named(seed: SeedRecord) -> str:
    return f"The {seed.blueprint} at {seed.slot}"


# ---- Records and figures as text


_STILL = 0.0005
"""Relative change of the loss per epoch below which it counts as constant."""


def describe_progress(losses: Sequence[float], epoch: int, horizon: int) -> str:
    """Return the trend of the validation loss and the epochs left, as a short text.

    Args:
        losses: losses of the last epochs, newest last; NaN where there is none yet.
        epoch: epochs done.
        horizon: epochs of the whole run.
    """
    known = [loss for loss in losses if math.isfinite(loss)]
    count = horizon - epoch
    left = f"{count} epoch{'s' * (count != 1)} left"
    if len(known) < 2 or min(known) <= 0:
        return left
    change = (known[-1] / known[0]) ** (1 / (len(known) - 1)) - 1
    if abs(change) < _STILL:
        return f"validation loss stands still, {left}"
    moves = "falls" if change < 0 else "rises"
    return f"validation loss {moves} by {100 * abs(change):.1f} % an epoch, {left}"


def epoch_line(record: EpochRecord) -> str:
    """Return the metrics of an epoch in one line; a score that is the loss is shown once."""
    is_of_loss = is_loss(record.val_score)
    parts = [] if is_of_loss else [f"val score {record.val_score:.2f}"]
    parts.append(f"val loss {record.val_loss:{'.4g' if is_of_loss else '.4f'}}")
    if record.twin_score is not None:
        parts.append(f"twin {format_score(record.twin_score)}")
    if record.train_loss is not None:
        parts.append(f"train loss {record.train_loss:.4f}")
    if record.depth is not None:
        parts.append(format_stacks(record.depth.stacks))
    parts.append(f"{record.parameters:,} parameters")
    return "  ".join(parts)


def format_stacks(stacks: Sequence[StackRecord]) -> str:
    """Return the number of awake blocks, as in '4 of 12 blocks'; by stack if stacks differ."""
    counts = dict.fromkeys(f"{stack.awake} of {stack.blocks}" for stack in stacks)
    if len(counts) > 1:
        counts = dict.fromkeys(f"{one.name} {one.awake} of {one.blocks}" for one in stacks)
    return f"{', '.join(counts)} blocks"


def decision_line(epoch: int, decision: DecisionRecord) -> str:
    """Return a decision in one line."""
    words = [f"epoch {epoch}: {decision.op}"]
    words += [word for word in (decision.slot, decision.blueprint) if word]
    if decision.op == DEEPEN or decision.outcome != "done":
        words.append(f"({decision.reason or decision.outcome})")
    return " ".join(words)


def round_number(index: int) -> int:
    """Return the number of a round as shown to users, from 1; stores count from 0."""
    return index + 1


def is_loss(score: float) -> bool:
    """Return whether a score is a negative loss, and not an accuracy in points."""
    return score < 0


def format_score(score: float) -> str:
    """Return a score as text: an accuracy in points, or a loss."""
    return f"loss {-score:.4g}" if is_loss(score) else f"{score:.2f}"


def format_contribution(value: float, se: float | None = None) -> str:
    """Return a contribution with its standard error, both with as many decimals as the error has.

    Those are two, and more if the error, or without one the value, is small.
    """
    decides = abs(se or value)
    small = 0.0 < decides < 0.01
    decimals = 1 - math.floor(math.log10(decides)) if small else 2
    return f"{value:+.{decimals}f}" + ("" if se is None else f" ± {se:.{decimals}f}")


def format_gain(score: float, twin: float) -> str:
    """Return the difference to the twin's score, in points or as that of the loss."""
    if is_loss(score) or is_loss(twin):
        return f"loss {'lower' if score > twin else 'higher'} by {abs(score - twin):.4g}"
    return f"{score - twin:+.2f}"


def describe_kept(summary: RunSummary) -> str:
    """Return which epoch's network is the result, and why the run stopped early."""
    kept, done = summary.kept_epoch, summary.epochs
    which = "the last" if kept == done else f"the best validated of {done}"
    early = f"; stopped early: {summary.stopped}" if summary.stopped else ""
    return f"epoch {kept} kept, {which}{early}"


# ---- Whether a static network is likely to do as well


_EARLY = 0.25
"""If all growth is over by this share of the run, a static network would train alike."""


def static_warning(
    history: Sequence[EpochRecord],
    summary: RunSummary,
    val_gain: tuple[float, float] | None,
    all_off: tuple[float, float],
) -> str:
    """Return a warning that a static network of the same size is likely to do as well, or "".

    Args:
        history: all epochs of the run.
        summary: how it ended.
        val_gain: validation score minus the twin's, with its standard error; None without a twin.
        all_off: what the network would lose without all its seeds, with its standard error.
    """
    before, after = summary.parameters_before, summary.parameters_after
    if summary.stacks or not before < after or not before:
        # Deepening saves compute, a network in which nothing grew is static already, and a frozen
        # model is not to be replaced.
        return ""
    value, se = all_off if val_gain is None else val_gain
    if not value > 2 * se:
        gain, error = format_contribution(value, se).split(" ± ")
        unit = "" if is_loss(summary.val_score) else " points"
        reason = f"the validation gain over the twin is {gain}{unit}"
        if val_gain is None:
            change = f"rise by {gain[1:]}" if value < 0 else f"fall by only {gain[1:]}"
            reason = f"without its seeds the validation score would {change}{unit}"
        reason += f" (standard error {error})"
    elif (grown_by := _grown_by(history, summary)) <= _EARLY * summary.epochs:
        reason = (
            f"all seeds were in place by epoch {grown_by} of {summary.epochs}, and from then on a "
            "static network trains in the same way"
        )
    else:
        return ""
    return (
        f"A static network of the same size ({summary.parameters_after:,} parameters) is likely "
        f"to do as well: {reason}; in Python, grown.compare_static() trains one."
    )


def _grown_by(history: Sequence[EpochRecord], summary: RunSummary) -> int:
    """Return the first epoch after which no seed's amplitude changes."""
    kept = [one for one in history if one.epoch <= summary.kept_epoch] or list(history)
    last = {slot.name: slot.alpha for slot in kept[-1].slots}
    for one in reversed(kept):
        if {slot.name: slot.alpha for slot in one.slots} != last:
            return one.epoch + 1
    return kept[0].epoch
