"""Live views of growing and training runs, and the tables printed at their end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Table
from rich.text import Text

from esper.leyline.reasons import (
    decision_line,
    describe_kept,
    epoch_line,
    format_contribution,
    is_loss,
    round_number,
)
from esper.leyline.records import EpochRecord
from esper.nissa.monitors.monitor import light
from esper.nissa.schema import AlarmRow
from esper.scripts.cli.output import (
    LiveView,
    alarm_line,
    gain_text,
    new_table,
    out_console,
    points,
    print_line,
    safe,
    sparkline,
)
from esper.simic.training.progress import entropies_line, number, round_line, share, signed

if TYPE_CHECKING:
    from esper.growth.grown import Grown
    from esper.simic.training.progress import Progress, RoundReport


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
"""A stack with more blocks is shown as a number only."""
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
        """Show one epoch, with the reasons of its decision if they are known."""
        # A refused ADVANCE may repeat every epoch; it is shown with --verbose only.
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
        """Show an alarm once."""
        if self.is_news(alarm, verbose=self._verbose):
            self.warn(alarm_line(alarm))

    def _table(self, record: EpochRecord) -> Table:
        table = Table(box=None, pad_edge=False)
        if record.depth is not None:
            table.add_column("stack")
            table.add_column("blocks awake")
            for stack in record.depth.stacks:
                bar = "█" * stack.awake + "░" * (stack.blocks - stack.awake)
                text = f"{stack.awake} of {stack.blocks}"
                is_short = stack.blocks <= _MOST_BLOCKS
                table.add_row(safe(stack.name), f"{bar} {text}" if is_short else text)
            return self._captioned(table, record)
        for column in ("slot", "stage", "seed", "alpha", "contribution"):
            table.add_column(column, justify="right" if column == "alpha" else "left")
        for slot in record.slots:
            worth = ""
            if slot.contribution is not None:
                worth = format_contribution(slot.contribution, slot.contribution_se)
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
        """Print decisions at once, and metrics now and then."""
        for event in self._events:
            self._console.print(event, soft_wrap=True)
        self._events.clear()
        now = time.monotonic()
        if self._is_line_due(now, matters=record.epoch in (1, self._epochs)):
            rate = (now - self._started) / max(record.epoch - self._first, 1)
            eta = rate * (self._epochs - record.epoch)
            done = f"epoch {record.epoch}/{self._epochs}"
            print_line(self._console, f"{done}  {epoch_line(record)}  ETA {eta:.0f} s")


def print_grown(grown: Grown, document: dict[str, Any]) -> None:
    """Print scores, sizes and seeds of a finished run."""
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
    if summary.twin_val_score is not None:
        gains = (gain_text(*pair) for pair in zip(scores, twins, strict=True))
        result.add_row("gain over the twin", "", "", *gains)
    console.print(result)
    if summary.training_flops and summary.compute_budget:
        print_line(
            console,
            f"training FLOPs: {summary.training_flops:.4g} of the budget of "
            f"{summary.compute_budget:.4g}, evaluation included",
        )
    if isinstance(grown, Deepened):
        _print_depth(console, grown)
    elif summary.seeds:
        console.print(_seed_table(grown))
    else:
        console.print("The controller germinated nothing.")
    if len(grown.best_by_size) > 1:
        console.print(_size_table(grown))
    print_line(console, describe_kept(summary))
    for line in (*grown.why, *filter(None, [grown.static_warning])):
        print_line(console, line)
    print_line(console, f"report: {document['report']}")
    if document["exported"]:
        print_line(console, f"exported: {document['exported']}")


def _print_depth(console: Console, grown: Grown) -> None:
    """Print when blocks woke, and the training FLOPs."""
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
        print_line(
            console,
            f"training FLOPs: {spent:.4g}, {100 * spent / static:.0f} % of the {static:.4g} that "
            f"the same steps take with all blocks awake; {summary.seconds:.0f} s",
        )


_CONTRIBUTION = (
    "contribution: the loss in score if the seed were removed now, {unit}, ± standard error; "
    "the benefit of growing is the gain over the twin"
)


_SIZES = "sizes are reached at different epochs: only a twin compares networks trained alike"


def _size_table(grown: Grown) -> Table:
    columns = ("parameters", "FLOPs", "validation", "epoch")
    table = new_table("Best validation score by size", columns, numbers=columns)
    table.caption, table.caption_justify = _SIZES, "left"
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


# ---- Training: a live table in a terminal, lines elsewhere


_SPARKS_TRAIN_VIEW = 40
_RECENT_ALARMS = 4
_STEPS_TO_TELL = 5
"""Steps of the first round after which the time left is estimated."""
_UNKNOWN = "unknown"
_STYLES = {"good": "green", "watch": "yellow", "bad": "red"}
_PHASES = {"twins": "waiting twins", "rollout": "episodes", "update": "update"}


class TrainView(LiveView):
    """Shows a training run; use it as a context manager and give it every step."""

    def __init__(
        self,
        console: Console,
        rounds: int,
        done: float = 0.0,
        *,
        title: str,
        verbose: bool = False,
        evaluate_every: int = 0,
    ) -> None:
        """Show a run of this many rounds, of which some may be done already."""
        counter = TextColumn("{task.fields[where]}", markup=False)
        where = f"{int(done)}/{rounds} rounds"
        shown = {"where": where, "eta": _UNKNOWN}
        super().__init__(console, counter, title=title, total=rounds, done=done, **shown)
        self._rounds = rounds
        self._verbose = verbose
        self._evaluate_every = evaluate_every
        self._returns: list[float] = []
        self._gains: list[float] = []
        self._report: RoundReport | None = None
        self._evaluated: tuple[int, float] | None = None
        """Round of the last greedy evaluation, and its gain."""
        self._paces: deque[float] = deque(maxlen=10 * _STEPS_TO_TELL)
        """Seconds of a round, estimated from each of the last steps."""
        self._evaluations: list[float] = []
        """Seconds of each greedy evaluation."""
        self._alarms: list[Text] = []

    def show(self, progress: Progress) -> None:
        """Show one step, and the round if it finished one."""
        report = progress.report
        if report is not None:
            self._report = report
            self._returns = [*self._returns, report.return_mean][-_SPARKS_TRAIN_VIEW:]
            if report.gain_mean is not None:
                self._gains = [*self._gains, report.gain_mean][-_SPARKS_TRAIN_VIEW:]
            if report.evaluation is not None:
                self._evaluated = (report.round, report.evaluation.val_gain_mean)
                self._evaluations.append(report.timings["evaluation"])
        if progress.phase == "rollout":
            self._paces.append(progress.seconds * progress.steps)
        done = progress.done_share * progress.rounds
        finished = progress.round + (report is not None)
        eta = self._eta(time.monotonic(), done, finished)
        where = f"{finished}/{progress.rounds} rounds"
        self._progress.update(self._bar, completed=done, where=where, eta=eta)
        if self._live is not None:
            self._draw(*self._parts(progress))
        else:
            self._print_lines(progress, eta)

    def alarm(self, alarm: AlarmRow) -> None:
        """Show an alarm once."""
        if not self.is_news(alarm, verbose=self._verbose):
            return
        if self._live is not None:
            # The advice takes too much room in a terminal; the report has it.
            short = replace(alarm, advice=None)
            self._alarms.append(safe(alarm_line(short, unit="round")))
        else:
            self.warn(alarm_line(alarm, unit="round"))

    def _parts(self, progress: Progress) -> list[Table | Text]:
        parts: list[Table | Text] = [safe(self._phase(progress))]
        if self._report is not None:
            parts.append(self._table(self._report))
        return [*parts, *self._alarms[-_RECENT_ALARMS:]]

    def _phase(self, progress: Progress) -> str:
        if self._evaluates_next(progress):
            return "update, then greedy episodes to choose the best policy"
        return phase_line(progress)

    def _evaluates_next(self, progress: Progress) -> bool:
        """Return whether greedy episodes follow this step."""
        is_over = progress.phase == "rollout" and progress.step == progress.steps
        return is_over and self._is_evaluated(progress.round + 1)

    def _is_evaluated(self, finished: int) -> bool:
        """Return whether greedy episodes follow after this many rounds."""
        every = self._evaluate_every
        return bool(every) and (finished % every == 0 or finished == self._rounds)

    def _table(self, report: RoundReport) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_column()
        table.add_row("return", signed(report.return_mean), sparkline(self._returns))
        if report.gain_mean is not None:
            gain = f"{signed(report.gain_mean)} points"
            table.add_row("validation gain", gain, sparkline(self._gains))
        if self._evaluated is not None:
            after, greedy = self._evaluated
            table.add_row(
                "greedy validation gain",
                f"{signed(greedy)} points",
                f"after round {round_number(after)}",
            )
        for name, value, text in (
            ("explained_variance", report.explained_variance, number(report.explained_variance)),
            ("approx_kl", report.approx_kl, number(report.approx_kl)),
            ("wait_share_free", report.wait_share_free, share(report.wait_share_free)),
        ):
            words = {"approx_kl": "KL", "wait_share_free": "WAIT on free decisions"}
            style = _STYLES.get(light(name, value), "")
            table.add_row(words.get(name, name.replace("_", " ")), Text(text, style=style))
        if report.potential_share is not None:
            table.add_row("share of the potential", number(report.potential_share))
        table.add_row("seeds fossilized", share(report.fossilization_rate))
        table.add_row("entropies", "", entropies_line(report.conditional_entropies))
        return table

    def _print_lines(self, progress: Progress, eta: str) -> None:
        """Print finished rounds now and then, and the phase of long ones."""
        now = time.monotonic()
        report = progress.report
        is_edge = report is not None and report.round in (0, self._rounds - 1)
        # No step is reported during greedy episodes, which may take as long as the round.
        is_edge = is_edge or self._evaluates_next(progress)
        if not self._is_line_due(now, matters=is_edge or (self._verbose and report is not None)):
            return
        if report is not None:
            line = f"round {round_number(report.round)}/{self._rounds}  {round_line(report)}"
        else:
            line = f"round {round_number(progress.round)}/{self._rounds}  {self._phase(progress)}"
        print_line(self._console, f"{line}  ETA {eta}")

    def _eta(self, now: float, done: float, finished: int) -> str:
        """Return the estimated time left, greedy episodes included.

        Args:
            now: The time.
            done: Rounds done, with the part of the current one.
            finished: Rounds finished, with their greedy episodes.
        """
        gone, left = done - self._first, self._rounds - done
        if gone >= 1:
            pace = (now - self._started - sum(self._evaluations)) / gone
        elif len(self._paces) < _STEPS_TO_TELL:
            return _UNKNOWN
        else:
            # Early steps are slower (twins, compilation), so the median is used.
            pace = median(self._paces)
        # Before the first one, greedy episodes are assumed to take as long as a round.
        each = fmean(self._evaluations) if self._evaluations else pace
        to_come = sum(map(self._is_evaluated, range(finished + 1, self._rounds + 1)))
        return duration(pace * left + each * to_come)


def phase_line(progress: Progress) -> str:
    """Return the current phase in one line."""
    parts = [f"{_PHASES.get(progress.phase, progress.phase)} {progress.step}/{progress.steps}"]
    if progress.active:
        parts.append(f"{progress.active} rows")
    if progress.score_mean is not None:
        parts.append(f"validation score {progress.score_mean:.2f}")
    if progress.gain_mean is not None:
        parts.append(f"validation gain {progress.gain_mean:+.2f}")
    acted = {op: count for op, count in progress.op_counts.items() if op != "WAIT" and count}
    if acted:
        parts.append(" ".join(f"{op.lower()} {count}" for op, count in acted.items()))
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return a duration in words."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def print_trained(console: Console, document: dict[str, Any]) -> None:
    """Print the results of a finished training run."""
    first, last = document["first"], document["last"]
    title = f"Trained on {document['task']}: {document['rounds']} rounds, "
    title += f"{document['env_steps']:,} decisions, {document['seconds']:.0f} s"
    count = last["rounds"]
    rounds = ("first round", "last round" if count == 1 else f"last {count} rounds")
    table = new_table(title, ("", *rounds), numbers=rounds)
    for key, name, form in SHOWN:
        if first.get(key) is not None or last.get(key) is not None:
            table.add_row(name, _text(first.get(key), form), _text(last.get(key), form))
    greedy = document["evaluation"]
    if greedy is not None:
        gain = _text(greedy["gain"], "{:+.2f}")
        text = f"{greedy['episodes']} episodes after round {round_number(greedy['round'])}"
        table.add_row("validation gain, greedy policy, points", "–", gain)
        table.caption, table.caption_justify = f"greedy: {text}", "left"
    console.print(table)
    if _is_paid_for_nothing(last):
        print_line(
            console,
            "the return is above 0 but the gain is not: the networks are no better than their "
            "twins, so judge by the gain (see the alarm return_without_gain in the report)",
        )
    print_line(console, f"policy: {document['policy']}")
    print_line(console, f"report: {document['report']}")


SHOWN = (
    ("return_mean", "return", "{:+.3f}"),
    ("gain_mean", "validation gain over the twin, points", "{:+.2f}"),
    ("germinations", "seeds an episode", "{:.2f}"),
    ("fossilization_rate", "early seeds fossilized", "{:.0%}"),
    ("wait_share_free", "WAIT on free decisions", "{:.0%}"),
    ("explained_variance", "explained variance of the critic", "{:.2f}"),
    ("potential_share", "the same of the reward's potential", "{:.2f}"),
    ("approx_kl", "KL of an update, nats", "{:.2g}"),
)
"""Figures of a summary: key, name and format."""


def _is_paid_for_nothing(last: Mapping[str, Any]) -> bool:
    """Return whether the last rounds had a positive return without a gain."""
    paid, gain = last.get("return_mean"), last.get("gain_mean")
    return paid is not None and gain is not None and paid > 0 >= gain


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
