"""Places slots: checks submodule names and finds the axes of activations on one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from esper.kasmina.blueprints.kin import Kin, find_kin
from esper.kasmina.flops import HOW_TO_COUNT, counting
from esper.kasmina.slots.arguments import example_inputs
from esper.kasmina.slots.probe import (
    Dependence,
    Trial,
    axis_size,
    first_tensor,
    hooked,
    look,
    refuse_failed,
    shrinking_axes,
)
from esper.kasmina.slots.symmetry import find_symmetries
from esper.leyline.errors import SlotError, UsageError, instead, nearest, nearest_few, warn
from esper.leyline.records import Plain
from esper.leyline.slots import AXES, RANKS, Axes, AxesName, Symmetry, Topology, parse_axes

# ---- Axes of activations, found by trying the model; ambiguous ones are refused


_CHANNELS_FIRST = (_ConvNd, _BatchNorm, _InstanceNorm, nn.GroupNorm)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)

_BATCH_FIRST: dict[int, tuple[AxesName, ...]] = {
    2: ("BC",),
    3: ("BTC", "BCL"),
    4: ("BCHW", "BHWC"),
}
"""Possible axes of an activation with the samples first, by rank."""


class Inference:
    """Finds the axes of activations at some submodules of a model.

    Args:
        model: the host.
        modules: the submodules behind which slots are to be, by path.
        example: one batch.
        shapes: shapes of their outputs.
        declared: axes that the user has declared, by path.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        example: Any,
        shapes: Mapping[str, tuple[int, ...]],
        declared: Mapping[str, Axes],
    ) -> None:
        """Try the model; ambiguous axes are refused when they are asked for."""
        self._model = model
        self._modules = modules
        self._example = example
        self._shapes = shapes
        self._declared = declared
        self._positions: dict[str, set[int]] | None = None
        self._trials = [Trial(model, modules, example, 0)]
        has_sequences = any(len(shape) == 3 for shape in shapes.values())
        if has_sequences:
            other = Trial(model, modules, example, 1)
            # Only an axis that can be made shorter can be that of the samples.
            if other.is_resizable and other.samples > 1:
                self._trials.append(other)
        self.batch_axis = self._find_batch_axis()
        """The axis of the model's inputs that holds the samples."""

    def axes(self, path: str) -> Axes:
        """Return the axes at a submodule, or refuse ambiguous ones."""
        trial = next(trial for trial in self._trials if trial.axis == self.batch_axis)
        found = trial.at(path)
        if path in self._declared:
            self._check_declared(path, self._declared[path], found)
            return self._declared[path]
        shape = self._shapes[path]
        is_sequence = len(shape) == 3
        if found is not None and not found.following:
            raise SlotError(
                f"submodule {path!r} returns {list(shape)}: no axis has one entry per sample; "
                "choose a submodule that keeps the samples of a batch apart, such as the block "
                "around it, and give several samples as the example"
            )
        if found is not None and found.is_telling and not found.independent:
            if is_sequence:
                raise SlotError(
                    f"the samples of a batch influence one another at {path!r}: changing the "
                    "others changes each of them; layers of nn.Transformer need batch_first=True "
                    f"for inputs [B, T, C]; if that is meant, declare {_line(path, 'BTC')}"
                )
            _warn_of_mixing(path)
        if is_sequence and self._is_open():
            raise SlotError(
                f"cannot tell which axis of {list(shape)} at {path!r} holds the samples: nothing "
                f"in the model mixes along either; declare {_line(path, 'BTC')} (or 'TBC')"
            )
        if is_sequence and self._batch_of(found) == 1:
            return AXES["TBC"]
        if self._batch_of(found) != 0:
            raise SlotError(
                f"submodule {path!r} returns {list(shape)} with the samples not in front; choose "
                "one that returns [B, C] or [B, C, H, W]"
            )
        candidates = _BATCH_FIRST[len(shape)]
        return AXES[candidates[0]] if len(candidates) == 1 else self._find_channels(path)

    def _find_batch_axis(self) -> int:
        """Return the axis of the inputs that holds the samples: the first, unless it cannot be."""
        first, *others = self._trials
        if not others or not self._is_refuted(first):
            return 0
        return 0 if self._is_refuted(others[0]) else 1

    def _is_refuted(self, trial: Trial) -> bool:
        """Return whether samples along an axis of the inputs would influence one another."""
        slots = [trial.at(path) for path, shape in self._shapes.items() if len(shape) == 3]
        watched = slots + trial.at_end()
        mixes = any(found is not None and found.mixes for found in watched)
        # A model may return something without samples, such as a loss.
        loses = any(found and not found.following for found in (watched if trial.axis else slots))
        fits = all(
            found is None or self._declared[path].batch in found.following
            for path in self._declared
            for found in [trial.at(path)]
        )
        return mixes or loses or not fits

    def _is_open(self) -> bool:
        """Return whether every tried axis of the inputs could hold the samples."""
        return len(self._trials) > 1 and not any(map(self._is_refuted, self._trials))

    @staticmethod
    def _batch_of(found: Dependence | None) -> int:
        """Return the axis of an activation that holds the samples."""
        if found is None:
            return 0
        possible = found.independent if found.is_telling and found.independent else found.following
        return possible[0]

    def _check_declared(self, path: str, axes: Axes, found: Dependence | None) -> None:
        if found is None:
            return
        if found.following and axes.batch not in found.following:
            actual = "".join(
                "B" if axis in found.following else "?" for axis in range(len(axes.name))
            )
            raise SlotError(
                f"axes at {path!r} are declared {axes.name}, but the samples of a batch are at "
                f"{actual}; declare them as they are"
            )
        if found.is_telling and axes.batch not in found.independent:
            _warn_of_mixing(path)

    def _find_channels(self, path: str) -> Axes:
        """Return the axes; that of the channels does not change with the size of the inputs."""
        shape = self._shapes[path]
        if self._positions is None:
            self._positions = shrinking_axes(
                self._model, self._modules, self._example, self._shapes
            )
        candidates = [AXES[name] for name in _BATCH_FIRST[len(shape)]]
        left = [axes for axes in candidates if axes.channels not in self._positions[path]]
        if len(left) == 2:
            votes = self._ask_layers(path)
            left = [axes for axes in candidates if axes.channels in votes]
        if len(left) == 1:
            return left[0]
        names = " or ".join(axes.name for axes in candidates)
        raise SlotError(
            f"cannot tell the axes of {list(shape)} at {path!r}: they could be {names}; declare "
            f"{_line(path, candidates[0].name)}, or the other"
        )

    def _ask_layers(self, path: str) -> set[int]:
        """Return the channel axes according to layers of known kinds near the submodule."""
        slot, shape = self._modules[path], self._shapes[path]
        inside = set(map(id, slot.modules()))
        votes: dict[bool, set[int]] = {True: set(), False: set()}
        known = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(module, _CHANNELS_FIRST + _CHANNELS_LAST)
        }
        entered: dict[str, list[Any]] = {name: [] for name in known}

        def note(name: str, module: nn.Module, args: Any) -> None:
            entered[name].extend(args)

        with hooked(known, before=note):
            seen = look(self._model, {**known, path: slot}, self._example)
        output = seen.tensor(path)
        for name, module in known.items():
            axis = 1 if isinstance(module, _CHANNELS_FIRST) else len(shape) - 1
            if any(_is_same(output, value) for value in entered[name]):
                votes[True].add(axis)
            mine = [first_tensor(value) for value in seen.outputs[name]]
            alike = any(isinstance(value, Tensor) and value.shape == shape for value in mine)
            # Two equal sizes cannot be told apart.
            if id(module) in inside and alike and shape[1] != shape[-1]:
                votes[False].add(axis)
        # A layer that takes the activation itself knows better than one inside the submodule.
        return votes[True] or votes[False]


