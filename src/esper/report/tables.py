"""Tables of a page: escaped cells, bounded length, each scrolling in its own container."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper.leyline.records import (
    DecisionRecord,
    EpochRecord,
    SeedRecord,
    SizeRecord,
    decisions_of,
    is_loss,
)
from esper.report.markup import (
    argument_words,
    counted,
    format_contribution,
    format_count,
    format_number,
    op_words,
    outcome_words,
)
from esper.report.style import TEMPLATES, render_part

MOST_ROWS = 500
"""A table shows no more rows than this and says how many there are beyond."""

NOTHING = "–"

_LONG = 40


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a column."""

    name: str
    kind: str = ""
    """Class of its cells: number, words (long texts), or none."""


def render_table(
    caption: str, columns: Sequence[Column], rows: Sequence[Sequence[object]], *, noun: str
) -> str:
    """Return a table whose cells show any value as text.

    Args:
        caption: What the table holds, for those who meet it without its surroundings.
        columns: The heads, one for every cell of a row.
        rows: The cells; only the first `MOST_ROWS` rows are shown.
        noun: What a row is, for the line about those not shown.
    """
    return render_part("table", caption, columns, rows[:MOST_ROWS], _beyond(len(rows), noun))


def render_pairs(caption: str, pairs: Iterable[tuple[str, object]], *, noun: str) -> str:
    """Return a table of names and values."""
    rows = list(pairs)
    return render_part("pairs", caption, rows[:MOST_ROWS], _beyond(len(rows), noun))


def render_seeds(
    seeds: Sequence[SeedRecord], at_end: Mapping[str, tuple[float | None, float | None]]
) -> str:
    """Return the table of all seeds and what became of them.

    `at_end` has what the seed in a slot was worth after the last epoch, with its standard error.
    """
    columns = [
        Column("Slot"),
        Column("Blueprint"),
        Column("Germinated", "number"),
        Column("Ended", "number"),
        Column("Fate"),
        Column("Parameters", "number"),
        Column("Operations", "number"),
        Column("While growing ± se" if at_end else "Contribution ± se", "number"),
    ]
    rows: list[tuple[object, ...]] = [
        (
            seed.slot,
            seed.blueprint,
            seed.germinated,
            NOTHING if seed.ended is None else seed.ended,
            seed.fate,
            format_count(seed.parameters),
            format_count(seed.flops),
            format_contribution(seed.contribution, seed.contribution_se),
        )
        for seed in seeds
    ]
    if at_end:
        columns.append(Column("At the end ± se", "number"))
        rows = [(*row, _worth_at_end(seed, at_end)) for row, seed in zip(rows, seeds, strict=True)]
    return render_table("Seeds and what became of them", columns, rows, noun="seed")


def render_sizes(sizes: Sequence[SizeRecord]) -> str:
    """Return the best validation score of every size the network had."""
    is_of_loss = is_loss(sizes[0].val_score)
    best = "Lowest validation loss" if is_of_loss else "Best validation score"
    columns = [Column(name, "number") for name in ("Parameters", "Operations", best, "Epoch")]
    rows = [
        (
            format_count(size.parameters),
            format_count(size.flops),
            format_number(-size.val_score if is_of_loss else size.val_score),
            size.epoch,
        )
        for size in sizes
    ]
    return render_table("The best of every size", columns, rows, noun="size")


def render_decisions(history: Sequence[EpochRecord]) -> str:
    """Return the table of all decisions but WAIT."""
    columns = (
        Column("Epoch", "number"),
        Column("Operation"),
        Column("Slot"),
        Column("Arguments", "words"),
        Column("Outcome"),
        Column("Reason", "words"),
    )
    rows = [
        (
            _span(first, last),
            op_words(decision.op),
            NOTHING if decision.slot is None else decision.slot,
            argument_words(decision) or NOTHING,
            outcome_words(decision.outcome),
            decision.reason or NOTHING,
        )
        for first, last, decision in _without_repeats(decisions_of(history))
    ]
    return render_table("Decisions other than WAIT", columns, rows, noun="decision")


def _without_repeats(
    decisions: Iterable[tuple[int, DecisionRecord]],
) -> Iterable[tuple[int, int, DecisionRecord]]:
    """Yield (first epoch, last epoch, decision); one refused epoch after epoch is told once."""
    held: tuple[int, int, DecisionRecord] | None = None
    for epoch, decision in decisions:
        if held is not None:
            first, last, before = held
            if epoch == last + 1 and decision.outcome != "done" and _same(before, decision):
                held = (first, epoch, decision)
                continue
            yield held
        held = (epoch, epoch, decision)
    if held is not None:
        yield held


def _same(one: DecisionRecord, other: DecisionRecord) -> bool:
    # The reasons may count epochs; the last one tells most.
    return dataclasses.replace(one, reason="") == dataclasses.replace(other, reason="")


def _span(first: int, last: int) -> str:
    return format_count(first) if first == last else f"{format_count(first)}–{format_count(last)}"


def _worth_at_end(seed: SeedRecord, at_end: Mapping[str, tuple[float | None, float | None]]) -> str:
    if seed.fate in ("pruned", "dropped") or seed.slot not in at_end:
        return NOTHING
    return format_contribution(*at_end[seed.slot])


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    """Yield nested settings as dotted names with their values."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield from _flatten_list(name, value)
        else:
            yield name, "none" if value is None else value


def _flatten_list(name: str, values: Sequence[Any]) -> Iterable[tuple[str, object]]:
    if any(isinstance(value, Mapping | list | tuple) for value in values):
        yield from flatten({f"{name}[{index}]": value for index, value in enumerate(values)})
    else:
        yield name, ", ".join(map(str, values)) or "none"


def _beyond(total: int, noun: str) -> str:
    beyond = total - MOST_ROWS
    return counted(beyond, f"more {noun}") if beyond > 0 else ""


def _cell_kind(column: Column, cell: object) -> str:
    # A long name in a narrow column would become a tower of syllables.
    return column.kind or ("words" if len(str(cell)) > _LONG else "")


TEMPLATES.globals["cell_kind"] = _cell_kind
