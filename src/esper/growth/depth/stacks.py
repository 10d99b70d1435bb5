"""Stacks: runs of blocks that can sleep and be copied, found by watching one forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn

from esper.growth.depth.blocks import Output, learn_output
from esper.kasmina.calls import Call, has_residual_path, is_plain, watch
from esper.kasmina.slots.arguments import example_inputs
from esper.kasmina.slots.probe import call_arguments, shapes_of, tensors_in
from esper.leyline.errors import UsageError, describe_exception
from esper.utils.randomness import drawing

# ---- Equal blocks of a list, and the period in which their kinds repeat


Fingerprint = tuple[Any, ...]


def runs(prints: list[Fingerprint], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, period) of the longest runs of equal blocks within a range."""
    best = (0, 0, 0)
    for period in range(1, (last - first) // 2 + 1):
        start = first
        for index in range(first, last):
            if index + period >= last or prints[index] != prints[index + period]:
                stop = index + period
                # The longest run; of equally long ones the shortest period.
                if stop - start >= 2 * period and stop - start > best[1] - best[0]:
                    best = (start, min(stop, last), period)
                start = index + 1
    if best[2]:
        yield from runs(prints, first, best[0])
        yield best
        yield from runs(prints, best[1], last)


def fingerprints(blocks: list[nn.Module]) -> list[Fingerprint]:
    """Return what equal blocks share: class, shapes, and settings that do not count up."""
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
    """Return the settings that number the blocks, or rise or fall, such as rates of drop path.

    The first block may differ from the rest.
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
    """Return the plain attributes of a block and its submodules, by path."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and is_plain(value)
    } | {path: type(module) for path, module in block.named_modules()}


def difference(names: list[str], blocks: list[nn.Module]) -> str:
    """Return how two successive blocks of one class differ."""
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
    classes = dict.fromkeys(type(block).__name__ for block in blocks)
    return f"its blocks are of different classes: {', '.join(classes)}"


@dataclass(frozen=True, slots=True)
class Stack:
    """A run of blocks in one `ModuleList` or `Sequential`, each called on the last one's output."""

    name: str
    """Name of the list in the model, with the range of blocks if a list has two runs."""
    blocks: tuple[str, ...]
    """Names of the blocks in the model."""
    period: int
    """Number of blocks after which their kinds repeat: 2 if two kinds alternate."""
    output: Output
    """The output of a sleeping block."""

    @property
    def container(self) -> str:
        """Name of the list that holds the blocks; empty if that is the model itself."""
        return self.blocks[0].rpartition(".")[0]


@dataclass(slots=True)
class FoundStacks:
    """The stacks of a model, and why other lists of blocks are not stacks."""

    stacks: dict[str, Stack] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def choose(self, names: str | Sequence[str]) -> dict[str, Stack]:
        """Return the stacks of these names, or all for 'auto'; refuse other names."""
        if names == "auto":
            if not self.stacks:
                why = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
                raise UsageError(
                    "the model has no stack that can be deepened; Deepen needs blocks of one class "
                    "and shape in a row in an nn.ModuleList or nn.Sequential"
                    + (f" ({why})" if why else "; other networks can grow modules (esper.grow)")
                )
            return dict(self.stacks)
        chosen = [names] if isinstance(names, str) else list(names)
        for name in chosen:
            if name not in self.stacks:
                known = ", ".join(self.stacks) or "none"
                reason = self.reasons.get(name, "no list of equal blocks has this name")
                raise UsageError(f"{name!r} cannot be deepened: {reason}; stacks found: {known}")
        return {name: self.stacks[name] for name in chosen}


def find_stacks(model: nn.Module, example: Any) -> dict[str, int]:
    """Return the stacks of a model that can be deepened, with their numbers of blocks.

    It runs the model once on the example. A stack is a run of blocks of one class and shape in an
    `nn.ModuleList` or `nn.Sequential`. Each is called once, on the output of the block before it,
    and has a residual path.

    Args:
        model: the network at its final size.
        example: one batch: a tensor, a tuple of arguments or a dict of them.
    """
    found = find_by_example(model, example)
    return {name: len(stack.blocks) for name, stack in found.stacks.items()}


def find_by_example(model: nn.Module, example: Any) -> FoundStacks:
    """Find stacks on an example; refuse one that the model cannot take."""
    args, kwargs = call_arguments(example_inputs(model, example))
    try:
        return find(model, args, kwargs)
    except Exception as error:
        raise UsageError(
            f"the model cannot take the example {shapes_of(example)}: "
            f"{describe_exception(error)}; give one batch of its inputs"
        ) from error


def find(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], path: str = ""
) -> FoundStacks:
    """Run a model once, and find which of its lists are stacks and why others are not.

    If it is part of another model, `path` is its name there, and names are those in the whole.
    """
    lists = {name: _children(name, one) for name, one in block_lists(model, path)}
    blocks = {name: block for children in lists.values() for name, block in children.items()}
    found = FoundStacks()
    device = next((one.device for one in tensors_in((args, kwargs))), torch.device("cpu"))
    # Warnings about a pass without gradients would only confuse the user.
    with torch.no_grad(), drawing(device, "stacks"), _buffers_kept(model), catch_warnings():
        simplefilter("ignore")
        calls = watch(model, blocks, args, kwargs)
        for container, children in lists.items():
            # Lists inside a block of a stack sleep and wake with it.
            prefixes = (f"{name}." for stack in found.stacks.values() for name in stack.blocks)
            if not any(f"{container}.".startswith(prefix) for prefix in prefixes):
                _find_in(container, children, calls, found)
    _note_single_blocks(model, path, found)
    _note_recurrent_layers(model, path, found)
    return found


