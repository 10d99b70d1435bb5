"""Runs a model on small batches to see the shapes of activations and what depends on what.

Every run is in eval mode, with random numbers of its own, and leaves no trace in the model. A
user's model may refuse any batch but its own: a run that fails tells less, and is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.errors import UsageError, describe_exception
from esper.utils.randomness import drawing

SAMPLES = 4
"""Samples of a run; all but the last are changed to see what the last one depends on."""

_FEWER = 3


def call_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) for an example: a tensor, a tuple of arguments or a dict of them."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    return (example,), {}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a block and every module back as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def pass_whole_batches(modules: Iterable[nn.Module]) -> list[nn.TransformerEncoder]:
    """Stop PyTorch's encoders from packing padded batches into nested tensors; return those.

    Neither seeds nor hooks can work on nested tensors.
    """
    encoders = [module for module in modules if isinstance(module, nn.TransformerEncoder)]
    packing = [one for one in encoders if getattr(one, "use_nested_tensor", False)]
    for encoder in packing:
        encoder.use_nested_tensor = False
    return packing


@contextmanager
def trying(model: nn.Module, example: Any) -> Iterator[None]:
    """Within the block the model is in eval mode, unpacked, with random numbers of its own."""
    device = next((tensor.device for tensor in tensors_in(example)), torch.device("cpu"))
    packing = pass_whole_batches(model.modules())
    try:
        with evaluating(model), drawing(device, "probe"):
            yield
    finally:
        for encoder in packing:
            encoder.use_nested_tensor = True


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch or of what a model returns, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same batch with every tensor changed; anything else stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(map_tensors(item, change) for item in value)
    return value


def first_tensor(output: Any) -> Any:
    """Return the tensor that a slot works on: the output, or the first of several."""
    return output[0] if isinstance(output, tuple | list) and output else output


def shape_problem(hidden: Any, output: Any) -> str:
    """Return why an output cannot be an input in turn; empty where it has shape and precision."""
    first = first_tensor(output)
    if not isinstance(hidden, Tensor) or not isinstance(first, Tensor):
        return ""
    before, after = (
        f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in (hidden, first)
    )
    return (
        ""
        if before == after
        else f"it turns {before} into {after}, on which a copy of it cannot run"
    )


def shapes_of(value: Any) -> str:
    """Return the shapes in a batch as text."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shapes_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(shapes_of, value)) + ")"
    return type(value).__name__


@dataclass(slots=True)
class Seen:
    """Outputs of submodules and of the model in one pass."""

    outputs: dict[str, list[Any]] = field(default_factory=dict)
    """By submodule, one entry for every call."""
    kinds: dict[str, type] = field(default_factory=dict)
    """By submodule, in the order of first calls, the type of its output."""
    changes: dict[str, str] = field(default_factory=dict)
    """By submodule, why its output cannot be its input: another shape or precision."""
    whole: Any = None
    """Output of the model; None where it failed."""
    error: Exception | None = None

    def tensor(self, path: str) -> Tensor | None:
        """Return the tensor that a submodule returned; None unless there is exactly one."""
        found = [first_tensor(output) for output in self.outputs.get(path, [])]
        return found[0] if len(found) == 1 and isinstance(found[0], Tensor) else None


def look(model: nn.Module, modules: Mapping[str, nn.Module], example: Any) -> Seen:
    """Run the model once and return the outputs of these submodules, up to an error.

    Call `refuse_failed` next where a failure cannot be tolerated.
    """
    seen = Seen({path: [] for path in modules})

    def record(path: str, module: nn.Module, args: Any, output: Any) -> None:
        seen.kinds[path] = type(output)
        seen.changes[path] = shape_problem(args[0], output) if args else ""
        # A copy: later modules may work in place.
        seen.outputs[path].append(map_tensors(output, Tensor.clone))

    args, kwargs = call_arguments(example)
    try:
        with hooked(modules, record), trying(model, example), torch.no_grad():
            seen.whole = model(*args, **kwargs)
    except Exception as error:
        seen.error = error
    return seen


def refuse_failed(seen: Seen, example: Any) -> None:
    """Raise UsageError if the model could not be run on the user's example."""
    if seen.error is None:
        return
    raise UsageError(
        f"the model cannot take the example {shapes_of(example)}: "
        f"{describe_exception(seen.error)}; give one batch of inputs as the model is called with: "
        "a tensor, a tuple of arguments or a dict, such as next(iter(loader))[0]"
    ) from seen.error


