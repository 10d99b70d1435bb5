"""The top of a report: what was grown, what it brought, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from esper.leyline.reasons import is_grown
from esper.leyline.records import EpochRecord, RunSummary, SeedRecord, is_loss
from esper.report.markup import (
    counted,
    decimals_for,
    escaped,
    format_count,
    format_number,
    shortened,
    visible,
)
from esper.report.style import render_tiles

_MOST_KEPT_NAMED = 4
_NAME_LENGTH = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers a headline tells, from the summary or, before the end, from the epochs."""

    split: str
    score: float
    twin: float | None
    parameters_before: int
    parameters_after: int
    flops_before: int
    flops_after: int
    epochs: int

    @property
    def gain(self) -> float | None:
        """How far the score is above the twin's, None where no twin ran."""
        return None if self.twin is None else self.score - self.twin


def read_outcome(history: Sequence[EpochRecord], summary: RunSummary | None) -> Outcome | None:
    """Return the numbers to tell, None where nothing was measured at all."""
    if summary is not None:
        # The test split is told where it was used: the controller never saw it.
        is_tested = summary.test_score is not None
        return Outcome(
            split="test" if is_tested else "validation",
            score=summary.val_score if summary.test_score is None else summary.test_score,
            twin=summary.twin_test_score if is_tested else summary.twin_val_score,
            parameters_before=summary.parameters_before,
            parameters_after=summary.parameters_after,
            flops_before=summary.flops_before,
            flops_after=summary.flops_after,
            epochs=summary.epochs,
        )
    if not history:
        return None
    last = history[-1]
    return Outcome(
        split="validation",
        score=last.val_score,
        twin=last.twin_score,
        parameters_before=history[0].parameters,
        parameters_after=last.parameters,
        flops_before=history[0].flops,
        flops_after=last.flops,
        epochs=len(history),
    )


def heading(summary: RunSummary | None, task: str | None = None, kind: str = "grow") -> str:
    """Return the title of a report."""
    on = "" if task is None else f" on {shortened(task, _NAME_LENGTH)}"
    if summary is None and kind != "grow":
        return f"A run of esper {shortened(kind, _NAME_LENGTH)}{on}"
    if summary is None:
        return f"A growing run{on}, not yet at its end"
    done = "grown" if is_grown(summary.seeds) else "trained"
    return f"A network {done} on {shortened(summary.task, _NAME_LENGTH)}"


def render_lead(
    outcome: Outcome,
    controller: str | None,
    seeds: Sequence[SeedRecord],
    why: Sequence[str] = (),
) -> str:
    """Return the story of a run in a few sentences; `why` says why nothing grew."""
    who = "the controller"
    if controller is not None:
        who = f"the controller {shortened(controller, _NAME_LENGTH)}"
    sentences = [_tell_seeds(who, outcome.epochs, seeds), _tell_score(outcome)]
    told = "".join(f"<li>{escaped(line, limit=1000)}</li>\n" for line in why)
    paragraph = f'<p class="lead">{escaped(" ".join(sentences), limit=2000)}</p>\n'
    if told:
        paragraph += f'<ul class="why">\n{told}</ul>\n'
    if outcome.gain is not None:
        paragraph += (
            '<p class="note">The twin had the same initial weights and the same data in the same '
            "order, and only waited. This is one run with one random seed: the difference "
            "includes chance.</p>\n"
        )
    return paragraph


