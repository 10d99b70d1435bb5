"""Suggests slots: finds a model's blocks by running it once, and what no slot covers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from torch import Tensor, nn

from esper.kasmina.slots.arguments import example_inputs, read_batch
from esper.kasmina.slots.placement import (
    DeclaredAxes,
    SlotNames,
    matches,
    output_shape,
    place_slots,
    slot_paths,
)
from esper.kasmina.slots.probe import (
    Seen,
    first_tensor,
    look,
    refuse_failed,
    teachable_at,
    tensors_in,
)
from esper.kasmina.wrapping import refuse_adapted
from esper.leyline.errors import EsperWarning, SlotError, UsageError, describe_no_module
from esper.leyline.slots import RANKS, AxesName, Symmetry

MOST_SLOTS = 3
"""Most slots that are suggested by default."""


@dataclass(frozen=True, slots=True)
class SuggestedSlot:
    """One place where a model could grow."""

    path: str
    kind: str
    """Class of the submodule."""
    axes: AxesName
    channels: int
    symmetry: Symmetry
    """Whether the model is causal or equivariant in the order of positions there."""

    def __str__(self) -> str:
        # Only sequences and point clouds have a symmetry worth printing.
        is_worth_telling = len(self.axes) == 3 or self.symmetry != "bidirectional"
        order = f", {self.symmetry}" if is_worth_telling else ""
        return f"{self.path}: {self.kind}, {self.axes}{order}, {self.channels} channels"


@dataclass(frozen=True, slots=True)
class SlotSuggestions(Sequence[str]):
    """Names of submodules, to be given as `slots`; printing it describes them."""

    slots: tuple[SuggestedSlot, ...]
    others: tuple[SuggestedSlot, ...]
    """Places as good as these that were left out to keep the number of slots small."""
    refused: Mapping[str, str]
    """Blocks at which no slot can be, and why."""
    uncovered: tuple[str, ...]
    """Parts of the model with parameters that no suggested slot is at, in or around."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return the name of a slot's submodule."""
        return [slot.path for slot in self.slots][index]

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[str]:
        return iter([slot.path for slot in self.slots])

    @property
    def axes(self) -> dict[str, AxesName]:
        """The axes of each slot, as `axes=` takes them."""
        return {slot.path: slot.axes for slot in self.slots}

    def __str__(self) -> str:
        lines = [f"slots={list(self)!r}"]
        lines += [f"  {slot}" for slot in self.slots]
        if self.others:
            lines.append(f"also possible: {', '.join(slot.path for slot in self.others)}")
        lines += [f"not possible: {reason}" for reason in self.refused.values()]
        named = {slot.path for slot in self.others}
        without = [part for part in self.uncovered if part not in named]
        if without:
            lines.append(f"parts without a slot: {', '.join(without)}")
        return "\n".join(lines)


