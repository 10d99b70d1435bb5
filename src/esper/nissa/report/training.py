"""The report of a training run, made from its store."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from esper.leyline.actions import HEAD_NAMES, HEAD_VALUES, choice_text
from esper.nissa.database import ANSWER_S
from esper.nissa.monitors.monitor import BANDS, light
from esper.nissa.reader import StoredRun
from esper.nissa.report.chart import draw_panels
from esper.nissa.report.markup import (
    counted,
    format_measure,
    format_number,
    format_share,
    shortened,
)
from esper.nissa.report.page import (
    NOTHING_YET,
    About,
    AlarmGroup,
    found_sections,
    origin_sections,
    paragraph,
    recorded_section,
    render_page,
    render_tiles,
    section,
    so_far,
)
from esper.nissa.report.panels import (
    CRITIC,
    GROWTH,
    LEARNING,
    POLICY,
    REWARD,
    SPEED,
    Points,
    panels_for,
    read_series,
)
from esper.nissa.report.training_tables import (
    ShownEpisode,
    late_rounds,
    latest_fates,
    render_blueprints,
    render_critic_by_op,
    render_episodes,
    render_events,
    render_heads,
    render_memory,
    render_ops,
    render_terms,
)
from esper.nissa.schema import DecisionRow, EventKind, EventRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow, UpdateHeadRow, UpdateRow

SHOWN_EPISODES = 3
SHOWN_EVENTS = (
    EventKind.SETTINGS_CHANGED,
    EventKind.VERSIONS_CHANGED,
    EventKind.CHECKPOINT_LOADED,
    EventKind.STORE_RESTARTED,
    EventKind.GOVERNOR_ROLLBACK,
)
_HEAD_COLUMNS = (
    *("round", "ordinal", "head", "usage", "free_steps", "valid_actions", "entropy"),
    *("entropy_conditional", "entropy_nats", "ratio_max", "approx_kl", "clipfrac", "grad_norm"),
    "choices",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """Rounds, updates and a few episodes of one training run."""

    rounds: Sequence[RoundRow] = ()
    updates: Sequence[UpdateRow] = ()
    """The last optimisation epoch of every update."""
    heads: Mapping[str, UpdateHeadRow] = field(default_factory=dict)
    """Per head, the op first, its state after the last update."""
    points: Mapping[str, Points] = field(default_factory=dict)
    """Points of its charts, by table."""
    episodes: Sequence[ShownEpisode] = ()
    """The best, the middle and the worst of those recorded in the latest round."""
    events: Sequence[EventRow] = ()
    """Resumes, changed settings and the like."""
    choice_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Per head, the names of its choices in order; heads may be missing."""


def read_training(run: StoredRun) -> TrainingRecord:
    """Read a training run from its store."""
    rounds = [row for row in run.records("rounds") if isinstance(row, RoundRow)]
    updates = [UpdateRow(**row) for row in run.rows("updates", where="is_last = 1")]
    heads = {
        str(row["head"]): UpdateHeadRow(**row)
        for row in run.rows(
            "update_heads",
            columns=_HEAD_COLUMNS,
            where="(round, ordinal) IN (SELECT round, ordinal FROM updates WHERE is_last = 1 "
            "ORDER BY id DESC LIMIT 1)",
        )
    }
    # The op comes first, because it is chosen first.
    order = {head: 1 + index for index, head in enumerate(HEAD_NAMES)} | {"op": 0}
    kinds = ", ".join("?" for _ in SHOWN_EVENTS)
    events = run.rows("events", where=f"kind IN ({kinds})", parameters=[*SHOWN_EVENTS])
    return TrainingRecord(
        rounds=rounds,
        updates=updates,
        heads={head: heads[head] for head in sorted(heads, key=lambda one: order.get(one, 99))},
        points=read_series(run, "train"),
        episodes=_read_episodes(run),
        events=[EventRow(**row) for row in events],
        choice_names=_choice_names(run),
    )


