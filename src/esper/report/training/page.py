"""The page of a training run, from beginning to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from esper.report.alarms import AlarmGroup
from esper.report.origin import About, found_sections, origin_sections, recorded_section
from esper.report.shell import render_page, section
from esper.report.style import CHART_STYLE, PAGE_STYLE
from esper.report.text import escaped
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
from esper.report.training.headline import (
    render_training_lead,
    render_training_tiles,
    training_heading,
)
from esper.report.training.record import TrainingRecord
from esper.report.training.tables import (
    latest_fates,
    render_blueprints,
    render_critic_by_op,
    render_events,
    render_heads,
    render_memory,
    render_ops,
    render_terms,
)

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
