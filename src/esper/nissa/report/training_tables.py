"""Tables of a training report: ops, blueprints, reward terms, heads, events, episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from esper.leyline.actions import HEAD_NAMES, LifecycleOp
from esper.leyline.reasons import round_number
from esper.nissa.report.markup import (
    counted,
    escaped,
    format_count,
    format_measure,
    format_number,
    format_share,
    op_words,
    visible,
)
from esper.nissa.report.page import NOTHING, Column, number_columns, render_table, word_columns
from esper.nissa.schema import DecisionRow, EventRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow, UpdateHeadRow, UpdateRow

Round = TypeVar("Round")

LATE_SHARE = 0.1
"""Share of the rounds that counts as the end of a run."""

_MOST_CHOICES = 4


def render_ops(rounds: Sequence[RoundRow]) -> str:
    """Return the table of ops: how often each was taken, and its mean reward."""
    late = late_rounds(rounds)
    everything, at_end = count_ops(rounds), count_ops(late)
    columns = (
        Column("Operation"),
        *number_columns("Count", "Share", "Mean reward", "Share at the end"),
        *number_columns("Mean reward at the end"),
    )
    total, total_late = (sum(count for count, _ in one.values()) for one in (everything, at_end))
    rows = []
    for op, (count, reward) in everything.items():
        late_count, late_reward = at_end.get(op, (0, None))
        whole = format_count(count), share_text(count, total), number_text(reward)
        late_part = share_text(late_count, total_late), number_text(late_reward)
        rows.append((op_words(op), *whole, *late_part))
    caption = "What was decided, in the whole run and in its last tenth"
    return render_table(caption, columns, rows, noun="operation")


def count_ops(rounds: Iterable[RoundRow]) -> dict[str, tuple[int, float | None]]:
    """Return how often every op was taken, and its mean raw reward, None where that is unknown."""
    counts: dict[str, int] = {}
    sums: dict[str, float] = {}
    paid: dict[str, int] = {}
    for row in rounds:
        if isinstance(row.op_counts, Mapping):
            for op, count in row.op_counts.items():
                counts[op] = counts.get(op, 0) + int(count or 0)
        if isinstance(row.reward_by_op, Mapping):
            for op, numbers in row.reward_by_op.items():
                if numbers.get("n") and numbers.get("mean") is not None:
                    sums[op] = sums.get(op, 0.0) + numbers["n"] * numbers["mean"]
                    paid[op] = paid.get(op, 0) + int(numbers["n"])
    order = [op.name for op in LifecycleOp]
    known = sorted(counts, key=lambda op: order.index(op) if op in order else len(order))
    return {op: (counts[op], sums[op] / paid[op] if paid.get(op) else None) for op in known}


def render_blueprints(fates: Mapping[str, Mapping[str, int]]) -> str:
    """Return the table of blueprints with the fates of their seeds."""
    numbers = number_columns("Germinated", "Fossilized", "Pruned", "Neither", "Kept")
    columns = (Column("Blueprint"), *numbers)
    rows = []
    for blueprint, counts in sorted(fates.items(), key=lambda item: -_begun(item[1])):
        begun, kept = _begun(counts), int(counts.get("fossilized") or 0)
        pruned = int(counts.get("pruned") or 0)
        counted = (begun, kept, pruned, max(0, begun - kept - pruned))
        rows.append((blueprint, *map(format_count, counted), share_text(kept, begun)))
    return render_table("Seeds by blueprint, in the whole run", columns, rows, noun="blueprint")


def render_terms(rounds: Sequence[RoundRow]) -> str:
    """Return the table of reward terms over the last tenth of the run."""
    late = late_rounds(rounds)
    sums: dict[str, list[tuple[float, float]]] = {}
    for row in late:
        if isinstance(row.reward_terms, Mapping):
            for term, numbers in row.reward_terms.items():
                mean, share = numbers.get("mean"), numbers.get("share")
                sums.setdefault(str(term), []).append((mean or 0.0, share or 0.0))
    numbers = number_columns("Mean per decision", "Share of the absolute reward")
    columns = (Column("Term"), *numbers)
    averaged = {
        term: [sum(one) / len(values) for one in zip(*values, strict=True)]
        for term, values in sums.items()
    }
    rows = [
        (term.replace("_", " "), number_text(mean), share_text(share))
        for term, (mean, share) in sorted(averaged.items(), key=lambda item: -item[1][1])
    ]
    return render_table("Terms of the reward, last tenth of the run", columns, rows, noun="term")


def render_heads(heads: Mapping[str, UpdateHeadRow], names: Mapping[str, Sequence[str]]) -> str:
    """Return the table of heads after the last update; `names` are the names of choices."""
    columns = (
        Column("Head"),
        *number_columns("Used"),
        Column("Chosen most", "words"),
        *number_columns("Free decisions", "Valid choices", "Entropy", "Where it chose", "Nats"),
        *number_columns("KL"),
        *number_columns("Greatest ratio", "Clipped", "Gradient norm"),
    )
    rows = [
        (
            head.replace("_", " "),
            share_text(last.usage),
            _describe_choices(last.choices, names.get(head, ())),
            NOTHING if last.free_steps is None else format_count(last.free_steps),
            *map(number_text, (last.valid_actions, last.entropy, last.entropy_conditional)),
            *map(number_text, (last.entropy_nats, last.approx_kl, last.ratio_max)),
            share_text(last.clipfrac),
            number_text(last.grad_norm),
        )
        for head, last in heads.items()
    ]
    return render_table("Heads after the last update", columns, rows, noun="head")


def render_critic_by_op(update: UpdateRow) -> str:
    """Return the table of the critic by op after the last update; empty if not measured."""
    advantages = _mapping(update.advantage_by_op)
    losses, values = _mapping(update.value_loss_by_op), _mapping(update.q_by_op)
    ops = [op.name for op in LifecycleOp if op.name in {*advantages, *losses, *values}]
    if not ops:
        return ""
    columns = (
        Column("Operation"),
        *number_columns("Decisions", "Mean Q", "Value loss", "Advantage", "Deviation", "Skewness"),
        *number_columns("Kurtosis", "Above 0"),
    )
    rows = []
    for op in ops:
        shape = _mapping(advantages.get(op))
        rows.append(
            (
                op_words(op),
                NOTHING if shape.get("n") is None else format_count(int(shape["n"])),
                number_text(values.get(op)),
                number_text(losses.get(op)),
                *(number_text(shape.get(name)) for name in ("mean", "std", "skew", "kurtosis")),
                share_text(shape.get("positive")),
            )
        )
    return render_table("The critic by op, last update", columns, rows, noun="operation")


def render_memory(update: UpdateRow) -> str:
    """Return the table of the LSTM state along the episode; empty if not measured."""
    steps = update.lstm_by_step
    if not isinstance(steps, Sequence) or not steps:
        return ""
    names = {
        "h_rms": "Hidden, root mean square",
        "h_max": "Hidden, greatest",
        "c_rms": "Cell, root mean square",
        "c_max": "Cell, greatest",
    }
    columns = number_columns("Step", *names.values())
    rows = [
        (one.get("step", NOTHING), *(number_text(one.get(name)) for name in names)) for one in steps
    ]
    return render_table("Memory along an episode, last update", columns, rows, noun="step")


def render_events(events: Sequence[EventRow]) -> str:
    """Return the table of events: resumes, changed settings, failed sinks."""
    columns = (Column("Round", "number"), Column("What"), Column("Details", "words"))
    rows = [
        (
            round_number(event.round),
            str(event.kind or "").replace("_", " "),
            event.message or NOTHING,
        )
        for event in events
    ]
    return render_table("What happened to the run", columns, rows, noun="event")


def late_rounds(rounds: Sequence[Round]) -> Sequence[Round]:
    """Return the last tenth of the rounds, at least one."""
    return rounds[-max(1, round(LATE_SHARE * len(rounds))) :]


def latest_fates(rounds: Sequence[RoundRow]) -> Mapping[str, Mapping[str, int]]:
    """Return the fates of the seeds of every blueprint so far."""
    for row in reversed(rounds):
        if isinstance(row.blueprint_fates, Mapping):
            return row.blueprint_fates
    return {}


def share_text(part: float | None, whole: float = 1.0) -> str:
    """Return a share in percent, or a dash."""
    return NOTHING if part is None or not whole else format_share(part, whole)


def number_text(value: float | None) -> str:
    """Return a number in few characters, or a dash."""
    return NOTHING if value is None else format_measure(float(value))


def _begun(counts: Mapping[str, int]) -> int:
    return int(counts.get("germinated") or 0)


def _describe_choices(choices: Any, names: Sequence[str]) -> str:
    if not isinstance(choices, Sequence):
        return NOTHING
    counts = {
        names[index] if index < len(names) else f"choice {index}": int(count or 0)
        for index, count in enumerate(choices)
    }
    total = sum(counts.values())
    if not total:
        return NOTHING
    most = sorted(counts.items(), key=lambda item: -item[1])[:_MOST_CHOICES]
    return ", ".join(
        f"{name.lower().replace('_', ' ')} {share_text(count, total)}"
        for name, count in most
        if count
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# ---- A few episodes, decision by decision


WAIT = "WAIT"

_MOST_TERMS = 3
_ARGUMENTS = tuple(head for head in HEAD_NAMES if head not in ("op", "slot"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEpisode:
    """One episode with its decisions, in order."""

    episode: EpisodeRow
    decisions: Sequence[DecisionRow]


def render_episodes(episodes: Sequence[ShownEpisode]) -> str:
    """Return the episodes, each folded under a line that describes it."""
    parts = []
    for number, shown in enumerate(episodes):
        opened = " open" if number == 0 else ""
        parts.append(
            f"<details{opened}>\n<summary>{escaped(describe_episode(shown), limit=600)}</summary>\n"
            f"{_render_decisions(shown.decisions)}</details>\n"
        )
    return "".join(parts)


def describe_episode(shown: ShownEpisode) -> str:
    """Return an episode in one line."""
    episode = shown.episode
    parts = [f"round {round_number(episode.round)}, row {episode.row}"]
    if episode.task is not None:
        parts.append(visible(episode.task, limit=60))
    if episode.env_seed is not None:
        parts.append(f"seed {episode.env_seed}")
    if episode.episodic_return is None:
        parts.append("not yet at its end")
    else:
        parts.append(f"return {number_text(episode.episodic_return)}")
    if episode.gain is not None:
        parts.append(
            f"validation gain {format_number(episode.gain, decimals=2, signed=True)} points"
        )
    parts += _describe_seeds(episode)
    acted = sum(row.op != WAIT for row in shown.decisions)
    parts.append(f"{acted} of {counted(len(shown.decisions), 'decision')} acted")
    if episode.rolled_back:
        why = "" if episode.rollback_reason is None else f" ({visible(episode.rollback_reason)})"
        parts.append(f"rolled back{why}")
    return ", ".join(parts)


def _describe_seeds(episode: EpisodeRow) -> Iterator[str]:
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
            rows.append(_describe_waits(group))
            continue
        rows.append(
            (
                first.step,
                f"{op_words(str(first.op))}{_likely(first.confidence_op)}",
                _describe_arguments(first),
                _describe_others(first),
                number_text(first.value),
                number_text(first.q_taken),
                number_text(first.reward),
                _describe_terms([first]),
                _describe_outcome(last),
            )
        )
    return render_table("Decisions of one episode", columns, rows, noun="line")


def _group_waits(decisions: Sequence[DecisionRow]) -> Iterator[list[DecisionRow]]:
    """Yield decisions one by one, and consecutive waits as one group."""
    for (is_wait, _), group in groupby(decisions, lambda one: (one.op == WAIT, one.forced)):
        if is_wait:
            yield list(group)
        else:
            yield from ([decision] for decision in group)


def _describe_waits(group: Sequence[DecisionRow]) -> tuple[object, ...]:
    first, last = group[0], group[-1]
    when = str(first.step) if len(group) == 1 else f"{first.step}–{last.step}"
    sure = [row.confidence_op for row in group if row.confidence_op is not None]
    text = "wait"
    if first.forced:
        text += ", the only legal op"
    elif sure:
        low, high = format_share(min(sure)), format_share(max(sure))
        text += f" ({low})" if low == high else f" ({low} to {high})"
    paid = [row.reward for row in group if row.reward is not None]
    values = [row.value for row in group if row.value is not None]
    return (
        when,
        text,
        NOTHING,
        _describe_others(first) if len(group) == 1 else NOTHING,
        number_text(sum(values) / len(values)) if values else NOTHING,
        NOTHING,
        number_text(sum(paid)) if paid else NOTHING,
        _describe_terms(group),
        f"{counted(len(group), 'decision')}, rewards added up" if len(group) > 1 else "done",
    )


def _describe_arguments(decision: DecisionRow) -> str:
    parts = []
    if decision.slot is not None:
        parts.append(f"{visible(decision.slot, limit=60)}{_chosen(decision, 'slot')}")
    for head in _ARGUMENTS:
        value = getattr(decision, head)
        if value is not None:
            shown = format_number(value, decimals=2) if isinstance(value, float) else value
            name = head.replace("_", " ")
            parts.append(f"{name} {visible(shown, limit=60).lower()}{_chosen(decision, head)}")
    return ", ".join(parts) or NOTHING


def _chosen(decision: DecisionRow, head: str) -> str:
    """Return the probability of a choice, or that it was the only one."""
    if getattr(decision, f"valid_{head}") == 1:
        return " (the only one)"
    return _likely(getattr(decision, f"confidence_{head}"))


def _likely(probability: float | None) -> str:
    return "" if probability is None else f" ({format_share(probability)})"


def _describe_others(decision: DecisionRow) -> str:
    """Return the recorded alternatives with their probabilities."""
    found = decision.alternatives
    if not isinstance(found, Mapping):
        return NOTHING
    parts = []
    for head in ("op", "slot", "blueprint"):
        others = _pairs(found.get(head))
        if others:
            names = ", ".join(
                f"{visible(name, limit=40).lower().replace('_', ' ')}{_likely(likely)}"
                for name, likely in others
            )
            parts.append(names if head == "op" else f"{head}: {names}")
    return "; ".join(parts) or NOTHING


def _pairs(others: Any) -> list[tuple[Any, float | None]]:
    """Return alternatives as (name, probability)."""
    if isinstance(others, Sequence) and not isinstance(others, str):
        return [(one[0], one[1]) for one in others if isinstance(one, Sequence) and len(one) == 2]
    return []


def _describe_terms(group: Sequence[DecisionRow]) -> str:
    """Return the largest terms of the reward."""
    sums: dict[str, float] = {}
    for row in group:
        if isinstance(row.reward_terms, Mapping):
            for term, value in row.reward_terms.items():
                sums[str(term)] = sums.get(str(term), 0.0) + (value or 0.0)
    most = sorted(sums.items(), key=lambda item: -abs(item[1]))[:_MOST_TERMS]
    parts = [
        f"{visible(term, limit=40).replace('_', ' ')} {number_text(value)}"
        for term, value in most
        if value
    ]
    return ", ".join(parts) or NOTHING


def _describe_outcome(decision: DecisionRow) -> str:
    text = visible(decision.outcome or NOTHING).replace("_", " ")
    return f"{text}: {visible(decision.reason)}" if decision.reason else text
