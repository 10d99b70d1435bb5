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
_MOST_BLOCKS = 48
"""Blocks of a stack that are drawn one by one."""
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
        # A gate that is asked every epoch would drown everything else.
        shown = [one for one in record.decisions if one.is_act or self._verbose]
        self._events += [safe(decision_line(record.epoch, one)) for one in shown]
        if shown:
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
        if record.depth is not None:
            table.add_column("stack")
            table.add_column("blocks awake")
            for stack in record.depth.stacks:
                bar = "█" * stack.awake + "░" * (stack.blocks - stack.awake)
                told = f"{stack.awake} of {stack.blocks}"
                is_short = stack.blocks <= _MOST_BLOCKS
                table.add_row(safe(stack.name), f"{bar} {told}" if is_short else told)
            return self._captioned(table, record)
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
        return self._captioned(table, record)

    def _captioned(self, table: Table, record: EpochRecord) -> Table:
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
    from esper.growth.grown import Deepened

    console, summary = out_console(), grown.summary
    numbers = ("parameters", "FLOPs", "validation", "test")
    done = "Deepened" if isinstance(grown, Deepened) else "Grown"
    result = new_table(f"{done}: {summary.task}", ("", *numbers), numbers=numbers)

    def add(name: str, parameters: int, flops: int, *scores: float | None) -> None:
        result.add_row(name, f"{parameters:,}", f"{flops:,}", *map(points, scores))

    after = summary.parameters_after, summary.flops_after
    scores = summary.val_score, summary.test_score
    twins = summary.twin_val_score, summary.twin_test_score
    before = summary.parameters_before, summary.flops_before
    if isinstance(grown, Deepened):
        add("at the start", *before, None, None)
        if grown.twin is not None:
            whole = sum(p.numel() for p in grown.twin.parameters() if p.requires_grad)
            add("twin (static)", whole, grown.garden.host_flops, *twins)
        add("deepened", *after, *scores)
    else:
        if summary.twin_val_score is not None:
            add("twin (only waits)", *before, *twins)
        add("grown", *after, *scores)
    console.print(result)
    if isinstance(grown, Deepened):
        _print_depth(console, grown)
    elif summary.seeds:
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


def _print_depth(console: Console, grown: Grown) -> None:
    """Print when blocks woke, and what the training has taken."""
    summary = grown.summary
    table = new_table("Blocks", ("stack", "awake", "woken"))
    for stack in summary.stacks:
        moments = [
            f"{each.after} after step {each.step:,}"
            for record in grown.history
            if record.depth is not None and record.epoch <= summary.kept_epoch
            for each in record.depth.deepenings
            if each.stack == stack.name and each.outcome == "done" and each.after <= stack.awake
        ]
        woken = ", ".join(moments) or "none"
        table.add_row(safe(stack.name), f"{stack.awake} of {stack.blocks}", woken)
    console.print(table)
    spent, static = summary.training_flops, summary.static_flops
    if spent and static:
        tell(
            console,
            f"training FLOPs: {spent:.4g}, {100 * spent / static:.0f} % of the {static:.4g} that "
            f"the same steps take with all blocks awake; {summary.seconds:.0f} s",
        )


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
