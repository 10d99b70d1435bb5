"""The report of a growing run: what grew, the gain over the twin, and the cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper.leyline.reasons import is_grown, is_loss, why_not_grown
from esper.leyline.records import (
    DecisionRecord,
    EpochRecord,
    ModuleRecord,
    RunSummary,
    SeedRecord,
    SizeRecord,
    best_by_size,
    copy_fields,
    decisions_of,
    kept_record,
    seed_records,
)
from esper.nissa.report import stacks as deepening
from esper.nissa.report.markup import (
    argument_words,
    counted,
    decimals_for,
    escaped,
    format_contribution,
    format_count,
    format_number,
    op_words,
    outcome_words,
    shortened,
    visible,
)
from esper.nissa.report.page import (
    NOTHING,
    NOTHING_YET,
    About,
    AlarmGroup,
    Column,
    figure,
    found_sections,
    number_columns,
    origin_sections,
    paragraph,
    recorded_section,
    render_page,
    render_table,
    render_tiles,
    section,
    so_far,
    word_columns,
)
from esper.nissa.report.picture import DEFAULT_TITLE, draw_architecture, draw_picture

_MOST_KEPT_NAMED = 4
_NAME_LENGTH = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """The main figures of a run, from its summary or, before the end, from its epochs."""

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
        """The score minus the twin's, None without a twin."""
        return None if self.twin is None else self.score - self.twin