def _is_same(output: Tensor | None, value: Any) -> bool:
    if output is None or not isinstance(value, Tensor) or value.shape != output.shape:
        return False
    if output.is_meta:
        return False
    return bool((value == output).all())


def _line(path: str, axes: str) -> str:
    return f"axes={{{path!r}: {axes!r}}}"


def _warn_of_mixing(path: str) -> None:
    warn(
        f"the samples of a batch influence one another at {path!r}, in the model itself: changing "
        "the others changes each of them; if that is meant, write "
        "warnings.filterwarnings('ignore', '.*influence one another')"
    )


Holder = Literal["tensor", "tuple", "list", "other"]
"""What a submodule returns: the activation alone, or first in a tuple, a list or another."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of one slot, and the shape and axes of its activation."""

    name: str
    path: str
    axes: AxesName
    """The axes of the host's activation."""
    shape: tuple[int, ...]
    """Its shape as a seed sees it: [B, C], [B, T, C] or [B, C, H, W]."""
    symmetry: Symmetry
    """Whether the host is causal or equivariant in the order of positions there."""
    holder: Holder = "tensor"
    """How the host's submodule returns the activation."""
    kin: Kin = field(default_factory=Kin)
    """Whether a copy of the submodule can be a seed there."""

    @property
    def topology(self) -> Topology:
        """Kind of activation at the slot."""
        return AXES[self.axes].topology


