"""A run in words: why a controller waits or prunes, what went wrong, records and figures.

A decision's reason begins with one of these, so that a run's reasons can be counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

from esper.leyline.records import (
    DEEPEN,
    DecisionRecord,
    EpochRecord,
    RunSummary,
    SeedRecord,
    SlotRecord,
    StackRecord,
    kept_record,
    seeds_at_end,
    stacks_at_end,
)
from esper.leyline.stages import SeedStage


class Why(StrEnum):
    """Why nothing was germinated, or why a seed was pruned."""

    NOT_SETTLED = "the network had not settled yet"
    NO_PLATEAU = "its score was still improving"
    EARLY = "it was too early in the run"
    RESTING = "a seed had just been pruned"
    TOO_LATE = "too few epochs were left for a seed"
    FULL = "no slot could take a seed"
    DEVELOPING = "a seed was developing"
    LEARNED = "it expected nothing from a seed"
    STRANGE = "the run is much shorter than those it has learned in"
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
    Why.LEARNED: "train for more epochs, or let rules decide (controller='heuristic')",
    Why.STRANGE: "train for more epochs, or let rules decide (controller='heuristic')",
    Why.DEVELOPING: "train for more epochs: the last seed had not been blended in",
}

_PRUNED = (
    "name other slots (esper.suggest_slots), or let another controller decide, unless the network "
    "has all it needs"
)
_FEW_EPOCHS = 10
"""Epochs before which nobody says that a network does not learn."""
_LEARNED = 0.98
"""Share of the loss of guessing below which a network has learned something."""
_FALLEN = 0.001
"""Share of its first value by which a loss falls where a network learns anything at all."""
_MARGIN = 0.1
"""Share of the way from guessing to knowing all that luck may go."""
_BARELY = 0.9
"""Share of its amplitude from which a seed counts as blended in."""


@runtime_checkable
class Explaining(Protocol):
    """A controller that says why it decided as it did."""

    def reasons(self) -> Sequence[str]:
        """Return a reason for every row's last decision, empty where there is none to tell."""


def is_grown(seeds: Sequence[SeedRecord]) -> bool:
    """Return whether any seed is part of the network at the end."""
    return any(seed.fate not in ("pruned", "dropped") for seed in seeds)


def why_not_learned(history: Sequence[EpochRecord], chance_loss: float | None) -> str:
    """Return that a network never became better than guessing, in a sentence; empty where it did.

    Where nobody knows what guessing costs, a loss that never fell is told instead.

    Args:
        history: all epochs of a run.
        chance_loss: loss of a network that only guesses; None where nobody knows.
    """
    losses = [record.val_loss for record in history if math.isfinite(record.val_loss)]
    if len(losses) < _FEW_EPOCHS:
        return ""
    if not chance_loss:
        if min(losses) < losses[0] - _FALLEN * abs(losses[0]):
            return ""
        return (
            f"The validation loss did not fall: it was {losses[0]:.4g} after the first epoch and "
            f"{min(losses):.4g} at best in {len(losses)}; check the data, the loss and the "
            "learning rate before anything grows."
        )
    scores = [record.val_score for record in history]
    guessed = math.exp(-chance_loss)
    # A network may be sure of wrong answers, and still have learned to give more right ones.
    is_score_of_chance = all(
        is_loss(score) or score <= 100.0 * (guessed + _MARGIN * (1.0 - guessed)) for score in scores
    )
    if min(losses) < _LEARNED * chance_loss or not (is_score_of_chance or len(set(scores)) == 1):
        return ""
    return (
        f"The network did not learn: its best validation loss in {len(losses)} epochs was "
        f"{min(losses):.4g}, and guessing gives {chance_loss:.4g}; check the data, the loss and "
        "the learning rate before anything grows."
    )