def _choice_names(run: StoredRun) -> dict[str, list[str]]:
    """Return the names of the choices of every head in this run."""
    names = {
        head: [choice_text(head, value) for value in values] for head, values in HEAD_VALUES.items()
    }
    slots = run.info.slots
    if isinstance(slots, Sequence):
        names["slot"] = [str(slot) for slot in slots]
    started = run.rows(
        "events", columns=["data"], where="kind = ?", parameters=[EventKind.TRAINING_STARTED]
    )
    data = started[-1]["data"] if started else None
    blueprints = data.get("blueprints") if isinstance(data, Mapping) else None
    if isinstance(blueprints, Sequence):
        names["blueprint"] = [str(blueprint) for blueprint in blueprints]
    return names


def _read_episodes(run: StoredRun) -> list[ShownEpisode]:
    """Return the best, the middle and the worst episode of the latest recorded round."""
    latest = run.query("SELECT MAX(round) FROM decisions", timeout_s=ANSWER_S).rows[0][0]
    if latest is None:
        return []
    recorded = run.query(
        "SELECT DISTINCT row FROM decisions WHERE round = ? ORDER BY row",
        [latest],
        timeout_s=ANSWER_S,
    ).rows
    rows = {row for (row,) in recorded}
    found = [
        EpisodeRow(**row)
        for row in run.rows("episodes", where="round = ?", parameters=[latest])
        if row["row"] in rows
    ]
    # An unfinished episode has decisions, but no row of its own.
    found += [
        EpisodeRow(round=latest, row=row) for row in sorted(rows - {one.row for one in found})
    ]
    found.sort(key=lambda one: -(one.episodic_return or 0.0))
    if len(found) > SHOWN_EPISODES:
        found = [found[0], found[len(found) // 2], found[-1]]
    return [
        ShownEpisode(
            episode=one,
            decisions=[
                DecisionRow(**row)
                for row in run.rows(
                    "decisions", where="round = ? AND row = ?", parameters=[latest, one.row]
                )
            ],
        )
        for one in found
    ]


_NAME_LENGTH = 60


def training_heading(about: About) -> str:
    """Return the title of the page."""
    on = "" if about.task is None else f" on {shortened(about.task, _NAME_LENGTH)}"
    return f"A controller trained{on}"


def render_training_lead(record: TrainingRecord, about: About) -> str:
    """Return the summary of a training run in a few sentences."""
    if not record.rounds:
        return paragraph("lead", f"No round was finished, {NOTHING_YET}")
    sentences = [
        _describe_rounds(record.rounds),
        _describe_gain(record.rounds),
        _describe_seeds(record.rounds),
    ]
    lead = paragraph("lead", " ".join(sentence for sentence in sentences if sentence))
    return lead + paragraph("note", f"{so_far('round', len(record.rounds), about)} {_PLAYED}")


def render_training_tiles(record: TrainingRecord) -> str:
    """Return the main figures as tiles: means over the last tenth of the run."""
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
    add(
        "Validation gain over the twin",
        gain,
        f"{format_number(gain, decimals=2, signed=True)} points",
    )
    greedy = [row.eval_gain for row in record.rounds if row.eval_gain is not None]
    if greedy:
        words = f"{format_number(greedy[-1], decimals=2, signed=True)} points"
        add("Validation gain, greedy", greedy[-1], words, "last evaluation")
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
        f"{note}, {_describe_light('explained_variance', explained)}",
    )
    potential = mean_of(updates, "potential_share")
    add("Share of the potential", potential, format_measure(potential), f"{note}, of the returns")
    kl = [row.approx_kl for row in updates if row.approx_kl is not None]
    if kl:
        middle = statistics.median(kl)
        add("KL of an update", middle, format_measure(middle), f"{note}, median")
    return render_tiles(tiles)


def mean_of(rows: Sequence[RoundRow] | Sequence[UpdateRow], column: str) -> float | None:
    """Return the mean of the measured values of a column."""
    values = [value for row in rows if (value := getattr(row, column)) is not None]
    return statistics.fmean(values) if values else None


def _last(rounds: Sequence[RoundRow]) -> str:
    return "last round" if len(rounds) == 1 else f"last {counted(len(rounds), 'round')}"


def _describe_rounds(rounds: Sequence[RoundRow]) -> str:
    episodes = sum(row.episodes or 0 for row in rounds)
    steps = next((row.env_steps for row in reversed(rounds) if row.env_steps is not None), None)
    parts = [counted(episodes, "episode")] if episodes else []
    if steps is not None:
        parts.append(counted(steps, "decision"))
    text = f" ({', '.join(parts)})" if parts else ""
    first, last = rounds[0].return_mean, mean_of(late_rounds(rounds), "return_mean")
    begin = f"In {counted(len(rounds), 'round')}{text}"
    if first is None or last is None:
        return f"{begin} no return was recorded."
    return (
        f"{begin} the mean return went from {format_measure(first)} in the first round to "
        f"{format_measure(last)} in the {_last(late_rounds(rounds))}."
    )


def _describe_gain(rounds: Sequence[RoundRow]) -> str:
    gain = mean_of(late_rounds(rounds), "gain_mean")
    if gain is None:
        return ""
    size = format_number(abs(gain), decimals=2)
    if gain == 0:
        return "On average its networks ended level with their twins."
    side = "above" if gain > 0 else "below"
    return f"On average its networks ended {size} validation points {side} their twins."


def _describe_seeds(rounds: Sequence[RoundRow]) -> str:
    late = late_rounds(rounds)
    episodes = sum(row.episodes or 0 for row in late)
    germinated = sum(row.seeds_germinated or 0 for row in late)
    if not episodes:
        return ""
    kept = mean_of(late, "fossilization_rate")
    text = f"It germinated {format_measure(germinated / episodes)} seeds an episode"
    more = "" if kept is None else f" and kept {format_share(kept)} of the early ones"
    return f"{text}{more}."


def _describe_light(metric: str, value: float | None) -> str:
    words = {"good": "good", "watch": "to be watched", "bad": "bad"}
    assert metric in BANDS
    return words.get(light(metric, value), "unknown")


_PLAYED = (
    "Episodes were played with exploration and scored on the validation split. A gain is the final "
    "score minus that of the twin: a network with the same start and data that never grew."
)
_CURVES = "Bands show the named percentiles of a round's episodes."
_HEADS = (
    "Entropies are shares of the greatest possible, of the policy without its probability floor, "
    "over decisions in which the head had a choice and was used. Ratios and KL are measured after "
    "the update."
)
_EPISODES = (
    "Decisions of a few episodes of the latest recorded round, the best first. In brackets the "
    "probability of a choice, then the critic's value and the reward. Consecutive waits are one "
    "line."
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
    )


def _learning_sections(record: TrainingRecord) -> Iterator[str]:
    if not record.rounds:
        return
    yield section("Learning", _charts(record, LEARNING) + paragraph("note", _CURVES))
    yield section("Behaviour", _charts(record, GROWTH))
    yield section("Operations", render_ops(record.rounds))
    fates = latest_fates(record.rounds)
    if fates:
        yield section("Blueprints", render_blueprints(fates))


def _inner_sections(record: TrainingRecord) -> Iterator[str]:
    if any(row.reward_terms for row in record.rounds):
        yield section("Reward", _charts(record, REWARD) + render_terms(record.rounds))
    if record.updates:
        last = record.updates[-1]
        yield section("Critic", _charts(record, CRITIC) + render_critic_by_op(last))
        body = _charts(record, POLICY) + paragraph("note", _HEADS)
        if record.heads:
            body += render_heads(record.heads, record.choice_names)
        yield section("Policy", body + render_memory(last))
    if record.rounds:
        yield section("Throughput", _charts(record, SPEED))
    if record.episodes:
        yield section("Decisions", paragraph("note", _EPISODES) + render_episodes(record.episodes))
    if record.events:
        yield section("Events", render_events(record.events))


def _charts(record: TrainingRecord, group: str) -> str:
    panels = [panel for panel in panels_for("train") if panel.group == group]
    return draw_panels(panels, record.points)
