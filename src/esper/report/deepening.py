"""What the report of a deepened network says in words: when blocks woke, and what it took."""

from __future__ import annotations

from collections.abc import Sequence

from esper.leyline.records import EpochRecord, StackRecord, told_stacks
from esper.report.markup import counted, format_count, format_share, shortened
from esper.report.page import Column, number_columns, render_table, word_columns
from esper.report.stacks import format_flops, read_stacks, tell_compute, told_counts

_NAME_LENGTH = 60

TITLE = "Score and blocks over the epochs"
CAPTION = (
    "A lane for every stack: each bar is a block, from the step at which it woke as a copy of one "
    "that was awake. Blocks that sleep cost nothing. An epoch reaches from the number before it to "
    "its own. Rest the pointer on a bar or the curve to read more."
)
TWIN = (
    "The twin is the static network: the same initial weights and the same data in the same order, "
    "all blocks awake from the first step. This is one run with one random seed: the difference "
    "includes chance."
)


def tell_blocks(controller: str | None, history: Sequence[EpochRecord]) -> str:
    """Return in two sentences how a network was deepened, and what that took."""
    who = "a rule" if controller is None else f"the rule {shortened(controller, _NAME_LENGTH)}"
    lanes = read_stacks(history)
    told = [f"{told_counts(one)} blocks of {shortened(one.name, _NAME_LENGTH)}" for one in lanes]
    over = counted(len(history), "epoch")
    depth = history[-1].depth
    assert depth is not None, "its epochs have stacks"
    took = tell_compute(depth.flops, depth.static_flops, " FLOPs")
    return f"In {over} {who} woke {'; '.join(told)}. Training took {took}."


def block_tiles(
    stacks: Sequence[StackRecord], flops: float | None, static: float | None
) -> list[tuple[str, str, str]]:
    """Return the numbers to remember of a deepened network, as tiles."""
    tiles = [("Blocks awake", told_stacks(stacks).removesuffix(" blocks"), "")]
    if flops:
        share = f"{format_share(flops, static)} of the static network's" if static else ""
        tiles.append(("Training FLOPs", format_flops(flops), share))
    return tiles


def render_blocks(history: Sequence[EpochRecord]) -> str:
    """Return the table of all moments at which blocks woke, or were to."""
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
