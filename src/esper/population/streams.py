"""Independent work of one slot side by side on the device.

Small kernels leave most of a device idle. Seeds of different blueprints do not depend on one
another, so each may have a stream of its own; autograd takes the way back on the same streams, and
a captured step keeps them apart as branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Job = tuple[Callable[[Tensor], Tensor], Tensor]
"""A function and the activation it works on."""

_SMALL = 2**24
"""Bytes of an activation above which one job alone fills the device."""


class CudaStreams:
    """Streams that jobs take turns on; without any, jobs run one after another."""

    def __init__(self, count: int = 0) -> None:
        """Create `count` streams on the current CUDA device."""
        self._streams = [torch.cuda.Stream() for _ in range(count)]

    def run(self, jobs: Sequence[Job]) -> list[Tensor]:
        """Return what the functions return for their activations."""
        largest = max((x.numel() * x.element_size() for _, x in jobs), default=0)
        if not self._streams or largest > _SMALL or len(jobs) < 2:
            return [function(x) for function, x in jobs]
        here = torch.cuda.current_stream()
        used = self._streams[: len(jobs)]
        for stream in used:
            stream.wait_stream(here)
        results = []
        for number, (function, x) in enumerate(jobs):
            stream = used[number % len(used)]
            # Its memory must not be given away while its stream still reads it.
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                results.append(function(x))
        for stream in used:
            here.wait_stream(stream)
        return results