def suggest_slots(
    model: nn.Module,
    example: Any,
    *,
    axes: DeclaredAxes | None = None,
    most: int = MOST_SLOTS,
) -> SlotSuggestions:
    """Return where a model could grow: at the ends of its blocks, spread over its depth.

    Args:
        model: any module.
        example: one batch of its inputs (a tensor, a tuple of arguments or a dict of them), or a
            batch as `esper.grow` takes it, with targets.
        axes: what the axes of activations are, where that cannot be found out; one name, or by
            submodule or pattern.
        most: the most slots to suggest; those with the greatest depth come first.

    Raises:
        SlotError: There is no such place.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(describe_no_module(model))
    if most < 1:
        raise UsageError(f"most must be at least 1 slot, got {most}")
    modules = {name: module for name, module in model.named_modules() if name}
    seen, inputs = _look_at_batch(model, modules, example)
    refuse_failed(seen, example)
    example = inputs
    final = list(tensors_in(seen.whole))
    teachable = teachable_at(model, modules, example)

    def is_suited(name: str) -> bool:
        calls = seen.outputs[name]
        output = first_tensor(calls[0]) if len(calls) == 1 else None
        if not isinstance(output, Tensor) or output.dim() not in RANKS:
            return False
        if not output.is_floating_point():
            return False
        # The model's own output is no place for a slot.
        is_last = not _works_on(modules, seen, name)
        return not any(_is_answer(out, output, is_last=is_last) for out in final)

    def is_before_pooling(name: str) -> bool:
        return is_suited(name) and not _is_pooled(first_tensor(seen.outputs[name][0]))

    candidates = _candidates(model, modules, is_before_pooling)
    candidates = candidates or _candidates(model, modules, is_suited)
    found: list[SuggestedSlot] = []
    refused: dict[str, str] = {}
    for path in candidates:
        if path not in teachable:
            refused[path] = _why_unteachable(path, modules[path])
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EsperWarning)
                (place,) = place_slots(model, [path], example, _for_path(axes, path)).slots
        except SlotError as error:
            refused[path] = str(error)
            continue
        kind = type(modules[path]).__name__
        channels = place.shape[1] if place.topology == "cnn" else place.shape[-1]
        found.append(SuggestedSlot(path, kind, place.axes, channels, place.symmetry))
    if not found:
        refuse_adapted(model)
        reason = next(iter(refused.values()), None) or _why_none(seen)
        raise SlotError(f"no slot can be suggested for this {type(model).__name__}: {reason}")
    chosen = _spread(found, most)
    return SlotSuggestions(
        slots=tuple(chosen),
        others=tuple(slot for slot in found if slot not in chosen),
        refused=refused,
        uncovered=uncovered_parts(
            model, [path for slot in chosen for path in (slot.path, candidates[slot.path])]
        ),
    )


def _look_at_batch(
    model: nn.Module, modules: Mapping[str, nn.Module], example: Any
) -> tuple[Seen, Any]:
    """Run the model on inputs, or else on those of a batch with targets; return them too."""
    inputs = example_inputs(model, example)
    seen = look(model, modules, inputs)
    if seen.error is None or not isinstance(example, tuple | list | Mapping):
        return seen, inputs
    try:
        others = example_inputs(model, read_batch(example)[0])
    except UsageError:
        return seen, inputs
    found = look(model, modules, others)
    return (found, others) if found.error is None else (seen, inputs)


def refuse_unteachable(model: nn.Module, slots: SlotNames, example: Any) -> None:
    """Refuse slots whose output gets no gradient from that of the model: no seed learns there."""
    modules = dict(model.named_modules())
    named = {path: modules[path] for path in slot_paths(slots, model).values() if path in modules}
    teachable = teachable_at(model, named, example)
    for path, module in named.items():
        if path not in teachable:
            raise SlotError(f"a seed would change nothing: {_why_unteachable(path, module)}")


def _why_unteachable(path: str, module: nn.Module) -> str:
    """Return why no gradient reaches the output of a submodule, and what to write instead."""
    why = f"no gradient reaches {path!r}: its output is not used, or detached"
    if not isinstance(module, nn.RNNBase):
        return why
    name, last = path.rpartition(".")[2], "out[:, -1]" if module.batch_first else "out[-1]"
    return (
        f"the model uses the last state of {path!r} at most, and a seed changes its output; write "
        f"out, _ = self.{name}(x) and use {last}"
    )


def uncovered_parts(model: nn.Module, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the largest parts with parameters that none of these submodules is, holds or is in."""
    found: list[str] = []

    def visit(module: nn.Module, name: str) -> None:
        if any(name == path or name.startswith(f"{path}.") for path in paths):
            return
        if not any(True for _ in module.parameters()):
            return
        if name and not any(path.startswith(f"{name}.") for path in paths):
            found.append(name)
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(model, "")
    return tuple(found)


def _why_none(seen: Seen) -> str:
    """Return why the first submodule cannot have a slot."""
    for path, outputs in seen.outputs.items():
        try:
            output_shape(path, outputs)
        except SlotError as error:
            return str(error)
    return (
        "none of its submodules returns an activation before the output; give it a hidden "
        "layer, as in nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), "
        "nn.Linear(64, classes))"
    )