def read_outcome(history: Sequence[EpochRecord], summary: RunSummary | None) -> Outcome | None:
    """Return the main figures, None if nothing was measured."""
    if summary is not None:
        # The test split is preferred: the controller never saw it.
        is_tested = summary.test_score is not None
        return copy_fields(
            Outcome,
            summary,
            split="test" if is_tested else "validation",
            score=summary.val_score if summary.test_score is None else summary.test_score,
            twin=summary.twin_test_score if is_tested else summary.twin_val_score,
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
    done = "grown" if is_grown(summary.seeds) else "deepened" if summary.stacks else "trained"
    return f"{shortened(summary.task, _NAME_LENGTH)}: a {done} network"


def render_lead(
    outcome: Outcome,
    controller: str | None,
    seeds: Sequence[SeedRecord],
    why: Sequence[str] = (),
    kept: str = "",
    blocks: str = "",
) -> str:
    """Return the summary of a run in a few sentences.

    Args:
        outcome: Its main figures.
        controller: Name of the controller.
        seeds: All seeds.
        why: Reasons why little or nothing grew.
        kept: Which epoch's network is the result.
        blocks: How a network was deepened.
    """
    who = "the controller"
    if controller is not None:
        who = f"the controller {shortened(controller, _NAME_LENGTH)}"
    grew = blocks or _describe_seeds(who, outcome.epochs, seeds)
    sentences = [grew, kept, _describe_score(outcome)]
    text = "".join(f"<li>{escaped(line, limit=1000)}</li>\n" for line in why)
    lead = paragraph("lead", " ".join(filter(None, sentences)))
    if text:
        lead += f'<ul class="why">\n{text}</ul>\n'
    twin = deepening.TWIN if blocks else _TWIN
    return lead if outcome.gain is None else lead + paragraph("note", twin)


def render_figures(
    outcome: Outcome,
    summary: RunSummary | None,
    seeds: Sequence[SeedRecord],
    history: Sequence[EpochRecord] = (),
) -> str:
    """Return the main figures as tiles."""
    tiles = _split_tiles(outcome.split, outcome.score, outcome.twin)
    if summary is not None and summary.test_score is not None:
        tiles += _split_tiles("validation", summary.val_score, summary.twin_val_score)
    for name, before, after in (
        ("Parameters", outcome.parameters_before, outcome.parameters_after),
        ("Operations per sample", outcome.flops_before, outcome.flops_after),
    ):
        sizes = [format_count(size) for size in dict.fromkeys((before, after))]
        tiles.append((name, " → ".join(sizes), _change(before, after)))
    depth = history[-1].depth if history else None
    if depth is not None:
        stacks = depth.stacks if summary is None else summary.stacks
        tiles += deepening.block_tiles(stacks, depth.flops, depth.static_flops)
        return render_tiles(tiles)
    tiles += deepening.budget_tiles(summary)
    kept = sum(seed.fate == "fossilized" for seed in seeds)
    tiles.append(("Seeds kept", f"{format_count(kept)} of {format_count(len(seeds))}", ""))
    return render_tiles(tiles)


def _describe_seeds(who: str, epochs: int, seeds: Sequence[SeedRecord]) -> str:
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
        was = "was" if dropped == 1 else "were"
        fates.append(f"{dropped} had no effect in the kept network and {was} dropped")
    if growing:
        fates.append(f"{growing} {'was' if growing == 1 else 'were'} still growing at the end")
    germinated = f"germinated {counted(len(seeds), 'seed')} at {counted(slots, 'slot')}"
    return f"{over} {germinated}: {'; '.join(fates)}."


def _describe_kept(summary: RunSummary) -> str:
    kept, done = format_count(summary.kept_epoch), format_count(summary.epochs)
    stopped = ""
    if summary.stopped:
        stopped = f"The run stopped early, after epoch {done}: {visible(summary.stopped)}. "
    if summary.kept_epoch == summary.epochs:
        return f"{stopped}The network of the last epoch is the result."
    return f"{stopped}The network of epoch {kept}, the best validated of {done}, is the result."


def _describe_score(outcome: Outcome) -> str:
    gain = outcome.gain
    if is_loss(outcome.score):
        loss = format_number(-outcome.score)
        text = f"The network's loss is {loss} on the {outcome.split} split"
        more, fewer, same = "less than its twin's", "more than its twin's", "as is its twin's"
    else:
        score = format_number(outcome.score)
        text = f"The network scores {score} points on the {outcome.split} split"
        more, fewer, same = "more than its twin", "fewer than its twin", "as many as its twin"
    if gain is not None and math.isfinite(gain):
        size = format_number(abs(gain), decimals=decimals_for(outcome.score))
        text += f", {size} {more if gain > 0 else fewer}" if gain else f", {same}"
    before, after = outcome.parameters_before, outcome.parameters_after
    if before == after:
        return f"{text}, with {format_count(after)} parameters as at the start."
    return f"{text}. Its parameters went from {format_count(before)} to {format_count(after)}."


def _split_tiles(split: str, score: float, twin: float | None) -> list[tuple[str, str, str]]:
    """Return the gain and the score on one split as tiles."""
    name, sign = ("Loss", -1) if is_loss(score) else ("Score", 1)
    if twin is None:
        return [(f"{name}, {split}", format_number(sign * score), "")]
    # With as many decimals as the score, so that the two are easy to compare.
    gain = format_number(score - twin, decimals=decimals_for(score), signed=True)
    unit = "(negative loss)" if is_loss(score) else "points"
    return [
        (f"{split.capitalize()} gain over the twin", f"{gain} {unit}", f"{split} split"),
        (f"{name}, {split}", format_number(sign * score), f"twin {format_number(sign * twin)}"),
    ]


def _change(before: int, after: int) -> str:
    if before <= 0 or before == after:
        return "unchanged" if before == after else ""
    return f"{format_number((after - before) / before * 100, decimals=1, signed=True)} %"


def render_seeds(
    seeds: Sequence[SeedRecord], at_end: Mapping[str, tuple[float | None, float | None]]
) -> str:
    """Return the table of all seeds.

    Args:
        seeds: The seeds.
        at_end: By slot, the contribution of its seed after the last epoch and the standard error.
    """
    columns = [
        Column("Slot"),
        Column("Blueprint"),
        *number_columns("Germinated", "Ended"),
        Column("Fate"),
        *number_columns("Parameters", "Operations"),
        *number_columns("While growing ± se" if at_end else "Contribution ± se"),
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
    """Return the table of the best validation score at each size of the network."""
    is_of_loss = is_loss(sizes[0].val_score)
    best = "Lowest validation loss" if is_of_loss else "Best validation score"
    columns = number_columns("Parameters", "Operations", best, "Epoch")
    rows = [
        (
            format_count(size.parameters),
            format_count(size.flops),
            format_number(-size.val_score if is_of_loss else size.val_score),
            size.epoch,
        )
        for size in sizes
    ]
    return render_table("The best of every size, at its own epoch", columns, rows, noun="size")


def render_decisions(history: Sequence[EpochRecord]) -> str:
    """Return the table of all decisions but WAIT."""
    where = (*number_columns("Epoch"), Column("Operation"), Column("Slot"))
    columns = (*where, *word_columns("Arguments"), Column("Outcome"), *word_columns("Reason"))
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
    """Yield (first epoch, last epoch, decision); refusals in consecutive epochs are merged."""
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
    # Reasons may count epochs, so they are not compared; the last one is shown.
    return dataclasses.replace(one, reason="") == dataclasses.replace(other, reason="")


def _span(first: int, last: int) -> str:
    return format_count(first) if first == last else f"{format_count(first)}–{format_count(last)}"


def _worth_at_end(seed: SeedRecord, at_end: Mapping[str, tuple[float | None, float | None]]) -> str:
    if seed.fate in ("pruned", "dropped") or seed.slot not in at_end:
        return NOTHING
    return format_contribution(*at_end[seed.slot])


_TWIN = (
    "The twin had the same initial weights and the same data in the same order, and never grew. "
    "This is one run with one random seed, so the difference includes chance."
)

_CAPTION = (
    "One lane per slot. The colour is the stage, the height of the solid band is alpha, marks are "
    "decisions, names are blueprints. The number at the end of a seed is its contribution in "
    "points ± standard error, or a dash if it was never measured. An epoch reaches from the "
    "number before it to its own, so a decision is drawn where its effect begins. Point at a "
    "band, a mark or the curve for details."
)

_CONTRIBUTION = (
    "A contribution is the score that the network would lose if the seed were removed now. It is "
    "not the benefit of growing the seed: a host trained without it would depend on it less."
)
_GAIN = "The benefit of growing is the gain over the twin."

_NETWORK = (
    "Left: the modules of the host from input to output, with the shape of their output for one "
    "sample; modules without parameters are left out. Right: the slots at their outputs and the "
    "seeds in them{when}."
)


def render_report(
    history: Sequence[EpochRecord],
    summary: RunSummary | None,
    *,
    config: Mapping[str, Any],
    command: str,
    versions: Mapping[str, str],
    about: About | None = None,
    alarms: Sequence[AlarmGroup] = (),
    modules: Sequence[ModuleRecord] = (),
    at_end: Mapping[str, tuple[float | None, float | None]] | None = None,
) -> str:
    """Return the report of a run as one self-contained HTML page.

    Args:
        history: The epochs so far, in order.
        summary: The results of a finished run, else None.
        config: The complete settings.
        command: The command that repeats the run.
        versions: Versions of the software, by name.
        about: Further facts about the run.
        alarms: The alarms of the monitors.
        modules: The modules of the host, for a drawing.
        at_end: By slot, the contribution of its seed at the end in points, and its standard error.
    """
    about = about or About()
    seeds = _seeds(history, summary)
    title = heading(summary, about.task, about.kind)
    return render_page(
        title,
        _top(history, summary, seeds, about),
        *_pictures(history, summary, modules),
        *found_sections(alarms, about),
        *recorded_section(about),
        *_growth_sections(history, seeds, at_end or {}),
        *origin_sections(summary, config, command, versions, about),
    )


def _seeds(history: Sequence[EpochRecord], summary: RunSummary | None) -> tuple[SeedRecord, ...]:
    if summary is not None:
        return summary.seeds
    return seed_records(history)


def _top(
    history: Sequence[EpochRecord],
    summary: RunSummary | None,
    seeds: Sequence[SeedRecord],
    about: About,
) -> str:
    outcome = read_outcome(history, summary)
    if outcome is None:
        text = f"No epochs were recorded, {NOTHING_YET}"
        return paragraph("lead", "The recorded tables are listed below." if about.counts else text)
    missing = ""
    if not history:
        missing = paragraph("note", "There is no picture, because the epochs are missing.")
    elif summary is None:
        missing = paragraph("note", so_far("epoch", history[-1].epoch, about))
    controller = about.controller if summary is None else summary.controller
    why: tuple[str, ...] = ()
    kept = ""
    if summary is not None:
        why = why_not_grown(history, summary.kept_epoch, summary.stopped, summary.chance_loss)
        kept = _describe_kept(summary)
    is_deepened = bool(history) and history[-1].depth is not None
    blocks = deepening.describe_blocks(controller, history) if is_deepened else ""
    lead = render_lead(outcome, controller, seeds, why, kept, blocks)
    return lead + missing + render_figures(outcome, summary, seeds, history)


def _growth_sections(
    history: Sequence[EpochRecord],
    seeds: Sequence[SeedRecord],
    at_end: Mapping[str, tuple[float | None, float | None]],
) -> Iterator[str]:
    if seeds:
        has_twin = any(record.twin_score is not None for record in history)
        note = paragraph("note", f"{_CONTRIBUTION} {_GAIN}" if has_twin else _CONTRIBUTION)
        yield section("Seeds", render_seeds(seeds, at_end) + note)
    elif history and history[-1].depth is not None:
        yield section("Blocks", deepening.render_blocks(history))
    elif history:
        yield section("Seeds", "<p>No seed was germinated.</p>\n")
    sizes = best_by_size(history)
    if len(sizes) > 1:
        yield section("Sizes", render_sizes(sizes))
    if history and history[-1].depth is not None:
        return
    if any(record.decision is not None and record.decision.op != "WAIT" for record in history):
        yield section("Decisions", render_decisions(history))
    elif history:
        yield section("Decisions", "<p>The controller made no decision but WAIT.</p>\n")


def _pictures(
    history: Sequence[EpochRecord], summary: RunSummary | None, modules: Sequence[ModuleRecord]
) -> Iterator[str]:
    if history and history[-1].depth is not None:
        picture = draw_picture(history, title=deepening.TITLE, is_file=False)
        yield figure(picture, deepening.CAPTION)
    elif history:
        yield figure(draw_picture(history, title=DEFAULT_TITLE, is_file=False), _CAPTION)
    if not modules:
        return
    kept = None if summary is None else summary.kept_epoch
    slots = kept_record(history, kept).slots if history else ()
    is_last = not history or kept in (None, history[-1].epoch)
    when = " at the end" if is_last else f" in epoch {kept}"
    if summary is None:
        when = f" after epoch {history[-1].epoch}" if history else ""
    picture = draw_architecture(modules, slots, is_file=False)
    yield figure(picture, _NETWORK.format(when=when), "Architecture")