def render_figures(
    outcome: Outcome, summary: RunSummary | None, seeds: Sequence[SeedRecord]
) -> str:
    """Return the few numbers to remember, as tiles."""
    tiles = []
    if outcome.gain is not None:
        tiles.append(
            (
                "Gain over the twin",
                _gained(outcome),
                f"{outcome.split} split",
            )
        )
    tiles.append(_score_tile(outcome.split, outcome.score, outcome.twin))
    if summary is not None and summary.test_score is not None:
        tiles.append(_score_tile("validation", summary.val_score, summary.twin_val_score))
    for name, before, after in (
        ("Parameters", outcome.parameters_before, outcome.parameters_after),
        ("Operations per sample", outcome.flops_before, outcome.flops_after),
    ):
        sizes = [format_count(size) for size in dict.fromkeys((before, after))]
        tiles.append((name, " → ".join(sizes), _change(before, after)))
    kept = sum(seed.fate == "fossilized" for seed in seeds)
    tiles.append(("Seeds kept", f"{format_count(kept)} of {format_count(len(seeds))}", ""))
    return render_tiles(tiles)


def _tell_seeds(who: str, epochs: int, seeds: Sequence[SeedRecord]) -> str:
    over = f"In {counted(epochs, 'epoch')} {who}"
    if not seeds:
        return f"{over} germinated no seed: the network has the shape it started with."
    slots = len({seed.slot for seed in seeds})
    kept = [seed for seed in seeds if seed.fate == "fossilized"]
    pruned = sum(seed.fate == "pruned" for seed in seeds)
    dropped = sum(seed.fate == "dropped" for seed in seeds)
    growing = len(seeds) - len(kept) - pruned - dropped
    fates = []
    if kept:
        names = ", ".join(
            f"{visible(seed.blueprint, limit=_NAME_LENGTH)} at "
            f"{visible(seed.slot, limit=_NAME_LENGTH)}"
            for seed in kept[:_MOST_KEPT_NAMED]
        )
        more = len(kept) - _MOST_KEPT_NAMED
        names += f" and {more} more" if more > 0 else ""
        fates.append(f"{len(kept)} became permanent ({names})")
    if pruned:
        fates.append(f"{pruned} {'was' if pruned == 1 else 'were'} pruned")
    if dropped:
        fates.append(f"{dropped} had no effect yet when the run ended, and left with it")
    if growing:
        fates.append(f"{growing} {'was' if growing == 1 else 'were'} still growing at the end")
    germinated = f"germinated {counted(len(seeds), 'seed')} at {counted(slots, 'slot')}"
    return f"{over} {germinated}: {'; '.join(fates)}."


def _tell_score(outcome: Outcome) -> str:
    gain = outcome.gain
    if is_loss(outcome.score):
        loss = format_number(-outcome.score)
        told = f"The network's loss is {loss} on the {outcome.split} split"
        more, fewer, same = "less than its twin's", "more than its twin's", "as is its twin's"
    else:
        score = format_number(outcome.score)
        told = f"The network scores {score} points on the {outcome.split} split"
        more, fewer, same = "more than its twin", "fewer than its twin", "as many as its twin"
    if gain is not None and math.isfinite(gain):
        size = format_number(abs(gain), decimals=decimals_for(outcome.score))
        told += f", {size} {more if gain > 0 else fewer}" if gain else f", {same}"
    before, after = outcome.parameters_before, outcome.parameters_after
    if before == after:
        return f"{told}, with {format_count(after)} parameters as at the start."
    return f"{told}. Its parameters went from {format_count(before)} to {format_count(after)}."


def _score_tile(split: str, score: float, twin: float | None) -> tuple[str, str, str]:
    name, sign = ("Loss", -1) if is_loss(score) else ("Score", 1)
    beside = "" if twin is None else f"twin {format_number(sign * twin)}"
    return f"{name}, {split}", format_number(sign * score), beside


def _gained(outcome: Outcome) -> str:
    # With the score's own decimals, so that the two can be compared at a glance.
    gain = format_number(outcome.gain, decimals=decimals_for(outcome.score), signed=True)
    return f"{gain} (negative loss)" if is_loss(outcome.score) else f"{gain} points"


def _change(before: int, after: int) -> str:
    if before <= 0 or before == after:
        return "unchanged" if before == after else ""
    return f"{format_number((after - before) / before * 100, decimals=1, signed=True)} %"
