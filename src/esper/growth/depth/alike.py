"""Which blocks of a list are alike, and in which period their kinds repeat."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import nn

from esper.kasmina.calls import is_plain

Fingerprint = tuple[Any, ...]


def runs(prints: list[Fingerprint], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, period) of the longest runs of like blocks within a range."""
    best = (0, 0, 0)
    for period in range(1, (last - first) // 2 + 1):
        start = first
        for index in range(first, last):
            if index + period >= last or prints[index] != prints[index + period]:
                stop = index + period
                # The longest run; of equally long ones that with the shortest period.
                if stop - start >= 2 * period and stop - start > best[1] - best[0]:
                    best = (start, min(stop, last), period)
                start = index + 1
    if best[2]:
        yield from runs(prints, first, best[0])
        yield best
        yield from runs(prints, best[1], last)


def fingerprints(blocks: list[nn.Module]) -> list[Fingerprint]:
    """Return what makes blocks alike: class, shapes, and all settings but those that count up."""
    settings = [_settings(block) for block in blocks]
    counting = {
        kind: _counting([(i, settings[i]) for i, one in enumerate(blocks) if type(one) is kind])
        for kind in set(map(type, blocks))
    }
    return [
        (
            type(block),
            tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters()),
            tuple((name, tuple(b.shape), b.dtype) for name, b in block.named_buffers()),
            tuple((key, value) for key, value in own.items() if key not in counting[type(block)]),
        )
        for block, own in zip(blocks, settings, strict=True)
    ]


def _counting(settings: list[tuple[int, dict[str, Any]]]) -> set[str]:
    """Return the settings that number the blocks, or rise or fall evenly like rates of drop path.

    The first block may be another one than the rest.
    """
    found = set()
    for some in (settings, settings[1:]):
        if len(some) < 2:
            continue
        for key in some[0][1]:
            values: list[Any] = [own.get(key) for _, own in some]
            if all(type(value) is int for value in values):
                if len({own[key] - index for index, own in some}) == 1:
                    found.add(key)
            elif all(isinstance(value, float) for value in values):
                steps = [after > before for before, after in pairwise(values)]
                if len(set(values)) == len(values) and len(set(steps)) == 1:
                    found.add(key)
    return found


def _settings(block: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a block and of all within it, by their paths."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and is_plain(value)
    } | {path: type(module) for path, module in block.named_modules()}


def difference(names: list[str], blocks: list[nn.Module]) -> str:
    """Say in what two blocks of one class differ that follow one another."""
    prints = fingerprints(blocks)
    for index, (one, other) in enumerate(pairwise(prints)):
        if one == other or one[0] is not other[0]:
            continue
        where = f"{names[index]} and {names[index + 1]} differ"
        if one[1:3] != other[1:3]:
            return f"{where} in the shapes of their parameters"
        for (key, value), (_, another) in zip(one[3], other[3], strict=False):
            if value != another:
                return f"{where}: {key} is {value} and {another}"
    return "its blocks are of different classes"
