"""Draws a network that is deepened: one lane per stack, and the training FLOPs.

A lane has one bar per block, from the step at which it woke, which may lie within an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from esper.leyline.reasons import format_stacks
from esper.leyline.records import DeepeningRecord, EpochRecord, RunSummary, StackRecord
from esper.nissa.report.chart import draw_path, make_point
from esper.nissa.report.lanes import Frame
from esper.nissa.report.markup import (
    Scale,
    counted,
    element,
    escaped,
    format_count,
    format_measure,
    format_share,
    label,
    rectangle,
    shortened,
    tooltip,
    visible,
)
from esper.nissa.report.page import MARGIN, ROW, Column, number_columns, render_table, word_columns

_BAND = 60.0
_GAP = 20.0
_COMPUTE = 110.0
_NAME_LENGTH = 40
_MOST_BARS = 24
"""With more blocks there is no space between the bars."""
_MOST_COUNTS = 8
MOST_STACKS = 12
"""Lanes drawn at most."""


@dataclass(slots=True)
class StackLane:
    """One stack: the number of blocks awake, by span of epochs."""

    name: str
    blocks: int
    spans: list[tuple[float, float, int]] = field(default_factory=list)

    def set(self, at: float, awake: int) -> None:
        """Set the number of blocks awake from here on."""
        if self.spans and self.spans[-1][2] != awake:
            begin, _, before = self.spans[-1]
            self.spans[-1] = (begin, at, before)
        if not self.spans or self.spans[-1][2] != awake:
            self.spans.append((at, at, awake))

    def extend(self, at: float) -> None:
        """Extend the last span up to here."""
        begin, _, awake = self.spans[-1]
        self.spans[-1] = (begin, at, awake)


def read_stacks(history: Sequence[EpochRecord]) -> list[StackLane]:
    """Return a lane for every stack of a network."""
    lanes: dict[str, StackLane] = {}
    epoch, step = float(history[0].epoch - 1) if history else 0.0, 0
    for record in history:
        depth = record.depth
        if depth is None:
            continue
        width, steps = record.epoch - epoch, max(1, depth.step - step)
        for stack in depth.stacks:
            lane = lanes.setdefault(stack.name, StackLane(stack.name, stack.blocks))
            woken = _woken(depth.deepenings, stack.name)
            within = [each for each in woken if each.step < depth.step]
            # The state at the start of the epoch: the epochs before may not have been read.
            lane.set(epoch, within[0].before if within else _began(lane, record, stack.awake))
            for each in within:
                lane.set(epoch + width * (each.step - step) / steps, each.after)
            lane.extend(record.epoch)
            lane.set(record.epoch, stack.awake)
            for each in woken[len(within) :]:
                lane.set(record.epoch, each.after)
        epoch, step = record.epoch, depth.step
    return list(lanes.values())


def _woken(deepenings: Sequence[DeepeningRecord], stack: str) -> list[DeepeningRecord]:
    return [each for each in deepenings if each.stack == stack and each.outcome == "done"]


def _began(lane: StackLane, record: EpochRecord, awake: int) -> int:
    """Return the blocks awake at the beginning of an epoch in which none woke."""
    # A network that was rolled back had its old depth until the end of the epoch.
    return lane.spans[-1][2] if record.rollback and lane.spans else awake


def awake_counts(lane: StackLane) -> str:
    """Return the numbers of blocks awake, as in "1 → 2 → 4 of 4"."""
    counts = [str(awake) for _, _, awake in lane.spans]
    if len(counts) > _MOST_COUNTS:
        counts = [*counts[: _MOST_COUNTS - 1], "…", counts[-1]]
    return f"{' → '.join(counts)} of {lane.blocks}"


def describe_lane(lane: StackLane) -> str:
    """Return in a sentence when the blocks of a stack woke."""
    (_, _, first), *later = lane.spans
    text = f"Stack {visible(lane.name)}: {first} of {lane.blocks} blocks awake at first"
    return ", ".join([text, *(f"{awake} from epoch {at:.4g} on" for at, _, awake in later)]) + "."


def draw_stacks(lanes: Sequence[StackLane], frame: Frame, top: float) -> tuple[list[str], float]:
    """Draw the lanes one below the other; return the drawing and where it ends."""
    drawing: list[str] = []
    for lane in lanes[:MOST_STACKS]:
        top += frame.row
        drawing.extend(_draw_lane(lane, frame, top))
        top += _BAND + _GAP
    if len(lanes) > MOST_STACKS:
        note = f"{len(lanes) - MOST_STACKS} more stacks not drawn"
        drawing.append(label(note, class_="muted", x=MARGIN, y=top, dy="1em"))
        top += frame.row + 4
    return drawing, top


def _draw_lane(lane: StackLane, frame: Frame, top: float) -> Iterator[str]:
    yield rectangle("well", frame.left, top, frame.right - frame.left, _BAND)
    yield from frame.gridlines(top, top + _BAND)
    bar = _BAND / lane.blocks
    space = 0.15 * bar if lane.blocks <= _MOST_BARS else 0.0
    for begin, end, awake in lane.spans:
        if end < frame.x.low or begin > frame.x.high:
            continue
        left, right = frame.at(begin), frame.at(end)
        text = f"{visible(lane.name)}: {awake} of {lane.blocks} blocks awake, epochs "
        parts = [tooltip(f"{text}{begin:.4g} to {end:.4g}")]
        parts += [
            rectangle(
                "fossilized",
                left,
                top + _BAND - (number + 1) * bar + space,
                right - left,
                bar - space,
            )
            for number in range(awake)
        ]
        yield element("g", *parts, class_="run")
    yield element(
        "text",
        tooltip(f"stack {visible(lane.name)}"),
        element("tspan", escaped(shortened(lane.name, _NAME_LENGTH)), class_="strong"),
        f" {awake_counts(lane)} blocks",
        x=MARGIN,
        y=top - 7,
    )


def draw_compute(
    history: Sequence[EpochRecord], frame: Frame, top: float
) -> tuple[list[str], float]:
    """Draw the training FLOPs against those of the static network; return where it ends."""
    shown = [(record.epoch, record.depth) for record in history if record.depth is not None]
    last = shown[-1][1]
    words = f"Training FLOPs: {describe_compute(last.flops, last.static_flops)} (dashed)"
    drawing = [label(words, class_="strong", x=MARGIN, y=top, dy=".9em")]
    top += ROW + 6
    whole = last.static_flops or 1.0
    y = Scale(0.0, 1.0, top + _COMPUTE, top)
    drawing.extend(frame.gridlines(top, top + _COMPUTE))
    for share, text in ((0.0, "0"), (0.5, ".5"), (1.0, "1")):
        at = y(share)
        drawing.append(element("line", class_="grid", x1=frame.left, x2=frame.right, y1=at, y2=at))
        drawing.append(
            label(
                text, class_="muted number", x=frame.left - 8, y=at, dy=".35em", text_anchor="end"
            )
        )
    for kind, flops in (
        ("curve twin", [depth.static_flops for _, depth in shown]),
        ("curve grown", [depth.flops for _, depth in shown]),
    ):
        epochs = [epoch for epoch, _ in shown]
        points = [make_point(at, one / whole) for at, one in zip(epochs, flops, strict=True)]
        drawing.append(draw_path(kind, [(frame.x.low, 0.0), *points], frame.x, y))
    drawing.extend(frame.axis(top + _COMPUTE))
    return drawing, top + _COMPUTE + ROW + 8


def describe_compute(spent: float, static: float, unit: str = "") -> str:
    """Return the training FLOPs and their share of the static network's."""
    text = f"{format_flops(spent)}{unit}"
    if not static:
        return text
    share = format_share(spent, static)
    return f"{text}, {share} of the {format_flops(static)} with all blocks awake"


