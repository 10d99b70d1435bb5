"""Finds whether a model is causal or equivariant at its slots, by running it.

The positions of a slot are followed through the model: an axis of a module's input or output
belongs to them if its length changes with the slot's. In a causal model, noise at later positions
of all these tensors must not reach an earlier position. In an equivariant one, reordering the
inputs must reorder the slot's activation and the model's outputs.

All modules are looked at, not only inputs and outputs. So a class token in an image model and
attention behind a projection that starts at zero are noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.slots.probe import (
    axis_size,
    call_arguments,
    changed_entries,
    first_tensor,
    hooked,
    map_tensors,
    noise_like,
    resized,
    tensors_along,
    tensors_in,
    trying,
)
from esper.leyline.slots import Axes, Symmetry, symmetry_of

Where = tuple[str, int, str]
"""(module, number of the call, "in" or "out"); the model's outputs are ("", number, "end")."""

Selection = tuple[tuple[int, ...], ...]
"""For every tensor of an example, the axes that hold the positions."""

_MOST_LENGTHS = 6
"""Most input axes of another size than the slot's that are tried as its positions."""

_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Largest change, as a share of the largest value, that counts as rounding in a causal model; 0 in
lower precisions, where equal operations on equal numbers give equal bits."""

_REORDERED = {torch.float32: 1e-4, torch.float64: 1e-9}
"""The same where sums are taken in another order."""
_REORDERED_COARSE = 3e-2


def find_symmetries(
    model: nn.Module,
    example: Any,
    batch_axis: int,
    slots: Mapping[str, tuple[Axes, tuple[int, ...]]],
) -> dict[str, Symmetry]:
    """Return the symmetry at each submodule behind which a slot is to be.

    Args:
        model: the host.
        example: one batch of its inputs.
        batch_axis: the axis of the inputs that holds the samples.
        slots: axes and shape of the output of each of these submodules.

    Vectors have no positions. Images are only tested for reordered rows or columns (such as points
    in [B, C, N, 1]). A sequence that cannot be tested, of one position for instance, counts as
    causal.
    """
    probe = _Probe(model, example, batch_axis)
    found: dict[str, Symmetry] = {}
    for path, (axes, shape) in slots.items():
        if axes.topology == "vector":
            found[path] = "bidirectional"
        elif axes.topology == "sequence":
            axis = next(i for i, name in enumerate(axes.name) if name in "TL")
            found[path] = probe.sequence(path, axis, shape[axis])
        else:
            places = [i for i, name in enumerate(axes.name) if name in "HW" and shape[i] > 1]
            reorders = any(probe.is_reordered(path, i, shape[i], None) for i in places)
            found[path] = symmetry_of(causal=False, equivariant=reorders)
    return found


@dataclass(slots=True)
class _Pass:
    """Activations of one pass, by place."""

    tensors: dict[Where, Tensor] = field(default_factory=dict)
    is_whole: bool = False

    def shapes(self) -> dict[Where, tuple[int, ...]]:
        return {where: tuple(tensor.shape) for where, tensor in self.tensors.items()}


Change = Callable[[Where, Tensor], Tensor]


class _Probe:
    """Passes through a model, shared by all of its slots."""

    def __init__(self, model: nn.Module, example: Any, batch_axis: int) -> None:
        self._model = model
        self._modules = {name: module for name, module in model.named_modules() if name}
        self._batch_axis = batch_axis
        self._example = example
        self._plain: dict[int, tuple[Any, _Pass]] = {}
        self._known: dict[Any, Symmetry] = {}

    # -- questions -------------------------------------------------------------------------------

    def sequence(self, path: str, axis: int, length: int) -> Symmetry:
        """Return the symmetry along the positions of a sequence."""
        example, plain = self._start(length)
        slot: Where = (path, 0, "out")
        if length < 2 or slot not in plain.tensors or plain.tensors[slot].is_meta:
            return "causal"
        selection, followed = self._follow(example, plain, slot, axis, length)
        streams = _streams(plain, followed, slot, axis, length)
        key = (length, selection, tuple(sorted(streams.items())))
        if key not in self._known:
            self._known[key] = self._sequence(example, plain, streams, selection, slot, length)
        return self._known[key]

    def _sequence(
        self,
        example: Any,
        plain: _Pass,
        streams: dict[Where, tuple[int, ...]],
        selection: Selection | None,
        slot: Where,
        length: int,
    ) -> Symmetry:
        split = length // 2
        later, earlier = range(split, length), range(split)
        sees_later = self._reaches(example, plain, streams, selection, length, later, earlier)
        if sees_later is None:
            return "causal"
        sees_earlier = self._reaches(example, plain, streams, selection, length, earlier, later)
        answers = [where for where in plain.tensors if where[2] == "end"]
        by_position = any(where in streams for where in answers)
        # Where positions do not interact before one output about all of them, that output mixes
        # them.
        causal = not sees_later and (bool(sees_earlier) or by_position)
        if causal and sees_earlier:
            return "causal"
        (axis,) = streams[slot]
        reorders = self.is_reordered(slot[0], axis, length, streams, selection)
        return symmetry_of(causal=causal, equivariant=reorders)

    def is_reordered(
        self,
        path: str,
        axis: int,
        length: int,
        streams: dict[Where, tuple[int, ...]] | None,
        selection: Selection | None = None,
    ) -> bool:
        """Return whether reordered inputs reorder a slot's activation and nothing else."""
        example, plain = self._start(length)
        slot: Where = (path, 0, "out")
        if slot not in plain.tensors or plain.tensors[slot].is_meta:
            return False
        everywhere = _axes_of_size(example, length, self._batch_axis)
        # Inputs may have several axes of this size of which only the first holds positions.
        first = tuple(axes[:1] for axes in everywhere)
        order = torch.randperm(length, generator=torch.Generator().manual_seed(1)).roll(1)
        if bool((order == torch.arange(length)).all()):
            order = order.roll(1)
        tried: list[Selection] = []
        for one in (selection, everywhere, first):
            if one is None or one in tried or not any(one):
                continue
            tried.append(one)
            if any(s != length for s in _selected_sizes(example, one)):
                continue
            # Equal entries would look the same in any order.
            base = _changed_inputs(example, one, range(length))
            start, other = self._run(base), self._run(_reordered(base, one, order))
            if not (start.is_whole and other.is_whole) or slot not in start.tensors:
                continue
            known = streams or _streams(start, None, slot, axis, length)
            if _is_reordered(start, other, {**known, slot: (axis,)}, slot, order):
                return True
        return False

    # -- passes ----------------------------------------------------------------------------------

    def _start(self, length: int) -> tuple[Any, _Pass]:
        """Return an example of a few samples, not as many as there are positions, and its pass."""
        samples = 2 if length != 2 else 3
        if samples not in self._plain:
            size = axis_size(self._example, self._batch_axis)
            which = tensors_along(self._example, self._batch_axis, size)
            example = resized(self._example, which, self._batch_axis, samples) if size else None
            plain = _Pass() if example is None else self._run(example)
            if not plain.is_whole:
                # It takes batches of one size only.
                example, plain = self._example, self._run(self._example)
            self._plain[samples] = example, plain
        return self._plain[samples]

    def _run(self, example: Any, change: Change | None = None) -> _Pass:
        """Run the model once; `change` may replace activations after they were recorded."""
        seen = _Pass()
        calls: Counter[str] = Counter()

        def look(where: Where, tensor: Any) -> Tensor | None:
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                return None
            # A copy: later modules may work in place.
            seen.tensors[where] = tensor.clone()
            return None if change is None else change(where, tensor)

        def before(path: str, module: nn.Module, args: Any) -> Any:
            new = look((path, calls[path], "in"), args[0]) if args else None
            return None if new is None else (new, *args[1:])

        def after(path: str, module: nn.Module, args: Any, output: Any) -> Any:
            new = look((path, calls[path], "out"), first_tensor(output))
            calls[path] += 1
            if new is None or isinstance(output, Tensor):
                return new
            return type(output)([new, *output[1:]]) if type(output) in (tuple, list) else None

        args, kwargs = call_arguments(example)
        try:
            hooks = hooked(self._modules, after, before)
            with hooks, trying(self._model, example), torch.no_grad():
                answers = self._model(*args, **kwargs)
        except Exception:
            # A user's model may refuse any batch but its own; activations up to there are known.
            return seen
        for number, tensor in enumerate(tensors_in(answers)):
            seen.tensors["", number, "end"] = tensor.clone()
        seen.is_whole = True
        return seen

    def _follow(
        self, example: Any, plain: _Pass, slot: Where, axis: int, length: int
    ) -> tuple[Selection | None, _Pass | None]:
        """Return the input axes that the slot's positions come from, and a pass of another length.

        Both are None where the model takes one length only.
        """
        halfway: tuple[Selection, _Pass] | None = None
        for selection in _selections(example, length, self._batch_axis):
            shorter = _resized(example, selection)
            other = self._run(shorter)
            tensor = other.tensors.get(slot)
            rank = plain.tensors[slot].dim()
            if tensor is None or tensor.dim() != rank or tensor.shape[axis] == length:
                continue
            if other.is_whole:
                return selection, other
            halfway = halfway or (selection, other)
        return halfway or (None, None)

    def _reaches(
        self,
        example: Any,
        plain: _Pass,
        streams: dict[Where, tuple[int, ...]],
        selection: Selection | None,
        length: int,
        source: range,
        target: range,
    ) -> bool | None:
        """Return whether noise at some positions reaches others; None where the run failed."""
        draw = torch.Generator().manual_seed(0)

        def disturb(where: Where, tensor: Tensor) -> Tensor | None:
            if len(streams.get(where, ())) != 1:
                return None
            (axis,) = streams[where]
            changed = tensor.clone()
            part = changed.narrow(axis, source.start, len(source))
            part += noise_like(part, tensor, draw)
            return changed

        chosen = selection or _axes_of_size(example, length, self._batch_axis)
        if any(size != length for size in _selected_sizes(example, chosen)):
            chosen = tuple(() for _ in chosen)
        seen = self._run(_changed_inputs(example, chosen, source), disturb)  # type: ignore[arg-type]
        if not seen.is_whole:
            return None
        for where, axes in streams.items():
            one, other = plain.tensors[where], seen.tensors.get(where)
            if other is None or other.shape != one.shape or len(axes) != 1:
                continue
            parts = [t.narrow(axes[0], target.start, len(target)) for t in (one, other)]
            if _differs(parts[0], parts[1], _ROUNDING.get(one.dtype, 0.0)):
                return True
        return False