@dataclass(frozen=True, slots=True)
class Placed(Plain):
    """All slots of a model, with its batch axis and its operations."""

    slots: tuple[Placement, ...]
    batch_axis: int
    """The axis of its inputs that holds the samples."""
    host_flops: int
    """Operations of one sample's forward pass."""
    uncounted: str = ""
    """Operators that multiply but could not be counted, and where; `host_flops` is without them."""

    @property
    def is_counted(self) -> bool:
        """Whether it is known how many operations the model's forward pass has."""
        return self.host_flops > 0 and not self.uncounted

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Placed:
        """Rebuild what `to_mapping` returned."""
        # Older saved gardens have no entries for copies and uncounted operators.
        slots = (
            Placement(
                **{**one, "shape": tuple(one["shape"]), "kin": Kin.from_mapping(one.get("kin", {}))}
            )
            for one in data["slots"]
        )
        flops, uncounted = int(data["host_flops"]), str(data.get("uncounted", ""))
        return cls(tuple(slots), int(data["batch_axis"]), flops, uncounted)


SlotNames = Sequence[str] | Mapping[str, str]
"""Names of submodules (`*` stands for any part of a name between dots), or {name: submodule}."""

DeclaredAxes = str | Mapping[str, str]
"""Axes of all slots, or by slot, submodule or pattern."""


def slot_paths(slots: SlotNames, model: nn.Module | None = None) -> dict[str, str]:
    """Return {slot name: submodule path}; a plain list names slots by their paths.

    Patterns are looked up in the model.
    """
    if isinstance(slots, str):
        raise SlotError(
            f"slots must be a list of submodule names, got the text {slots!r}; "
            "esper.suggest_slots(model, example) finds some"
        )
    try:
        paths = dict(slots) if isinstance(slots, Mapping) else None
        listed = list(slots)
    except TypeError:
        raise SlotError(
            f"slots must be a list of submodule names, got {type(slots).__name__}"
        ) from None
    if paths is None:
        found = [path for entry in listed for path in _expand(entry, model)]
        paths = {path: path for path in found}
        listed = found
    strangers = [one for one in (*paths, *paths.values()) if not isinstance(one, str)]
    if strangers:
        raise SlotError(f"slots must be names of submodules, got {strangers[0]!r}")
    if not paths:
        raise SlotError("slots is empty; name at least one submodule whose output may grow")
    if len(paths) != len(listed):
        raise SlotError(f"slot names must differ, got {listed}")
    return paths


