"""The page of a training run, from beginning to end."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from esper.nissa.monitors.monitor import BANDS, light
from esper.nissa.schema import RoundRow, UpdateRow
from esper.report.markup import (
    counted,
    escaped,
    format_count,
    format_measure,
    format_number,
    format_share,
    shortened,
)
from esper.report.origin import About, AlarmGroup, found_sections, origin_sections, recorded_section
from esper.report.style import CHART_STYLE, PAGE_STYLE, render_page, render_tiles, section
from esper.report.training.charts import (
    behaviour_charts,
    gain_charts,
    head_charts,
    learner_charts,
    render_charts,
    reward_by_op_chart,
    reward_chart,
    value_charts,
)
from esper.report.training.episodes import render_episodes
from esper.report.training.record import TrainingRecord
from esper.report.training.tables import (
    late_rounds,
    latest_fates,
    render_blueprints,
    render_critic_by_op,
    render_events,
    render_heads,
    render_memory,
    render_ops,
    render_terms,
)

_NAME_LENGTH = 60


def training_heading(about: About) -> str:
    """Return the title of the page."""
    on = "" if about.task is None else f" on {shortened(about.task, _NAME_LENGTH)}"
    return f"A controller trained{on}"


def render_training_lead(record: TrainingRecord, about: About) -> str:
    """Return the story of a training run in a few sentences, with how far it is."""
    if not record.rounds:
        return (
            '<p class="lead">No round was finished, so there is nothing to show yet. What the run '
            "was asked to do stands below.</p>\n"
        )
    sentences = [_tell_rounds(record.rounds), _tell_gain(record.rounds), _tell_seeds(record.rounds)]
    lead = " ".join(sentence for sentence in sentences if sentence)
    done = f"Written after round {format_count(len(record.rounds))}"
    if about.planned is not None:
        done += f" of {format_count(about.planned)}"
    state = {"running": "; the run goes on", "interrupted": "; the run stopped there"}
    return (
        f'<p class="lead">{escaped(lead, limit=2000)}</p>\n'
        f'<p class="note">{escaped(done)}{state.get(about.state or "", "")}. Episodes were played '
        "while exploring and scored on the validation split; a gain is the final score minus that "
        "of a network with the same start and the same data that only waited.</p>\n"
    )


def render_training_tiles(record: TrainingRecord) -> str:
    """Return the numbers to remember: means over the last tenth of the run."""
    if not record.rounds:
        return ""
    late = late_rounds(record.rounds)
    updates = record.updates[-len(late) :]
    note = _last(late)
    tiles: list[tuple[str, str, str]] = []

    def add(name: str, value: float | None, text: str, more: str = note) -> None:
        if value is not None:
            tiles.append((name, text, more))

    gain = mean_of(late, "gain_mean")
    add("Gain over the twin", gain, f"{format_number(gain, decimals=2, signed=True)} points")
    greedy = [row.eval_gain for row in record.rounds if row.eval_gain is not None]
    if greedy:
        told = f"{format_number(greedy[-1], decimals=2, signed=True)} points"
        add("Gain, greedy", greedy[-1], told, "last evaluation")
    add("Return", mean_of(late, "return_mean"), format_measure(mean_of(late, "return_mean")))
    kept = mean_of(late, "fossilization_rate")
    add("Early seeds fossilized", kept, format_share(kept))
    waits = mean_of(late, "wait_share_free")
    add("WAIT on free decisions", waits, format_share(waits))
    explained = mean_of(updates, "explained_variance")
    add(
        "Explained variance",
        explained,
        format_measure(explained),
        f"{note}, {_tell_light('explained_variance', explained)}",
    )
    kl = [row.approx_kl for row in updates if row.approx_kl is not None]
    if kl:
        middle = statistics.median(kl)
        add("KL of an update", middle, format_measure(middle), f"{note}, median")
    return render_tiles(tiles)


def mean_of(rows: Sequence[RoundRow] | Sequence[UpdateRow], column: str) -> float | None:
    """Return the mean of a column where it was measured."""
    values = [value for row in rows if (value := getattr(row, column)) is not None]
    return statistics.fmean(values) if values else None


def _last(rounds: Sequence[RoundRow]) -> str:
    return "last round" if len(rounds) == 1 else f"last {counted(len(rounds), 'round')}"


def _tell_rounds(rounds: Sequence[RoundRow]) -> str:
    episodes = sum(row.episodes or 0 for row in rounds)
    steps = next((row.env_steps for row in reversed(rounds) if row.env_steps is not None), None)
    parts = [counted(episodes, "episode")] if episodes else []
    if steps is not None:
        parts.append(counted(steps, "decision"))
    told = f" ({', '.join(parts)})" if parts else ""
    first, last = rounds[0].return_mean, mean_of(late_rounds(rounds), "return_mean")
    begin = f"In {counted(len(rounds), 'round')}{told}"
    if first is None or last is None:
        return f"{begin} nothing was paid."
    return (
        f"{begin} the mean return went from {format_measure(first)} in the first round to "
        f"{format_measure(last)} in the {_last(late_rounds(rounds))}."
    )


def _tell_gain(rounds: Sequence[RoundRow]) -> str:
    gain = mean_of(late_rounds(rounds), "gain_mean")
    if gain is None:
        return ""
    size = format_number(abs(gain), decimals=2)
    if gain == 0:
        return "A network it grew ended level with its waiting twin."
    side = "above" if gain > 0 else "below"
    return f"A network it grew ended {size} points {side} its waiting twin on average."


def _tell_seeds(rounds: Sequence[RoundRow]) -> str:
    late = late_rounds(rounds)
    episodes = sum(row.episodes or 0 for row in late)
    germinated = sum(row.seeds_germinated or 0 for row in late)
    if not episodes:
        return ""
    kept = mean_of(late, "fossilization_rate")
    told = f"It germinated {format_measure(germinated / episodes)} seeds an episode"
    more = "" if kept is None else f" and kept {format_share(kept)} of the early ones"
    return f"{told}{more}."


def _tell_light(metric: str, value: float | None) -> str:
    words = {"good": "good", "watch": "to be watched", "bad": "bad"}
    assert metric in BANDS
    return words.get(light(metric, value), "unknown")


_CURVES = "Over the rounds, from 0. The bands hold 50 and 90 % of a round's episodes."
_HEADS = (
    "Entropies are shares of the greatest there can be, of the policy without its floor; the solid "
    "line counts only decisions in which the head had a choice and mattered. A head that is rarely "
    "used has its whole say there. Ratios and KL are measured after the update."
)
_EPISODES = (
    "Every decision of a few episodes of the latest recorded round, the best first: in brackets "
    "how likely a choice was when it was drawn, then what the critic expected and what was paid. "
    "Waits in a row are one line."
)


def render_training(
    record: TrainingRecord,
    about: About,
    *,
    config: Mapping[str, Any],
    command: str,
    versions: Mapping[str, str],
    alarms: Sequence[AlarmGroup] = (),
) -> str:
    """Return the report of a training run as one self-contained HTML page."""
    top = render_training_lead(record, about) + render_training_tiles(record)
    return render_page(
        training_heading(about),
        top,
        *_learning_sections(record),
        *found_sections(alarms, about),
        *_inner_sections(record),
        *origin_sections(None, config, command, versions, about),
        *recorded_section(about),
        style=f"{PAGE_STYLE}\n{CHART_STYLE}",
    )


def _learning_sections(record: TrainingRecord) -> Iterator[str]:
    if not record.rounds:
        return
    yield section("Learning", render_charts(gain_charts(record), "wide") + _note(_CURVES))
    yield section("Behaviour", render_charts(behaviour_charts(record)))
    yield section("Operations", render_ops(record.rounds))
    fates = latest_fates(record)
    if fates:
        yield section("Blueprints", render_blueprints(fates))


def _inner_sections(record: TrainingRecord) -> Iterator[str]:
    if any(row.reward_terms for row in record.rounds):
        body = render_charts(
            [reward_chart(record), reward_by_op_chart(record)], "wide"
        ) + render_terms(record.rounds)
        yield section("Reward", body)
    if record.updates:
        last = record.updates[-1]
        body = render_charts(value_charts(record)) + render_critic_by_op(last)
        yield section("Values", body)
        yield section("Updates", render_charts(learner_charts(record)) + render_memory(last))
    if record.heads:
        parts = [_note(_HEADS), render_heads(record.heads, record.choice_names)]
        for head in record.heads:
            parts.append(f"<h3>{escaped(head.replace('_', ' '))}</h3>\n")
            parts.append(render_charts(head_charts(record, head), "heads"))
        yield section("Heads", "".join(parts))
    if record.episodes:
        yield section("Decisions", _note(_EPISODES) + render_episodes(record.episodes))
    if record.events:
        yield section("Events", render_events(record.events))


def _note(text: str) -> str:
    return f'<p class="note">{escaped(text, limit=1000)}</p>\n'
