"""What the blocks of a stack return while they sleep, learned from watching their calls."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from esper.growth.depth.sleeping import Output
from esper.kasmina.calls import Call, Source, is_plain


def learn_output(calls: list[Call]) -> Output | str:
    """Return what the blocks of a run return while they sleep, or why that cannot be said."""
    outputs = [_output_of(call, after) for call, after in pairwise(calls)]
    if any(isinstance(output, str) for output in outputs):
        return next(output for output in outputs if isinstance(output, str))
    if any(output != outputs[0] for output in outputs):
        return "its blocks return different things"
    output = outputs[0]
    assert isinstance(output, Output)
    for call in calls[1:]:
        if len(call.parts) != len(output.parts):
            return "its blocks return different things"
        for source, part in zip(output.parts, call.parts, strict=True):
            given = source.read(call.args, call.kwargs)
            if isinstance(part, Tensor) and getattr(given, "shape", None) != part.shape:
                return "its blocks change the shape of what they are given"
    return output


def _output_of(call: Call, after: Call) -> Output | str:
    """Learn from a call, and from the call that follows, which input stands for which output."""
    parts = []
    for part in call.parts:
        # What the next block takes as its hidden state, this one takes by the same name.
        source = None if is_plain(part) else after.source_of(part) or call.source_of(part)
        if source is None and isinstance(part, Tensor):
            return (
                "its blocks return a tensor that the next one does not take; asleep they have none"
            )
        if source is None and not is_plain(part):
            return f"its blocks return a {type(part).__name__}; let them return tensors or a tuple"
        parts.append(source or Source(value=part))
    form = type(call.output) if type(call.output) in (tuple, list) else None
    return Output(tuple(parts), form)