def budget_tiles(summary: RunSummary | None) -> list[tuple[str, str, str]]:
    """Return what a run has spent of its budget of compute; nothing without one."""
    if summary is None or not summary.training_flops or not summary.compute_budget:
        return []
    share = summary.training_flops / summary.compute_budget
    budget = f"{share:.0%} of the budget of {format_flops(summary.compute_budget)}"
    return [("Training FLOPs", format_flops(summary.training_flops), budget)]


def format_flops(flops: float) -> str:
    """Return a number of FLOPs with a unit prefix, such as 5.00 G."""
    for size, word in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= size:
            return f"{format_measure(flops / size)} {word}"
    return format_measure(flops)


# ---- Texts and tables


_NAME_LENGTH_DEEPENING = 60

TITLE = "Score and blocks over the epochs"
CAPTION = (
    "One lane per stack: each bar is a block, from the step at which it woke as a copy of a block "
    "that was awake. Sleeping blocks cost nothing. An epoch reaches from the number before it to "
    "its own. Point at a bar or the curve for details."
)
TWIN = (
    "The twin is the static network: the same initial weights and the same data in the same order, "
    "all blocks awake from the first step. This is one run with one random seed, so the difference "
    "includes chance."
)


def describe_blocks(controller: str | None, history: Sequence[EpochRecord]) -> str:
    """Return in two sentences how a network was deepened, and its training FLOPs."""
    who = (
        "a rule"
        if controller is None
        else f"the rule {shortened(controller, _NAME_LENGTH_DEEPENING)}"
    )
    lanes = read_stacks(history)
    parts = [
        f"{awake_counts(one)} blocks in {shortened(one.name, _NAME_LENGTH_DEEPENING)}"
        for one in lanes
    ]
    over = counted(len(history), "epoch")
    depth = history[-1].depth
    assert depth is not None, "its epochs have stacks"
    took = describe_compute(depth.flops, depth.static_flops, " FLOPs")
    return f"In {over} {who} woke {'; '.join(parts)}. Training took {took}."


def block_tiles(
    stacks: Sequence[StackRecord], flops: float | None, static: float | None
) -> list[tuple[str, str, str]]:
    """Return the main figures of a deepened network as tiles."""
    tiles = [("Blocks awake", format_stacks(stacks).removesuffix(" blocks"), "")]
    if flops:
        share = f"{format_share(flops, static)} of the static network's" if static else ""
        tiles.append(("Training FLOPs", format_flops(flops), share))
    return tiles


def render_blocks(history: Sequence[EpochRecord]) -> str:
    """Return the table of when blocks woke, refusals included."""
    columns = (
        *number_columns("Epoch", "After step"),
        Column("Stack"),
        *number_columns("Blocks before", "Blocks after"),
        *word_columns("What happened"),
    )
    rows = [
        (
            record.epoch,
            format_count(each.step),
            each.stack,
            each.before,
            each.after,
            each.reason,
        )
        for record in history
        if record.depth is not None
        for each in record.depth.deepenings
    ]
    return render_table("When blocks woke", columns, rows, noun="moment")