# -- which axes hold the positions ----------------------------------------------------------------


def _streams(
    plain: _Pass, followed: _Pass | None, slot: Where, axis: int, length: int
) -> dict[Where, tuple[int, ...]]:
    """Return the axes of all activations that hold the slot's positions."""
    shapes = {} if followed is None else followed.shapes()
    found: dict[Where, tuple[int, ...]] = {}
    for where, tensor in plain.tensors.items():
        shape = tuple(tensor.shape)
        sized = tuple(i for i, size in enumerate(shape) if size == length)
        other = shapes.get(where)
        if other is not None and len(other) == len(shape):
            sized = tuple(i for i in sized if other[i] != length)
        elif followed is not None and followed.is_whole:
            sized = ()
        elif len(shape) < 3 or len(sized) > 1:
            # Positions and channels cannot be told apart.
            sized = ()
        if sized:
            found[where] = sized
    return {**found, slot: (axis,)}


def _axes_of_size(example: Any, length: int, batch_axis: int) -> Selection:
    """Return all axes of this size but that of the samples."""
    return tuple(
        tuple(i for i, size in enumerate(t.shape) if i != batch_axis and size == length)
        for t in tensors_in(example)
    )


def _selections(example: Any, length: int, batch_axis: int) -> list[Selection]:
    """Return the input axes that may hold the positions, the simplest selection first."""
    shapes = [tuple(tensor.shape) for tensor in tensors_in(example)]
    places = [(n, axis, size) for n, shape in enumerate(shapes) for axis, size in enumerate(shape)]

    def choose(chosen: list[tuple[int, int, int]]) -> Selection:
        usable = {(n, axis) for n, axis, size in chosen if axis != batch_axis and size > 1}
        return tuple(
            tuple(axis for axis in range(len(shape)) if (n, axis) in usable)
            for n, shape in enumerate(shapes)
        )

    axes = sorted({axis for _, axis, _ in places})
    equal = [place for place in places if place[2] == length]
    others = [place for place in places if place[2] != length]
    tried = [
        *([place] for place in equal),
        *([place for place in equal if place[1] == axis] for axis in axes),
        equal,
        *([place] for place in others[:_MOST_LENGTHS]),
    ]
    return [one for one in dict.fromkeys(map(choose, tried)) if any(one)]