@contextmanager
def hooked(
    modules: Mapping[str, nn.Module],
    after: Callable[..., Any] | None = None,
    before: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Within the block, submodules call forward hooks with their path as the first argument."""
    with ExitStack() as handles:
        for path, module in modules.items():
            if before is not None:
                handle = module.register_forward_pre_hook(partial(before, path))
                handles.callback(handle.remove)
            if after is not None:
                handle = module.register_forward_hook(partial(after, path))
                handles.callback(handle.remove)
        yield


def teachable_at(model: nn.Module, modules: Mapping[str, nn.Module], example: Any) -> set[str]:
    """Return the submodules whose output gets a gradient from the model's output.

    A recurrent network of which only the last state is used gets none at its outputs. Where the
    run fails, all submodules are returned.
    """
    probes: dict[str, Tensor] = {}

    def add(path: str, module: nn.Module, args: Any, output: Any) -> Any:
        first = first_tensor(output)
        is_plain = type(output) in (Tensor, tuple, list)
        if not is_plain or not isinstance(first, Tensor) or not first.is_floating_point():
            return None
        probe = probes[path] = torch.zeros_like(first, requires_grad=True)
        return first + probe if first is output else type(output)([first + probe, *output[1:]])

    args, kwargs = call_arguments(example)
    try:
        with hooked(modules, add), trying(model, example), torch.enable_grad():
            outputs = [out for out in tensors_in(model(*args, **kwargs)) if out.requires_grad]
            if not outputs or not probes:
                return set(modules)
            total = torch.stack([out.float().sum() for out in outputs]).sum()
            found = torch.autograd.grad(total, list(probes.values()), allow_unused=True)
    except Exception:
        return set(modules)
    without = {path for path, value in zip(probes, found, strict=True) if value is None}
    return set(modules) - without


def axis_size(example: Any, axis: int) -> int:
    """Return the size of the first tensor that has this axis, 0 where none has."""
    return next((t.shape[axis] for t in tensors_in(example) if t.dim() > axis), 0)


def tensors_along(example: Any, axis: int, size: int) -> tuple[bool, ...]:
    """Return which tensors of an example have this size along the axis."""
    return tuple(t.dim() > axis and t.shape[axis] == size for t in tensors_in(example))


def _map_some(example: Any, which: tuple[bool, ...], change: Callable[[Tensor], Tensor]) -> Any:
    chosen = iter(which)
    return map_tensors(example, lambda tensor: change(tensor) if next(chosen) else tensor)


def resized(example: Any, which: tuple[bool, ...], axis: int, size: int) -> Any:
    """Return an example with another size along an axis, by leaving out or repeating entries."""

    def resize(tensor: Tensor) -> Tensor:
        entries = torch.arange(size, device=tensor.device) % tensor.shape[axis]
        return tensor.index_select(axis, entries)

    return _map_some(example, which, resize)


def with_others_changed(example: Any, which: tuple[bool, ...], axis: int) -> Any:
    """Return an example with other values at all but the last entry along an axis."""
    draw = torch.Generator().manual_seed(0)

    def change(tensor: Tensor) -> Tensor:
        return changed_entries(tensor, axis, 0, tensor.shape[axis] - 1, draw)

    return _map_some(example, which, change)


def noise_like(part: Tensor, whole: Tensor, draw: torch.Generator) -> Tensor:
    """Return noise for a part of a tensor, as large as the tensor's values usually differ."""
    known = whole[whole.isfinite()].double()
    spread = float(known.std()) if known.numel() > 1 else 0.0
    # A constant tensor, such as the output of weights that start at zero, gets noise too.
    noise = torch.randn(part.shape, generator=draw, dtype=torch.float64) * (spread or 1.0)
    return noise.to(part)


def changed_entries(
    tensor: Tensor, axis: int, start: int, count: int, draw: torch.Generator
) -> Tensor:
    """Return a tensor of inputs with other values at some entries along an axis.

    Boolean tensors and masks that hold infinities stay as they are.
    """
    if tensor.is_meta or tensor.dtype == torch.bool:
        return tensor
    changed = tensor.clone()
    part = changed.narrow(axis, start, count)
    if not tensor.is_floating_point():
        part.copy_(_other_numbers(part, tensor))
    elif bool(tensor.isfinite().all()):
        part += noise_like(part, tensor, draw)
    return changed


def _other_numbers(others: Tensor, everything: Tensor) -> Tensor:
    """Return other whole numbers within the range of the example, or next to it."""
    low, high = everything.min(), everything.max()
    if bool(low == high):
        return torch.where(others == 0, others + 1, torch.zeros_like(others))
    # Mirrored within the range of the example, so that a vocabulary holds them.
    mirrored = low + high - others
    return torch.where(mirrored == others, low, mirrored)


@dataclass(frozen=True, slots=True)
class Dependence:
    """Evidence in one tensor that an axis of the model's inputs holds the samples."""

    following: tuple[int, ...]
    """Its axes that have one entry for each sample."""
    independent: tuple[int, ...]
    """Those of them along which the last sample does not change when all others do."""
    is_telling: bool
    """Whether anything changed at all; otherwise nothing is known of independence."""

    @property
    def mixes(self) -> bool:
        """Whether each sample depends on the others of its batch."""
        return self.is_telling and bool(self.following) and not self.independent


class Trial:
    """Tests whether one axis of the inputs holds the samples.

    Args:
        model: the host.
        modules: submodules to watch, by path.
        example: one batch.
        axis: the axis of the inputs that may hold the samples.
    """

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], example: Any, axis: int
    ) -> None:
        """Run the model on two sizes of batch, and once more with all but one sample changed."""
        self.axis = axis
        size = axis_size(example, axis)
        which = tensors_along(example, axis, size)
        batch = resized(example, which, axis, SAMPLES) if size else example
        self._plain = look(model, modules, batch)
        self.is_resizable = self._plain.error is None
        if self.is_resizable:
            self._fewer: Seen | None = look(
                model, modules, resized(example, which, axis, _FEWER) if size else example
            )
        else:
            # It takes batches of one size only.
            batch, self._fewer = example, None
            self._plain = look(model, modules, batch)
        self.samples = SAMPLES if self.is_resizable and size else size
        self._changed = None
        if self.samples > 1:
            self._changed = look(model, modules, with_others_changed(batch, which, axis))

    def at(self, path: str) -> Dependence | None:
        """Return the evidence at a submodule, None where there is none."""
        fewer = None if self._fewer is None else self._fewer.tensor(path)
        changed = None if self._changed is None else self._changed.tensor(path)
        return self._compare(self._plain.tensor(path), fewer, changed)

    def at_end(self) -> list[Dependence]:
        """Return the evidence in every tensor that the model returns."""
        parts = [list(tensors_in(self._plain.whole))]
        for seen in (self._fewer, self._changed):
            found = [] if seen is None else list(tensors_in(seen.whole))
            parts.append(found if len(found) == len(parts[0]) else [None] * len(parts[0]))  # type: ignore[list-item]
        compared = (self._compare(*triple) for triple in zip(*parts, strict=True))
        return [found for found in compared if found is not None]

    def _compare(
        self, plain: Tensor | None, fewer: Tensor | None, changed: Tensor | None
    ) -> Dependence | None:
        if plain is None:
            return None
        following = tuple(
            axis
            for axis, size in enumerate(plain.shape)
            if size == self.samples and _follows(fewer, plain, axis)
        )
        comparable = changed is not None and changed.shape == plain.shape and not plain.is_meta
        if not comparable:
            return Dependence(following, (), is_telling=False)
        assert changed is not None
        last = self.samples - 1
        independent = tuple(
            axis
            for axis in following
            if _same(plain.select(axis, last), changed.select(axis, last))
        )
        return Dependence(following, independent, is_telling=not _same(plain, changed))


