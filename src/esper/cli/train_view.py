"""What a person sees while a controller trains: a live table, or plain lines without a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table
from rich.text import Text

from esper.cli.output import new_table, safe, tell
from esper.cli.view import LiveView, alarm_line, sparkline
from esper.leyline.records import told_round
from esper.nissa.monitors.monitor import light
from esper.nissa.schema import AlarmRow
from esper.simic.training.round_line import entropies_line, number, round_line, share, signed

if TYPE_CHECKING:
    from esper.simic.training.progress import Progress, RoundReport


_SPARKS = 40
_RECENT_ALARMS = 4
_STEPS_TO_TELL = 5
"""Steps of episodes that say, in the first round, when the run will end."""
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
        """Seconds that a round of steps as long as the last ones would take, of each of them."""
        self._evaluations: list[float] = []
        """Seconds of every greedy evaluation so far."""
        self._alarms: list[Text] = []

    def show(self, progress: Progress) -> None:
        """Take over one step, and the round it may have finished."""
        report = progress.report
        if report is not None:
            self._report = report
            self._returns = [*self._returns, report.return_mean][-_SPARKS:]
            if report.gain_mean is not None:
                self._gains = [*self._gains, report.gain_mean][-_SPARKS:]
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
        """Tell an alarm once; what is only informative, and every repetition, is in the report."""
        if not self.is_news(alarm, verbose=self._verbose):
            return
        if self._live is not None:
            # What to try would push everything else off the screen; the report has it.
            told = replace(alarm, advice=None)
            self._alarms.append(safe(alarm_line(told, unit="round")))
        else:
            self.warn(alarm_line(alarm, unit="round"))

    def _parts(self, progress: Progress) -> list[Table | Text]:
        parts: list[Table | Text] = [safe(self._phase(progress))]
        if self._report is not None:
            parts.append(self._table(self._report))
        return [*parts, *self._alarms[-_RECENT_ALARMS:]]

    def _phase(self, progress: Progress) -> str:
        if self._evaluates_next(progress):
            return "update, then greedy episodes to choose the best policy by"
        return phase_line(progress)

    def _evaluates_next(self, progress: Progress) -> bool:
        """Return whether a round's episodes are over and greedy ones follow."""
        is_over = progress.phase == "rollout" and progress.step == progress.steps
        return is_over and self._is_evaluated(progress.round + 1)

    def _is_evaluated(self, finished: int) -> bool:
        """Return whether greedy episodes follow when so many rounds are finished."""
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
            table.add_row("gain over twin", gain, sparkline(self._gains))
        if self._evaluated is not None:
            after, greedy = self._evaluated
            table.add_row(
                "greedy gain", f"{signed(greedy)} points", f"after round {told_round(after)}"
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
        """Print finished rounds at a rate a log can bear, and a sign of life in long ones."""
        now = time.monotonic()
        report = progress.report
        is_edge = report is not None and report.round in (0, self._rounds - 1)
        # Nothing is heard until a round is closed, and greedy episodes can take as long as it did.
        is_edge = is_edge or self._evaluates_next(progress)
        if not self._is_line_due(now, matters=is_edge or (self._verbose and report is not None)):
            return
        if report is not None:
            line = f"round {told_round(report.round)}/{self._rounds}  {round_line(report)}"
        else:
            line = f"round {told_round(progress.round)}/{self._rounds}  {self._phase(progress)}"
        tell(self._console, f"{line}  ETA {eta}")

    def _eta(self, now: float, done: float, finished: int) -> str:
        """Return how long the rest takes: rounds, whole or in part, and greedy episodes after some.

        Args:
            now: the time.
            done: rounds, with what is done of the one in progress.
            finished: rounds, with the greedy episodes after them.
        """
        gone, left = done - self._first, self._rounds - done
        if gone >= 1:
            pace = (now - self._started - sum(self._evaluations)) / gone
        elif len(self._paces) < _STEPS_TO_TELL:
            return _UNKNOWN
        else:
            # Twins come first and so does compiling; what is usual since then says more.
            pace = median(self._paces)
        # Until there was one, greedy episodes are taken to last as long as a round.
        each = fmean(self._evaluations) if self._evaluations else pace
        to_come = sum(map(self._is_evaluated, range(finished + 1, self._rounds + 1)))
        return duration(pace * left + each * to_come)


def phase_line(progress: Progress) -> str:
    """Return what is being done now, in one line."""
    parts = [f"{_PHASES.get(progress.phase, progress.phase)} {progress.step}/{progress.steps}"]
    if progress.active:
        parts.append(f"{progress.active} rows")
    if progress.score_mean is not None:
        parts.append(f"score {progress.score_mean:.2f}")
    if progress.gain_mean is not None:
        parts.append(f"gain {progress.gain_mean:+.2f}")
    acted = {op: count for op, count in progress.op_counts.items() if op != "WAIT" and count}
    if acted:
        parts.append(" ".join(f"{op.lower()} {count}" for op, count in acted.items()))
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return a time to wait, as people say it."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def print_summary(console: Console, document: dict[str, Any]) -> None:
    """Print what was learned, and how to use it."""
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
        told = f"{greedy['episodes']} episodes after round {told_round(greedy['round'])}"
        table.add_row("gain, greedy policy, points", "–", gain)
        table.caption, table.caption_justify = f"greedy: {told}", "left"
    console.print(table)
    if _is_paid_for_nothing(last):
        tell(
            console,
            "the return is above 0 and the gain is not: networks are no better than if nothing had "
            "been done; judge by the gain (`esper query` the table alarms for return_without_gain)",
        )
    tell(console, f"policy: {document['policy']}")
    tell(console, f"report: {document['report']}")


SHOWN = (
    ("return_mean", "return", "{:+.3f}"),
    ("gain_mean", "gain over the twin, points", "{:+.2f}"),
    ("germinations", "seeds an episode", "{:.2f}"),
    ("fossilization_rate", "early seeds fossilized", "{:.0%}"),
    ("wait_share_free", "WAIT on free decisions", "{:.0%}"),
    ("explained_variance", "explained variance of the critic", "{:.2f}"),
    ("potential_share", "the same of the reward's potential", "{:.2f}"),
    ("approx_kl", "KL of an update, nats", "{:.2g}"),
)
"""What is told of rounds: a key of their summary, its name for people, and how it is written."""


def _is_paid_for_nothing(last: Mapping[str, Any]) -> bool:
    """Return whether the last rounds were paid although their networks gained nothing."""
    paid, gain = last.get("return_mean"), last.get("gain_mean")
    return paid is not None and gain is not None and paid > 0 >= gain


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
