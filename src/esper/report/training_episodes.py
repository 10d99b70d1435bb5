"""A few episodes of a training run, told decision by decision.

With each stands how sure the policy was, and what came of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.records import told_round
from esper.nissa.schema import DecisionRow, EpisodeRow
from esper.report.markup import counted, escaped, format_number, format_share, op_words, visible
from esper.report.page import NOTHING, number_columns, render_table, word_columns
from esper.report.training_tables import number_text

WAIT = "WAIT"

_MOST_TERMS = 3
_ARGUMENTS = tuple(head for head in HEAD_NAMES if head not in ("op", "slot"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEpisode:
    """One episode with its decisions, in order."""

    episode: EpisodeRow
    decisions: Sequence[DecisionRow]


def render_episodes(episodes: Sequence[ShownEpisode]) -> str:
    """Return the episodes, each folded up under a line that tells how it went."""
    parts = []
    for number, shown in enumerate(episodes):
        opened = " open" if number == 0 else ""
        parts.append(
            f"<details{opened}>\n<summary>{escaped(tell_episode(shown), limit=600)}</summary>\n"
            f"{_render_decisions(shown.decisions)}</details>\n"
        )
    return "".join(parts)


def tell_episode(shown: ShownEpisode) -> str:
    """Return an episode in one line."""
    episode = shown.episode
    parts = [f"round {told_round(episode.round)}, row {episode.row}"]
    if episode.task is not None:
        parts.append(visible(episode.task, limit=60))
    if episode.env_seed is not None:
        parts.append(f"seed {episode.env_seed}")
    if episode.episodic_return is None:
        parts.append("not yet at its end")
    else:
        parts.append(f"return {number_text(episode.episodic_return)}")
    if episode.gain is not None:
        parts.append(f"gain {format_number(episode.gain, decimals=2, signed=True)} points")
    parts += _tell_seeds(episode)
    acted = sum(row.op != WAIT for row in shown.decisions)
    parts.append(f"{acted} of {counted(len(shown.decisions), 'decision')} acted")
    if episode.rolled_back:
        why = "" if episode.rollback_reason is None else f" ({visible(episode.rollback_reason)})"
        parts.append(f"rolled back{why}")
    return ", ".join(parts)


def _tell_seeds(episode: EpisodeRow) -> Iterator[str]:
    if episode.seeds_germinated == 0:
        yield "no seeds"
    elif episode.seeds_germinated is not None:
        kept = episode.seeds_fossilized or 0
        yield f"{kept} of {counted(episode.seeds_germinated, 'seed')} kept"


def _render_decisions(decisions: Sequence[DecisionRow]) -> str:
    columns = (
        *number_columns("Epoch"),
        *word_columns("Operation (how likely)", "Slot and arguments (how likely each)"),
        *word_columns("Likeliest others"),
        *number_columns("Value", "Q", "Reward"),
        *word_columns("Mostly", "Outcome"),
    )
    rows = []
    for group in _group_waits(decisions):
        first, last = group[0], group[-1]
        if first.op == WAIT:
            rows.append(_tell_waits(group))
            continue
        rows.append(
            (
                first.step,
                f"{op_words(str(first.op))}{_likely(first.confidence_op)}",
                _tell_arguments(first),
                _tell_others(first),
                number_text(first.value),
                number_text(first.q_taken),
                number_text(first.reward),
                _tell_terms([first]),
                _tell_outcome(last),
            )
        )
    return render_table("Decisions of one episode", columns, rows, noun="line")


def _group_waits(decisions: Sequence[DecisionRow]) -> Iterator[list[DecisionRow]]:
    """Yield decisions one by one, but waits that follow one another together."""
    for (is_wait, _), group in groupby(decisions, lambda one: (one.op == WAIT, one.forced)):
        if is_wait:
            yield list(group)
        else:
            yield from ([decision] for decision in group)


def _tell_waits(group: Sequence[DecisionRow]) -> tuple[object, ...]:
    first, last = group[0], group[-1]
    when = str(first.step) if len(group) == 1 else f"{first.step}–{last.step}"
    sure = [row.confidence_op for row in group if row.confidence_op is not None]
    told = "wait"
    if first.forced:
        told += ", the only legal op"
    elif sure:
        low, high = format_share(min(sure)), format_share(max(sure))
        told += f" ({low})" if low == high else f" ({low} to {high})"
    paid = [row.reward for row in group if row.reward is not None]
    values = [row.value for row in group if row.value is not None]
    return (
        when,
        told,
        NOTHING,
        _tell_others(first) if len(group) == 1 else NOTHING,
        number_text(sum(values) / len(values)) if values else NOTHING,
        NOTHING,
        number_text(sum(paid)) if paid else NOTHING,
        _tell_terms(group),
        f"{counted(len(group), 'decision')}, rewards added up" if len(group) > 1 else "done",
    )


def _tell_arguments(decision: DecisionRow) -> str:
    told = []
    if decision.slot is not None:
        told.append(f"{visible(decision.slot, limit=60)}{_chosen(decision, 'slot')}")
    for head in _ARGUMENTS:
        value = getattr(decision, head)
        if value is not None:
            shown = format_number(value, decimals=2) if isinstance(value, float) else value
            name = head.replace("_", " ")
            told.append(f"{name} {visible(shown, limit=60).lower()}{_chosen(decision, head)}")
    return ", ".join(told) or NOTHING


def _chosen(decision: DecisionRow, head: str) -> str:
    """Return how likely a choice was; one that was the only one says so."""
    if getattr(decision, f"valid_{head}") == 1:
        return " (the only one)"
    return _likely(getattr(decision, f"confidence_{head}"))


def _likely(probability: float | None) -> str:
    return "" if probability is None else f" ({format_share(probability)})"


def _tell_others(decision: DecisionRow) -> str:
    """Return what else was likely, as far as it was recorded: for the op, and for a blueprint."""
    found = decision.alternatives
    if not isinstance(found, Mapping):
        return NOTHING
    told = []
    for head in ("op", "slot", "blueprint"):
        others = _pairs(found.get(head))
        if others:
            names = ", ".join(
                f"{visible(name, limit=40).lower().replace('_', ' ')}{_likely(likely)}"
                for name, likely in others
            )
            told.append(names if head == "op" else f"{head}: {names}")
    return "; ".join(told) or NOTHING


def _pairs(others: Any) -> list[tuple[Any, float | None]]:
    """Return alternatives as (name, probability)."""
    if isinstance(others, Sequence) and not isinstance(others, str):
        return [(one[0], one[1]) for one in others if isinstance(one, Sequence) and len(one) == 2]
    return []


def _tell_terms(group: Sequence[DecisionRow]) -> str:
    """Return the terms that made up most of the reward."""
    sums: dict[str, float] = {}
    for row in group:
        if isinstance(row.reward_terms, Mapping):
            for term, value in row.reward_terms.items():
                sums[str(term)] = sums.get(str(term), 0.0) + (value or 0.0)
    most = sorted(sums.items(), key=lambda item: -abs(item[1]))[:_MOST_TERMS]
    told = [
        f"{visible(term, limit=40).replace('_', ' ')} {number_text(value)}"
        for term, value in most
        if value
    ]
    return ", ".join(told) or NOTHING


def _tell_outcome(decision: DecisionRow) -> str:
    told = visible(decision.outcome or NOTHING).replace("_", " ")
    return f"{told}: {visible(decision.reason)}" if decision.reason else told
