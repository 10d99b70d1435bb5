"""The top of a training report: what was learned, and how far the run is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from esper.nissa.monitors.bands import BANDS, light
from esper.nissa.schema import RoundRow, UpdateRow
from esper.report.origin import About
from esper.report.shell import render_tiles
from esper.report.text import (
    counted,
    escaped,
    format_count,
    format_measure,
    format_number,
    format_share,
    shortened,
)
from esper.report.training.record import TrainingRecord
from esper.report.training.tables import late_rounds

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
