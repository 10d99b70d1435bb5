"""Finding where slots go: checks submodule names, and what flows there, from one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from esper.kasmina.blueprints.kin import Kin, find_kin
from esper.kasmina.flops import HOW_TO_COUNT, counting
from esper.kasmina.inference import Inference
from esper.kasmina.probe import axis_size, first_tensor, look, refuse_failed
from esper.kasmina.symmetry import find_symmetries
from esper.leyline.axes import AXES, RANKS, Axes, AxesName, parse_axes
from esper.leyline.blueprints import Topology
from esper.leyline.errors import SlotError, instead, warn
from esper.leyline.records import Plain
from esper.leyline.symmetry import Symmetry

Holder = Literal["tensor", "tuple", "list", "other"]
"""What a submodule puts out: the activation alone, or in a tuple, a list or another kind of one."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one slot sits and what flows there."""

    name: str
    path: str
    axes: AxesName
    """The axes of the host's activation."""
    shape: tuple[int, ...]
    """Its shape as a seed sees it: [B, C], [B, T, C] or [B, C, H, W]."""
    symmetry: Symmetry
    """What the host makes of the order of positions there."""
    holder: Holder = "tensor"
    """What the host's submodule puts it out in."""
    kin: Kin = field(default_factory=Kin)
    """Whether a copy of the submodule can grow behind it."""

    @property
    def topology(self) -> Topology:
        """Kind of activation at the slot."""
        return AXES[self.axes].topology


@dataclass(frozen=True, slots=True)
class Placed(Plain):
    """All slots of a model, and what was learned about it on the way."""

    slots: tuple[Placement, ...]
    batch_axis: int
    """The axis of its inputs that holds the samples."""
    host_flops: int
    """Operations of one sample's forward pass."""
    uncounted: str = ""
    """Operators that multiply but could not be counted, and where; `host_flops` is without them."""

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Placed:
        """Rebuild what `to_mapping` returned."""
        # Gardens that were saved before copies and uncounted operators were noted have none.
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
    """Run the example and return what each slot's submodule puts out, and what its axes are."""
    paths = slot_paths(slots, model)
    modules = {path: _find(model, path) for path in paths.values()}
    with counting(model) as count:
        seen = look(model, modules, example)
    refuse_failed(seen, example)
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
        result.append(Placement(name, path, one.name, shape, symmetries[path], holder))
    flops = count.total // max(1, axis_size(example, found.batch_axis))
    uncounted = count.describe_uncounted()
    if uncounted:
        warn(
            f"the operations of {uncounted} cannot be counted: growth has no limit of operations "
            f"but one that you set by max_added_flops, {HOW_TO_COUNT}"
        )
    return Placed(tuple(result), found.batch_axis, flops, uncounted)


def with_kin(placed: Placed, model: nn.Module, example: Any) -> Placed:
    """Return slots of which it is known whether copies of their submodules can grow there."""
    paths = [slot.path for slot in placed.slots]
    found = find_kin(model, paths, example, axis_size(example, placed.batch_axis))
    return replace(
        placed, slots=tuple(replace(slot, kin=found[slot.path]) for slot in placed.slots)
    )


def place_nothing(model: nn.Module, example: Any) -> Placed:
    """Return where nothing is to grow: no slots, and what the model itself costs.

    The samples are taken to lie along the first axis of its inputs.
    """
    with counting(model) as count:
        seen = look(model, {}, example)
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
        raise SlotError(f"no submodule matches {entry!r}{instead(entry, names, 'the model has:')}")
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
            told = instead(key, paths, "slots:")
            raise SlotError(f"axes are declared for {key!r}, which is no slot{told}")
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
        told = instead(path, known, "it has:")
        raise SlotError(f"the model has no submodule {path!r}{told}") from None


def output_shape(path: str, outputs: list[Any]) -> tuple[int, ...]:
    """Return the shape of what a submodule puts out, or refuse what no slot can work on."""
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
            f"submodule {path!r} puts out {output.dtype} of shape {list(output.shape)}; a slot "
            "needs floating-point [B, C], [B, T, C] or [B, C, H, W]"
        )
    return tuple(output.shape)


def _holder(kind: type) -> Holder:
    kinds: dict[type, Holder] = {tuple: "tuple", list: "list"}
    return "tensor" if issubclass(kind, Tensor) else kinds.get(kind, "other")