def _follows(fewer: Tensor | None, plain: Tensor, axis: int) -> bool:
    """Return whether an axis shrank with the batch, where that could be tried."""
    if fewer is None or fewer.dim() != plain.dim():
        return True
    return fewer.shape[axis] == _FEWER


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal to the bit."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def shrinking_axes(
    model: nn.Module, modules: Mapping[str, nn.Module], example: Any, shapes: Mapping[str, Any]
) -> dict[str, set[int]]:
    """Return the axes of each submodule's output that follow the length or size of the inputs.

    Each axis of the inputs but the first is doubled in turn, or halved where the model fails. In a
    run that fails, the outputs up to the error count.
    """
    found: dict[str, set[int]] = {path: set() for path in modules}
    sizes = {
        (axis, tensor.shape[axis])
        for tensor in tensors_in(example)
        for axis in range(1, tensor.dim())
    }
    for axis, size in sorted(sizes):
        which = tensors_along(example, axis, size)
        for other in (2 * size, size // 2):
            seen = look(model, modules, resized(example, which, axis, other)) if other else None
            for path, before in shapes.items():
                output = None if seen is None else seen.tensor(path)
                if output is not None and output.dim() == len(before):
                    found[path] |= {i for i in range(len(before)) if output.shape[i] != before[i]}
            if seen is not None and seen.error is None:
                break
    return found