def _note_single_blocks(model: nn.Module, path: str, found: FoundStacks) -> None:
    """Give lists of one block their reason, instead of those of lists inside the block."""
    for name, module in model.named_modules(prefix=path):
        is_single = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) == 1
        inside = f"{name}."
        has_stacks = any(stack.container.startswith(inside) for stack in found.stacks.values())
        # A single layer is no block.
        if name and is_single and len(list(module.modules())) > 2 and not has_stacks:
            others = {n: why for n, why in found.reasons.items() if not n.startswith(inside)}
            found.reasons = {**others, name: "it has only one block"}


def _note_recurrent_layers(model: nn.Module, path: str, found: FoundStacks) -> None:
    """Give recurrent modules of several layers their reason: PyTorch keeps these in one module."""
    for name, module in model.named_modules(prefix=path):
        if isinstance(module, nn.RNNBase) and module.num_layers > 1:
            found.reasons[name or "the model"] = (
                f"its {module.num_layers} layers are one nn.{type(module).__name__}; put each "
                "layer into a block of its own that returns x + self.rnn(x)[0]"
            )


def block_lists(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the lists of modules in a model, outermost first."""
    for name, module in model.named_modules(prefix=path):
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            yield name, module


def _children(name: str, container: nn.Module) -> dict[str, nn.Module]:
    prefix = f"{name}." if name else ""
    return {f"{prefix}{key}": child for key, child in container._modules.items() if child}


def _find_in(
    container: str,
    children: Mapping[str, nn.Module],
    calls: Mapping[str, list[Call]],
    found: FoundStacks,
) -> None:
    """Add the stacks of one list of blocks, or the reason why it has none."""
    names, blocks = list(children), list(children.values())
    prints = fingerprints(blocks)
    alike = Counter(type(block) for block in blocks if any(True for _ in block.parameters()))
    if not alike or max(alike.values()) < 2:
        return
    reasons: list[str] = []
    stacks: list[tuple[list[str], int, Output]] = []
    for first, last in _linked(names, blocks, calls, reasons):
        for start, stop, period in runs(prints, first, last):
            run = names[start:stop]
            if not any(True for name in run for _ in children[name].parameters()):
                continue
            output = learn_output([calls[name][0] for name in run])
            if isinstance(output, str):
                reasons.append(output)
            elif lacking := _without_residual(run[:period], children, calls, output):
                reasons.append(
                    f"{lacking} has no residual path, which a copy needs; let the block return "
                    "x + f(x)"
                )
            else:
                stacks.append((run, period, output))
    if not stacks:
        reasons.append(difference(names, blocks))
        found.reasons[container or "the model"] = next(reason for reason in reasons if reason)
    for run, period, output in stacks:
        name = container or "the model"
        if len(stacks) > 1:
            name += f"[{names.index(run[0])}:{names.index(run[-1]) + 1}]"
        found.stacks[name] = Stack(name, tuple(run), period, output)


def _without_residual(
    names: list[str],
    children: Mapping[str, nn.Module],
    calls: Mapping[str, list[Call]],
    output: Output,
) -> str | None:
    """Return the first of these blocks without a residual path."""
    for name in names:
        call = calls[name][0]
        made = [part for part in call.parts if isinstance(part, Tensor)]
        hidden = [
            source
            for source, part in zip(output.parts, call.parts, strict=True)
            if isinstance(part, Tensor) and (call.source_of(part) is None or len(made) == 1)
        ]
        if not has_residual_path(children[name], call, hidden):
            return name
    return None


def _linked(
    names: list[str],
    blocks: list[nn.Module],
    calls: Mapping[str, list[Call]],
    reasons: list[str],
) -> Iterator[tuple[int, int]]:
    """Yield the ranges of blocks that are called once, each on the last one's output."""
    owners = Counter(id(parameter) for block in blocks for parameter in block.parameters())

    def is_link(index: int) -> bool:
        name, after = names[index], names[index + 1]
        for one, block in ((name, blocks[index]), (after, blocks[index + 1])):
            if any(owners[id(parameter)] > 1 for parameter in block.parameters()):
                reasons.append(f"{one} shares parameters with another block; untie them")
                return False
            if len(calls[one]) != 1:
                reasons.append(f"{one} is called {len(calls[one])} times in a pass, not once")
                return False
        before, then = calls[name][0], calls[after][0]
        if not any(isinstance(p, Tensor) and then.source_of(p) for p in before.parts):
            reasons.append(
                f"the input of {after} is not the output of {name}; move what is done between "
                "blocks, such as x = x + block(x), into the block"
            )
            return False
        return True

    links = [is_link(index) for index in range(len(blocks) - 1)]
    start = 0
    for index, is_linked in enumerate([*links, False]):
        if not is_linked:
            if index > start:
                yield start, index + 1
            start = index + 1


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model (running statistics, counters) after the block."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, values in kept:
            buffer.copy_(values)