def matches(path: str, pattern: str) -> bool:
    """Return whether a dotted name fits a pattern, in which `*` stands within one part of it."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def place_slots(
    model: nn.Module, slots: SlotNames, example: Any, axes: DeclaredAxes | None = None
) -> Placed:
    """Run the example and return the slots with shapes, axes and symmetries."""
    if example is None:
        raise UsageError("give one batch as example_input, to find the shapes at the slots")
    given, example = example, example_inputs(model, example)
    paths = slot_paths(slots, model)
    modules = {path: _find(model, path) for path in paths.values()}
    with counting(model) as count:
        seen = look(model, modules, example)
    refuse_failed(seen, given)
    shapes = {path: output_shape(path, seen.outputs[path]) for path in modules}
    declared = _declared(paths, shapes, axes)
    found = Inference(model, modules, example, shapes, declared)
    axes_at = {path: found.axes(path) for path in modules}
    symmetries = find_symmetries(
        model,
        example,
        found.batch_axis,
        {path: (one, shapes[path]) for path, one in axes_at.items()},
    )
    result = []
    for name, path in paths.items():
        one, holder = axes_at[path], _holder(seen.kinds[path])
        shape = one.turn(shapes[path])
        kin = Kin(seen.changes[path]) if seen.changes[path] else Kin()
        result.append(Placement(name, path, one.name, shape, symmetries[path], holder, kin))
    flops = count.total // max(1, axis_size(example, found.batch_axis))
    uncounted = count.describe_uncounted()
    if uncounted:
        warn(
            f"the operations of {uncounted} cannot be counted: only max_added_flops limits the "
            f"operations of growth, {HOW_TO_COUNT}"
        )
    return Placed(tuple(result), found.batch_axis, flops, uncounted)


def with_kin(placed: Placed, model: nn.Module, example: Any) -> Placed:
    """Return the slots with what is known of copying their submodules."""
    paths = [slot.path for slot in placed.slots if slot.kin == Kin()]
    if not paths:
        return placed
    example = example_inputs(model, example)
    found = find_kin(model, paths, example, axis_size(example, placed.batch_axis))
    slots = (replace(slot, kin=found.get(slot.path, slot.kin)) for slot in placed.slots)
    return replace(placed, slots=tuple(slots))


def place_nothing(model: nn.Module, example: Any) -> Placed:
    """Return a placement without slots, with the operations of the model.

    The samples are taken to lie along the first axis of its inputs.
    """
    inputs = example_inputs(model, example)
    with counting(model) as count:
        seen = look(model, {}, inputs)
    refuse_failed(seen, example)
    flops = count.total // max(1, axis_size(example, 0))
    return Placed((), 0, flops, count.describe_uncounted())


def _expand(entry: Any, model: nn.Module | None) -> list[str]:
    """Return the submodules that an entry of a list names."""
    if not isinstance(entry, str) or "*" not in entry or model is None:
        return [entry]
    names = [name for name, _ in model.named_modules() if name]
    found = [name for name in names if matches(name, entry)]
    if not found:
        raise SlotError(
            f"no submodule matches {entry!r}{nearest(entry, names) or ';'} the model has: "
            f"{nearest_few(entry, names)}; esper.suggest_slots(model, example) finds good ones"
        )
    return found


def _declared(
    paths: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], axes: DeclaredAxes | None
) -> dict[str, Axes]:
    """Return the declared axes by path, after checking that they fit what flows there."""
    if axes is None:
        return {}
    if not isinstance(axes, str | Mapping):
        raise SlotError(
            f"axes must be a name such as 'BTC' or a dict by slot, got {type(axes).__name__}"
        )
    chosen: dict[str, Axes] = {}
    entries = {"*": axes} if isinstance(axes, str) else axes
    for key, value in entries.items():
        one = parse_axes(value)
        hit = [
            path
            for name, path in paths.items()
            if isinstance(axes, str) or name == key or matches(name, key) or matches(path, key)
        ]
        if not hit:
            hint = instead(key, paths, "slots:")
            raise SlotError(f"axes are declared for {key!r}, which is no slot{hint}")
        for path in hit:
            if len(one.name) != len(shapes[path]):
                raise SlotError(
                    f"axes at {path!r} are declared {one.name}, but its output has the shape "
                    f"{list(shapes[path])}"
                )
            chosen[path] = one
    return chosen


def _find(model: nn.Module, path: str) -> nn.Module:
    known = [name for name, _ in model.named_modules() if name]
    try:
        if not path:
            raise AttributeError
        return model.get_submodule(path)
    except AttributeError:
        raise SlotError(
            f"the model has no submodule {path!r}{nearest(path, known) or ';'} it has: "
            f"{nearest_few(path, known)}; esper.suggest_slots(model, example) finds good ones"
        ) from None


def output_shape(path: str, outputs: list[Any]) -> tuple[int, ...]:
    """Return the shape of a submodule's output, or refuse one that no slot can use."""
    if not outputs:
        raise SlotError(
            f"submodule {path!r} was not called in a forward pass of the example input; "
            "a slot must be on the way from input to output"
        )
    if len(outputs) > 1:
        raise SlotError(
            f"submodule {path!r} was called {len(outputs)} times in one forward pass; a slot's "
            "submodule must be called once (give each use a submodule of its own)"
        )
    output = first_tensor(outputs[0])
    if not isinstance(output, Tensor):
        raise SlotError(
            f"submodule {path!r} returns {type(outputs[0]).__name__}, not a tensor or a tuple that "
            "begins with one; choose a submodule that does"
        )
    if output.dim() not in RANKS or not output.is_floating_point():
        raise SlotError(
            f"submodule {path!r} returns {output.dtype} of shape {list(output.shape)}; a slot "
            "needs floating-point [B, C], [B, T, C] or [B, C, H, W]"
            + ("; if the example is a single sample, give example[None]" * (output.dim() == 1))
        )
    return tuple(output.shape)


def _holder(kind: type) -> Holder:
    kinds: dict[type, Holder] = {tuple: "tuple", list: "list"}
    return "tensor" if issubclass(kind, Tensor) else kinds.get(kind, "other")