def _is_answer(answer: Tensor, output: Tensor, *, is_last: bool) -> bool:
    """Return whether an output of the model is that of a submodule, in any shape or order.

    Behind the last parameters it may also have passed through a function, such as a sigmoid.
    """
    if answer.numel() != output.numel():
        return False
    if is_last:
        return True
    return bool((answer.flatten().sort().values == output.flatten().sort().values).all())


def _works_on(modules: Mapping[str, nn.Module], seen: Seen, name: str) -> bool:
    """Return whether a module with parameters was called after this one, outside of it."""
    order = list(seen.kinds)
    later = order[order.index(name) + 1 :]
    return any(
        not _is_around(path, name)
        and next(modules[path].parameters(recurse=False), None) is not None
        for path in later
    )


def _is_around(outer: str, inner: str) -> bool:
    return inner.startswith(f"{outer}.")


def _is_pooled(output: Any) -> bool:
    """Return whether an image has one position left, as behind `AdaptiveAvgPool2d(1)`."""
    return isinstance(output, Tensor) and output.dim() == 4 and output.shape[2:].numel() == 1


def _candidates(
    model: nn.Module, modules: Mapping[str, nn.Module], is_suited: Callable[[str], bool]
) -> dict[str, str]:
    """Return {where a slot could be: the block it is at, or the layer in front of it}."""
    blocks = {path: path for path in _blocks(model, is_suited)}
    return blocks or _activations(modules, is_suited)


def _blocks(model: nn.Module, is_suited: Callable[[str], bool]) -> list[str]:
    """Return the outermost submodules that are made of others, hold parameters and are suited."""
    found: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if not any(True for _ in child.children()) or not any(True for _ in child.parameters()):
                continue
            if _holds_blocks(child) or not is_suited(path):
                visit(child, f"{path}.")
            else:
                found.append(path)

    visit(model, "")
    return found


def _holds_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks rather than a block."""
    inner = [child for child in module.children() if any(True for _ in child.children())]
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return bool(inner)
    # Encoders keep their blocks in a list, or have parts that do. The parts of one block may stand
    # in a list too, but then each is of another class.
    return any(_holds_blocks(child) and not _is_made_of_kinds(child) for child in inner)


def _is_made_of_kinds(module: nn.Module) -> bool:
    """Return whether a module is a list of several parts, each of another class."""
    kinds = [type(child) for child in module.children() if any(True for _ in child.children())]
    is_row = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    return is_row and 1 < len(kinds) == len(set(kinds))


_NO_PLACE = (
    nn.Flatten,
    nn.Dropout,
    # Behind these an image or a sequence has no neighbours left to look at.
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)
"""Layers behind which a seed would come too late."""


def _activations(
    modules: Mapping[str, nn.Module], is_suited: Callable[[str], bool]
) -> dict[str, str]:
    """Return, for a model without blocks, the last simple layer behind each with parameters.

    It is {where a slot could be: the layer with parameters in front of it}.
    """
    found: list[str] = []
    layers: list[str] = []
    is_open = False
    for path, module in modules.items():
        if any(True for _ in module.children()):
            continue
        if any(True for _ in module.parameters()):
            # The slot moves on behind the simple layers that follow.
            found.append(path)
            layers.append(path)
            is_open = True
        elif is_open:
            if is_suited(path) and not isinstance(module, _NO_PLACE):
                found[-1] = path
            else:
                is_open = False
    return {path: layer for path, layer in zip(found, layers, strict=True) if is_suited(path)}


def _spread(found: list[SuggestedSlot], most: int) -> list[SuggestedSlot]:
    """Return so many of the places, evenly over the depth, the last one always among them."""
    if len(found) <= most:
        return found
    step = len(found) / most
    return [found[round((number + 1) * step) - 1] for number in range(most)]


def _for_path(axes: DeclaredAxes | None, path: str) -> DeclaredAxes | None:
    """Return the declaration that concerns one submodule."""
    if axes is None or isinstance(axes, str):
        return axes
    return {key: value for key, value in axes.items() if matches(path, key)} or None
