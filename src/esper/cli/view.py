"""What a person sees while a network grows: a live table, or plain lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Table
from rich.text import Text

from esper.cli.live import LiveView
from esper.cli.output import safe
from esper.leyline.records import DecisionRecord, EpochRecord
from esper.nissa.schema import AlarmRow

STAGE_STYLES = {
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
_BLOCKS = "▁▂▃▄▅▆▇█"


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
        matters = decision is not None and decision.op != "WAIT" and decision.outcome == "done"
        if decision is not None and (matters or self._verbose):
            self._events.append(decision_line(record.epoch, decision))
            self._events += [safe(f"    {reason}") for reason in reasons]
        self._progress.update(self._bar, completed=record.epoch)
        self._scores = [*self._scores, record.val_score][-_SPARKS:]
        if self._live is not None:
            self._draw(self._table(record), *self._events[-_RECENT:])
        else:
            self._print_lines(record)

    def _table(self, record: EpochRecord) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("slot", "stage", "seed", "alpha", "contribution"):
            table.add_column(column, justify="right" if column == "alpha" else "left")
        for slot in record.slots:
            worth = "" if slot.contribution is None else f"{slot.contribution:+.2f}"
            if slot.contribution_se is not None:
                worth += f" ± {slot.contribution_se:.2f}"
            table.add_row(
                safe(slot.name),
                Text(slot.stage.lower(), style=STAGE_STYLES.get(slot.stage, "")),
                safe(slot.blueprint or ""),
                f"{slot.alpha:.2f}" if slot.blueprint else "",
                worth,
            )
        table.caption = f"{sparkline(self._scores)}  {metrics_line(record)}"
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
            self._console.print(
                f"epoch {record.epoch}/{self._epochs}  {metrics_line(record)}  ETA {eta:.0f} s",
                soft_wrap=True,
            )


def sparkline(values: Sequence[float]) -> str:
    """Return a row of bars between the lowest and the highest of some values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[int((len(_BLOCKS) - 1) * (value - low) / span)] for value in values)


def metrics_line(record: EpochRecord) -> str:
    """Return an epoch's metrics in one line."""
    parts = [f"val score {record.val_score:.2f}", f"val loss {record.val_loss:.4f}"]
    if record.twin_score is not None:
        parts.append(f"twin {record.twin_score:.2f}")
    if record.train_loss is not None:
        parts.append(f"train loss {record.train_loss:.4f}")
    parts.append(f"{record.parameters:,} parameters")
    return "  ".join(parts)


def decision_line(epoch: int, decision: DecisionRecord) -> Text:
    """Return a decision in one line."""
    words = [f"epoch {epoch}: {decision.op}"]
    words += [str(word) for word in (decision.slot, decision.blueprint) if word]
    if decision.outcome != "done":
        words.append(f"({decision.reason or decision.outcome})")
    return safe(" ".join(words))


def alarm_line(alarm: AlarmRow, *, unit: str = "epoch") -> str:
    """Return an alarm in one line: when (by epoch or round), what is wrong, and what to try."""
    parts = [alarm.message or str(alarm.monitor)]
    if alarm.advice:
        parts.append(alarm.advice)
    word = "alarm" if alarm.state == "raised" else "alarm over"
    when = alarm.round if unit == "round" else alarm.step
    return f"{unit} {when}: {word} ({alarm.severity}): {'. '.join(parts)}"