def why_not_grown(
    history: Sequence[EpochRecord],
    kept_epoch: int | None = None,
    stopped: str = "",
    chance_loss: float | None = None,
) -> tuple[str, ...]:
    """Return, for a run at its end, why its network has not learned or grown, or not to the end.

    Where something grew and nothing is left on its way there is nothing to tell.

    Args:
        history: all epochs of the run.
        kept_epoch: the epoch whose network is kept; the last by default.
        stopped: why the run ended before its last epoch; empty where it did not.
        chance_loss: loss of a network that only guesses; None where nobody knows.
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
    first = [why_not_learned(history, chance_loss)]
    first += [
        f"{_named(seed)} made no difference (a contribution of 0 ± 0 points), and was dropped."
        for seed in idle
    ]
    told = tuple(line for line in first if line)
    return (*told, *_why_not_grown(history, seeds, idle, kept_epoch, stopped))


def _why_not_deep(history: Sequence[EpochRecord], kept_epoch: int | None, stopped: str) -> str:
    """Return why the network that is kept has fewer blocks than were to wake; empty otherwise."""
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
    early = _tell_stopped(history[-1], stopped) if stopped else ()
    if is_grown(seeds):
        return (*early, *_tell_unfinished(history, kept_epoch))
    later = [seed for seed in seeds_at_end(history) if seed.fate not in ("pruned", "dropped")]
    if later:
        return (*early, _tell_not_kept(history, kept_epoch, later))
    lines = [*early, _tell_waiting(history)]
    pruned = [seed for seed in seeds if seed.fate == "pruned"]
    for seed in pruned:
        reason = _reason_of_prune(seed, history)
        lines.append(f"{_named(seed)} was pruned at epoch {seed.ended}{reason}.")
    dropped = [seed for seed in seeds if seed.fate == "dropped" and seed not in idle]
    for seed in dropped:
        lines.append(
            f"{_named(seed)}, germinated at epoch {seed.germinated}, was not yet blended in "
            f"when the run ended, and was dropped{_refusals(seed, history)}."
        )
    advice = _advice(history)
    if dropped:
        advice = ADVICE[Why.DEVELOPING]
    elif pruned or idle:
        advice = _PRUNED
    return (*lines, f"To change that: {advice}.") if advice else tuple(lines)


def _tell_unfinished(
    history: Sequence[EpochRecord], kept_epoch: int | None = None
) -> tuple[str, ...]:
    """Return which seeds are on their way into the network in the epoch that is kept."""
    kept = kept_record(history, kept_epoch)
    is_last = kept.epoch == history[-1].epoch
    when = "when the run ended" if is_last else f"at epoch {kept.epoch}, whose network is kept"
    lines = [
        f"A {slot.blueprint} at {slot.name} was still being blended in {when}, at "
        f"{slot.alpha / slot.alpha_target:.0%} of its amplitude."
        for slot in kept.slots
        if slot.stage == SeedStage.BLENDING.name and _is_on_its_way(slot)
    ]
    advice = "train for more epochs" if is_last else "train for more epochs, or keep='last'"
    return (*lines, f"To change that: {advice}.") if lines else ()


def _tell_not_kept(
    history: Sequence[EpochRecord], kept_epoch: int | None, later: Sequence[SeedRecord]
) -> str:
    """Return that what grew is not part of the network that is kept."""
    names = ", ".join(f"a {seed.blueprint} at {seed.slot}" for seed in later)
    return (
        f"Nothing that grew was kept: the best validation score is that of epoch {kept_epoch}, "
        f"before {names} had any effect; keep='last' returns the network of epoch "
        f"{history[-1].epoch}."
    )


def _tell_stopped(last: EpochRecord, stopped: str) -> tuple[str, ...]:
    """Return which seeds a run that stopped early has left half-way."""
    ways = {
        SeedStage.GERMINATED.name: "had not begun to learn",
        SeedStage.TRAINING.name: "was still learning",
        SeedStage.BLENDING.name: "was still being blended in",
    }
    return tuple(
        f"The run stopped after epoch {last.epoch} ({stopped}), when a {slot.blueprint} at "
        f"{slot.name} {ways[slot.stage]}."
        for slot in last.slots
        if slot.stage in ways and (slot.alpha_target <= 0 or _is_on_its_way(slot))
    )


def _is_on_its_way(slot: SlotRecord) -> bool:
    """Return whether a seed is short of the amplitude that it is blended in to."""
    return slot.alpha < _BARELY * slot.alpha_target


def _tell_waiting(history: Sequence[EpochRecord]) -> str:
    decisions = [record.decision for record in history if record.decision is not None]
    reasons_given = [one.reason for one in decisions if one.op == "WAIT" and one.reason]
    # Figures differ from one decision to the next: those of the last are told.
    counts = Counter(reason.partition(" (")[0] for reason in reasons_given)
    last = {reason.partition(" (")[0]: reason for reason in reasons_given}
    waited = sum(decision.op == "WAIT" for decision in decisions)
    told = f"Nothing grew: the controller waited in {waited} of {len(decisions)} decisions"
    reasons = [
        f"{count} because {last[why].replace(' (', ' (at last: ' if count > 1 else ' (')}"
        for why, count in counts.most_common()
    ]
    return f"{told}: {', '.join(reasons)}." if reasons else f"{told}."


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
    """Return how often a gate held a seed back, and what it wanted at last."""
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
    return f"; it was held back {len(refused)} times, at last because {wanted}"


def _advice(history: Sequence[EpochRecord]) -> str | None:
    counts: Counter[Why] = Counter()
    for record in history:
        decision = record.decision
        if decision is None or decision.op != "WAIT":
            continue
        for why in ADVICE:
            if decision.reason.startswith(why):
                counts[why] += 1
    return ADVICE[counts.most_common(1)[0][0]] if counts else None


def _named(seed: SeedRecord) -> str:
    return f"A {seed.blueprint} at {seed.slot}"


# ---- Records and figures in words


_STILL = 0.0005
"""Change of the loss in an epoch, as a share of it, that counts as none."""


def describe_progress(losses: Sequence[float], epoch: int, horizon: int) -> str:
    """Return how the validation loss moves and how long the run still is, in a few words.

    Args:
        losses: of the last epochs, newest last; NaN where not yet there.
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
    """Return an epoch's metrics in one line; where the score is the loss, that is said once."""
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
    """Return how many blocks are awake, stack by stack where that differs, in a few words."""
    told = dict.fromkeys(f"{stack.awake} of {stack.blocks}" for stack in stacks)
    if len(told) > 1:
        told = dict.fromkeys(f"{one.name} {one.awake} of {one.blocks}" for one in stacks)
    return f"{', '.join(told)} blocks"