def _selected_sizes(example: Any, selection: Selection) -> list[int]:
    pairs = zip(tensors_in(example), selection, strict=True)
    return [tensor.shape[axis] for tensor, axes in pairs for axis in axes]


def _map_selected(
    example: Any, selection: Selection, change: Callable[[Tensor, tuple[int, ...]], Tensor]
) -> Any:
    chosen = iter(selection)

    def apply(tensor: Tensor) -> Tensor:
        axes = next(chosen)
        return change(tensor, axes) if axes else tensor

    return map_tensors(example, apply)


def _resized(example: Any, selection: Selection) -> Any:
    def halve(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
        for axis in axes:
            tensor = tensor.narrow(axis, 0, max(1, tensor.shape[axis] // 2))
        return tensor

    return _map_selected(example, selection, halve)


def _reordered(example: Any, selection: Selection, order: Tensor) -> Any:
    return _map_selected(example, selection, lambda tensor, axes: _permuted(tensor, axes, order))


def _permuted(tensor: Tensor, axes: tuple[int, ...], order: Tensor) -> Tensor:
    for axis in axes:
        tensor = tensor.index_select(axis, order.to(tensor.device))
    return tensor


def _changed_inputs(example: Any, selection: Selection, source: range) -> Any:
    """Return an example with other values at some positions; tensors [.., T, T] stay."""
    draw = torch.Generator().manual_seed(0)

    def change(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
        if len(axes) != 1:
            return tensor
        return changed_entries(tensor, axes[0], source.start, len(source), draw)

    return _map_selected(example, selection, change)


# -- comparing ------------------------------------------------------------------------------------


def _differs(one: Tensor, other: Tensor, share: float) -> bool:
    """Return whether tensors differ by more than a share of the largest value."""
    if not bool((one.isfinite() == other.isfinite()).all()):
        return True
    both = [torch.nan_to_num(t.double(), 0.0, 0.0, 0.0) for t in (one, other)]
    if not both[0].numel():
        return False
    return bool((both[0] - both[1]).abs().max() > share * both[0].abs().max())


def _is_reordered(
    start: _Pass,
    other: _Pass,
    streams: Mapping[Where, tuple[int, ...]],
    slot: Where,
    order: Tensor,
) -> bool:
    """Return whether a slot's activation is reordered, and so are outputs by position."""
    before = start.tensors[slot]
    share = _REORDERED.get(before.dtype, _REORDERED_COARSE)
    if not _differs(_permuted(before, streams[slot], order), before, share):
        # All positions are alike: nothing can be told.
        return False
    watched = [slot, *(where for where in start.tensors if where[2] == "end")]
    for where in watched:
        one, two = start.tensors[where], other.tensors.get(where)
        if two is None or one.shape != two.shape:
            return False
        ways = {streams[slot]} if where == slot else {(), streams.get(where, ())}
        if where != slot:
            ways.add(tuple(i for i, size in enumerate(one.shape) if size == len(order)))
        share = _REORDERED.get(one.dtype, _REORDERED_COARSE)
        if all(_differs(_permuted(one, way, order), two, share) for way in ways):
            return False
    return True
