"""What a person sees while a network grows, and what came of it in the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Table
from rich.text import Text

from esper.cli.output import new_table, out_console, points, safe, tell
from esper.cli.view import LiveView, alarm_line, sparkline
from esper.leyline.records import (
    EpochRecord,
    decision_line,
    epoch_line,
    is_loss,
    told_kept,
    told_worth,
)
from esper.nissa.schema import AlarmRow

if TYPE_CHECKING:
    from esper.growth.grown import Grown

_STAGE_STYLES = {
    "DORMANT": "dim",
    "GERMINATED": "yellow",
    "TRAINING": "cyan",
    "BLENDING": "magenta",
    "HOLDING": "blue",
    "FOSSILIZED": "green",
    "PRUNED": "red",
    "EMBARGOED": "red",
    "RESETTING": "red",
}
_RECENT = 6
_SPARKS = 30


class GrowthView(LiveView):
    """Shows a growing run; use it as a context manager and give it every record."""

    def __init__(
        self, console: Console, epochs: int, done: int, *, title: str, verbose: bool = False
    ) -> None:
        """Show a run of this many epochs, of which some may be done already."""
        counters = (MofNCompleteColumn(), TextColumn("epochs"))
        super().__init__(console, *counters, title=title, total=epochs, done=done)
        self._epochs = epochs
        self._verbose = verbose
        self._events: list[Text] = []
        self._scores: list[float] = []

    def show(self, record: EpochRecord, reasons: Sequence[str] = ()) -> None:
        """Take over one epoch, with the reasons of its decision where they are known."""
        decision = record.decision
        # A gate that is asked every epoch would drown everything else.
        if decision is not None and (decision.is_act or self._verbose):
            self._events.append(safe(decision_line(record.epoch, decision)))
            self._events += [safe(f"    {reason}") for reason in reasons]
        self._progress.update(self._bar, completed=record.epoch)
        self._scores = [*self._scores, record.val_score][-_SPARKS:]
        if self._live is not None:
            self._draw(self._table(record), *self._events[-_RECENT:])
        else:
            self._print_lines(record)

    def alarm(self, alarm: AlarmRow) -> None:
        """Tell an alarm once; what is only informative, and every repetition, is in the report."""
        if self.is_news(alarm, verbose=self._verbose):
            self.warn(alarm_line(alarm))

    def _table(self, record: EpochRecord) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("slot", "stage", "seed", "alpha", "contribution"):
            table.add_column(column, justify="right" if column == "alpha" else "left")
        for slot in record.slots:
            worth = ""
            if slot.contribution is not None:
                worth = told_worth(slot.contribution, slot.contribution_se)
            table.add_row(
                safe(slot.name),
                Text(slot.stage.lower(), style=_STAGE_STYLES.get(slot.stage, "")),
                safe(slot.blueprint or ""),
                f"{slot.alpha:.2f}" if slot.blueprint else "",
                worth,
            )
        table.caption = f"{sparkline(self._scores)}  {epoch_line(record)}"
        table.caption_justify = "left"
        return table

    def _print_lines(self, record: EpochRecord) -> None:
        """Print decisions as they happen, and metrics at a rate a log can bear."""
        for event in self._events:
            self._console.print(event, soft_wrap=True)
        self._events.clear()
        now = time.monotonic()
        if self._is_line_due(now, matters=record.epoch in (1, self._epochs)):
            rate = (now - self._started) / max(record.epoch - self._first, 1)
            eta = rate * (self._epochs - record.epoch)
            done = f"epoch {record.epoch}/{self._epochs}"
            tell(self._console, f"{done}  {epoch_line(record)}  ETA {eta:.0f} s")


def print_summary(grown: Grown, document: dict[str, Any]) -> None:
    """Print what was grown and what it was worth."""
    console, summary = out_console(), grown.summary
    numbers = ("parameters", "FLOPs", "validation", "test")
    result = new_table(f"Grown: {summary.task}", ("", *numbers), numbers=numbers)

    def add(name: str, parameters: int, flops: int, *scores: float | None) -> None:
        result.add_row(name, f"{parameters:,}", f"{flops:,}", *map(points, scores))

    before, after = summary.parameters_before, summary.parameters_after
    if summary.twin_val_score is not None:
        twins = summary.twin_val_score, summary.twin_test_score
        add("twin (only waits)", before, summary.flops_before, *twins)
    add("grown", after, summary.flops_after, summary.val_score, summary.test_score)
    console.print(result)
    if summary.seeds:
        console.print(_seed_table(grown))
    else:
        console.print("The controller germinated nothing.")
    if len(grown.best_by_size) > 1:
        console.print(_size_table(grown))
    tell(console, told_kept(summary))
    for line in grown.why:
        tell(console, line)
    tell(console, f"report: {document['report']}")
    if document["exported"]:
        tell(console, f"exported: {document['exported']}")


_CONTRIBUTION = (
    "contribution: what the network would lose now without the seed, {unit}, ± standard error; "
    "what growing has brought is the difference to the twin"
)


def _size_table(grown: Grown) -> Table:
    columns = ("parameters", "FLOPs", "validation", "epoch")
    table = new_table("Best validation score of every size it had", columns, numbers=columns)
    for size in grown.best_by_size:
        table.add_row(
            f"{size.parameters:,}", f"{size.flops:,}", points(size.val_score), str(size.epoch)
        )
    return table


def _seed_table(grown: Grown) -> Table:
    unit = "in loss" if is_loss(grown.summary.val_score) else "in points"
    costs = ("parameters", "FLOPs")
    columns = ("slot", "seed", "germinated", "ended", "fate", *costs, "contribution")
    table = new_table("Seeds", columns, numbers=costs)
    table.caption, table.caption_justify = _CONTRIBUTION.format(unit=unit), "left"
    worth = grown.contributions.leave_one_out
    for seed in grown.summary.seeds:
        measured = worth.get(seed.slot) if seed.fate not in ("pruned", "dropped") else None
        shown = "–" if measured is None else str(measured)
        table.add_row(
            safe(seed.slot),
            safe(seed.blueprint),
            f"epoch {seed.germinated}",
            "–" if seed.ended is None else f"epoch {seed.ended}",
            seed.fate,
            f"{seed.parameters:,}",
            f"{seed.flops:,}",
            shown,
        )
    return table
