"""The text of `print(depth)`: blocks awake, steps, and the compute saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from esper.growth.depth.rules import Plateau, Schedule, Slope
from esper.tamiyo.controllers.slope import LATEST


def describe_last_wake(
    rule: object,
    total_steps: int | None,
    start: Mapping[str, int],
    double: Callable[[Mapping[str, int]], Mapping[str, int]],
) -> str:
    """Return when the last blocks wake, as the end of a sentence; empty if that is not known."""
    if isinstance(rule, Schedule) and (total_steps is not None or rule.at):
        last = max(rule.moments(total_steps, start, double), default=0)
        return f"; the last blocks wake at step {last:,}"
    if isinstance(rule, Plateau | Slope) and total_steps is not None:
        return f"; the last blocks wake by step {math.ceil(LATEST * total_steps):,}"
    return ""


def describe_unknown(stacks: str | Sequence[str], loaded: Mapping[str, Any] | None) -> str:
    """Return the text before the first batch, when stacks are not known.

    Args:
        stacks: what the user chose.
        loaded: the state that will be restored, if any.
    """
    text = f"Deepen(stacks={stacks!r}, found on the first batch"
    if loaded is None:
        return f"{text})"
    awake, blocks = loaded["awake"], loaded["blocks"]
    parts = ", ".join(f"{name}: {awake[name]} of {blocks[name]} blocks awake" for name in blocks)
    return f"{text}; goes on after step {loaded['step']:,} with {parts})"


def describe_run(
    *,
    steps: int,
    total_steps: int | None,
    outlook: str,
    awake: Mapping[str, int],
    blocks: Mapping[str, int],
    start: Mapping[str, int],
    history: Sequence[Mapping[str, Any]],
    flops: tuple[float, float] | None,
) -> str:
    """Return the text during and after a run: a line for steps, for each stack and for FLOPs.

    Args:
        steps: optimizer steps done.
        total_steps: those of the whole run, if known.
        outlook: when the last blocks wake, or why none do; empty if all are awake.
        awake: blocks awake, by stack.
        blocks: all blocks, by stack.
        start: blocks awake at first, by stack.
        history: growths, as `Deepen.history` has them.
        flops: FLOPs spent, and those if all blocks had been awake; None before they are known.
    """
    of = "" if total_steps is None else f" of {total_steps:,}"
    lines = [f"Deepen: {steps:,}{of} optimizer steps{outlook}"]
    for name, count in blocks.items():
        stages = _stages(name, start[name], history)
        lines.append(f"  {name}: {awake[name]} of {count} blocks awake{stages}")
    if flops is not None and steps:
        spent, static = flops
        saved = f", {1.0 - spent / static:.0%} saved" if static else ""
        lines.append(
            f"  training FLOPs: {spent:.3g}; with all blocks awake from the start {static:.3g}"
            f"{saved}"
        )
    return "\n".join(lines)


def _stages(name: str, start: int, history: Sequence[Mapping[str, Any]]) -> str:
    """Return how many blocks of a stack were awake from which step; empty if none woke."""
    parts, before = [f"{start} at first"], start
    for event in history:
        if event["awake"][name] != before:
            before = event["awake"][name]
            parts.append(f"{before} from step {event['step']:,}")
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""