def decision_line(epoch: int, decision: DecisionRecord) -> str:
    """Return a decision in one line."""
    words = [f"epoch {epoch}: {decision.op}"]
    words += [word for word in (decision.slot, decision.blueprint) if word]
    if decision.op == DEEPEN or decision.outcome != "done":
        words.append(f"({decision.reason or decision.outcome})")
    return " ".join(words)


def round_number(index: int) -> int:
    """Return a round as people count it, from 1, like epochs; a store has its index, from 0."""
    return index + 1


def is_loss(score: float) -> bool:
    """Return whether a score is a loss with its sign turned, and not an accuracy in points."""
    return score < 0


def format_score(score: float) -> str:
    """Return a score as people say it: in points, or as the loss it is the negative of."""
    return f"loss {-score:.4g}" if is_loss(score) else f"{score:.2f}"


def format_contribution(value: float, se: float | None = None) -> str:
    """Return a contribution with its standard error; losses may be far smaller than points."""

    def figures(number: float, sign: str = "") -> str:
        return f"{number:{sign}.2f}" if abs(number) >= 0.01 or not number else f"{number:{sign}.2g}"

    return figures(value, "+") + ("" if se is None else f" ± {figures(se)}")


def format_gain(score: float, twin: float) -> str:
    """Return how far a score is above the twin's, in points, or as a change of the loss."""
    if is_loss(score) or is_loss(twin):
        return f"loss {twin - score:+.4g}"
    return f"{score - twin:+.2f}"


def describe_kept(summary: RunSummary) -> str:
    """Return in words which epoch's network is the result."""
    kept, done = summary.kept_epoch, summary.epochs
    which = "the last" if kept == done else f"the best validated of {done}"
    told = f"epoch {kept} kept, {which}"
    return f"{told}; stopped early: {summary.stopped}" if summary.stopped else told
