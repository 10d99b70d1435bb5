"""Show one run in the terminal, live or finished.

Shows the slots or blocks of a growing network, or the rounds of a controller in training, until the
run ends.

Examples:
  esper watch runs/first              until it ends; Ctrl-C stops watching, not the run
  esper watch runs/first --every 30   update twice a minute
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Table

from esper.leyline.errors import UsageError
from esper.leyline.reasons import format_gain, format_score, is_loss, round_number
from esper.nissa.listing import RunEntry, describe_run
from esper.nissa.reader import StoredRun, open_run, read_history
from esper.nissa.schema import AlarmRow
from esper.nissa.schema_runs import RoundRow
from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import LiveView, find_store, out_console, print_line, sparkline
from esper.scripts.cli.views import GrowthView

_SPARKS = 40


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("where", metavar="RUN", help="run folder")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="S", help="seconds between updates (default: 1)"
    )
    parser.set_defaults(needs_no_torch=True)


def run(options: argparse.Namespace) -> int:
    """Follow the run to its end."""
    if not options.every > 0:
        raise UsageError(f"--every must be more than 0 seconds, got {options.every}")
    find_store(options.where)
    folder, console = Path(options.where), out_console()
    entry = describe_run(folder)
    if entry.state == "damaged":
        raise UsageError(f"{folder} cannot be watched: {entry.note}")
    with _view_of(entry, console) as view:
        while True:
            with open_run(folder) as stored:
                # Read before the update, so that the last update comes after the last write.
                entry = stored.entry
                view.update(stored)
            if entry.state != "running":
                break
            time.sleep(options.every)
    print_line(console, _ending(entry))
    return 0


def _view_of(entry: RunEntry, console: Console) -> _StoredGrowth | _RoundsView:
    title = f"{entry.task or entry.kind or 'run'} ({entry.controller or entry.kind})"
    total = entry.planned or 0
    if entry.kind == "train":
        return _RoundsView(console, total, title=title)
    return _StoredGrowth(console, total, 0, title=title)


def _ending(entry: RunEntry) -> str:
    parts = [f"{entry.path}: {entry.state}, {entry.done or 0} of {entry.planned} {entry.unit}"]
    for split, score, gain in (
        ("validation", entry.val_score, entry.val_gain),
        ("test", entry.test_score, entry.test_gain),
    ):
        if score is not None:
            name = "" if is_loss(score) else "score "
            over = ""
            if gain is not None:
                than = "than the twin's" if is_loss(score) else "over the twin"
                over = f", {format_gain(score, score - gain)} {than}"
            parts.append(f"{split} {name}{format_score(score)}{over}")
    if entry.note:
        parts.append(entry.note)
    if entry.state == "interrupted":
        verb = "train" if entry.kind == "train" else "grow"
        parts.append(f"go on with `esper {verb} --resume --out {entry.path}`")
    return "; ".join(parts)


class _StoredGrowth(GrowthView):
    """Shows each epoch of a store once."""

    _seen = 0

    def update(self, run: StoredRun) -> None:
        """Show new epochs and alarms."""
        for record in read_history(run):
            if record.epoch > self._seen:
                self._seen = record.epoch
                self.show(record)
        for alarm in run.records("alarms"):
            assert isinstance(alarm, AlarmRow)
            self.alarm(alarm)


class _RoundsView(LiveView):
    """Shows the rounds of a controller's training."""

    def __init__(self, console: Console, rounds: int, *, title: str) -> None:
        counters = (MofNCompleteColumn(), TextColumn("rounds"))
        super().__init__(console, *counters, title=title, total=rounds, done=0)
        self._rounds: list[RoundRow] = []

    def update(self, run: StoredRun) -> None:
        """Show new rounds."""
        seen = self._rounds[-1].round if self._rounds else -1
        for row in run.records("rounds", where="round > ?", parameters=[seen]):
            assert isinstance(row, RoundRow)
            self._rounds.append(row)
            if self._live is None:
                print_line(self._console, f"round {round_number(row.round)}  {_round_text(row)}")
        if self._rounds:
            self._progress.update(self._bar, completed=self._rounds[-1].round + 1)
            self._draw(self._table())

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        shown = self._rounds[-_SPARKS:]
        for name, values in (
            ("return", [row.return_mean for row in shown]),
            ("validation gain, points", [row.gain_mean for row in shown]),
            ("validation score, points", [row.score_mean for row in shown]),
        ):
            known = [value for value in values if value is not None]
            if known:
                table.add_row(name, f"{known[-1]:+.3f}", sparkline(known))
        return table


def _round_text(row: RoundRow) -> str:
    parts = [f"return {row.return_mean:+.3f}"] if row.return_mean is not None else []
    if row.gain_mean is not None:
        parts.append(f"validation gain {row.gain_mean:+.2f} points")
    if row.wait_share_free is not None:
        parts.append(f"WAIT {100 * row.wait_share_free:.0f} % of free decisions")
    return "  ".join(parts)
