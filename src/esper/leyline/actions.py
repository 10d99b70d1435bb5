"""The factored action: eight heads, what their indices mean, and which heads an op uses.

`HEAD_VALUES` is the only table of what an index means. PyTorch is imported by the functions that
make tensors, because commands that only read a run need the tables alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from esper.leyline.errors import UsageError
from esper.leyline.slots import NOOP, NUM_BLUEPRINTS, SlotConfig
from esper.leyline.stages import (
    ALPHA_TARGETS,
    SPEED_TICKS,
    STYLE_SPECS,
    TEMPO_EPOCHS,
    AlphaCurve,
    BlendStyle,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# ---- TensorRecord: named tensors that are moved, indexed and saved together


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Base of frozen dataclasses in which every field is a tensor."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a record with a function applied to every tensor."""
        return type(self)(**{name: change(value) for name, value in self.state_dict().items()})

    def to(self, device: torch.device | str) -> Self:
        """Return the record on another device."""
        return self.map(lambda value: value.to(device))

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Return a copy of some rows, by index or bool [R]."""
        import torch

        index = torch.as_tensor(rows)
        return self.map(lambda value: value[index])

    def put(self, where: Any, values: Self) -> None:
        """Write the tensors of another record to an index of every tensor."""
        for name, value in values.state_dict().items():
            getattr(self, name)[where] = value

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the rows of several records."""
        import torch

        names = parts[0].state_dict()
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def state_dict(self) -> dict[str, Tensor]:
        """Return every field by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        """Rebuild what `state_dict` returned."""
        return cls(**{field.name: state[field.name] for field in fields(cls)})


def apply_function(function: Any, *inputs: Any) -> Tensor:
    """Call a `torch.autograd.Function`; PyTorch's `apply` has no type annotations."""
    output: Tensor = function.apply(*inputs)
    return output


class LifecycleOp(IntEnum):
    """What a controller can do at one step."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


NUM_OPS = len(LifecycleOp)

HEAD_NAMES: tuple[str, ...] = (
    "slot",
    "blueprint",
    "style",
    "tempo",
    "alpha_target",
    "alpha_speed",
    "alpha_curve",
    "op",
)
"""Every head, in the order of buffers and networks."""

HeadValue: TypeAlias = str | int | float
"""The meaning of one choice of a head: a name or a number."""

HEAD_VALUES: dict[str, tuple[HeadValue, ...]] = {
    "style": tuple(style.name for style in BlendStyle),
    "tempo": TEMPO_EPOCHS,
    "alpha_target": ALPHA_TARGETS,
    "alpha_speed": SPEED_TICKS,
    "alpha_curve": tuple(curve.name for curve in AlphaCurve),
    "op": tuple(op.name for op in LifecycleOp),
}
"""The meaning of every index of a head; slots and blueprints depend on the host."""

HEAD_UNITS: dict[str, str] = {"tempo": "epochs", "alpha_speed": "ticks"}
"""Units of the heads that have one."""

HEAD_SIZES: dict[str, int] = {
    "slot": SlotConfig.default().num_slots,
    "blueprint": NUM_BLUEPRINTS,
    **{head: len(values) for head, values in HEAD_VALUES.items()},
}
"""Number of choices of every head with three slots and the built-in blueprints."""

CAUSAL_HEADS: dict[LifecycleOp, tuple[str, ...]] = {
    LifecycleOp.WAIT: ("op",),
    LifecycleOp.GERMINATE: ("op", "slot", "blueprint", "style", "tempo", "alpha_target"),
    LifecycleOp.SET_ALPHA_TARGET: (
        "op",
        "slot",
        "style",
        "alpha_target",
        "alpha_speed",
        "alpha_curve",
    ),
    LifecycleOp.PRUNE: ("op", "slot", "alpha_speed", "alpha_curve"),
    LifecycleOp.FOSSILIZE: ("op", "slot"),
    LifecycleOp.ADVANCE: ("op", "slot"),
}
"""The heads that each op uses."""

PLACEHOLDERS: dict[str, int] = {
    "slot": 0,
    "blueprint": NOOP,
    "style": BlendStyle.SIGMOID_ADD,
    "tempo": TEMPO_EPOCHS.index(5),
    "alpha_target": ALPHA_TARGETS.index(1.0),
    "alpha_speed": SPEED_TICKS.index(0),
    "alpha_curve": AlphaCurve.LINEAR,
    "op": LifecycleOp.WAIT,
}
"""The value of a head that the op does not use (for the slot: the first legal one)."""

Actions: TypeAlias = "Mapping[str, Tensor]"
"""One joint action per row: {head: int64[R]}."""


def head_values(
    slot_names: Sequence[str], blueprint_names: Sequence[str]
) -> dict[str, tuple[HeadValue, ...]]:
    """Return the meaning of every index of every head on a host with these slots."""
    return {"slot": tuple(slot_names), "blueprint": tuple(blueprint_names), **HEAD_VALUES}


def choice_text(head: str, value: HeadValue) -> str:
    """Return a choice as text, with its unit if it has one."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} {HEAD_UNITS[head]}" if head in HEAD_UNITS else text


def describe_action(
    indices: Mapping[str, int], values: Mapping[str, Sequence[HeadValue]]
) -> dict[str, HeadValue | None]:
    """Return the choice of every head, None for heads that the op does not use.

    Args:
        indices: one index per head.
        values: the result of `head_values`.
    """
    used = CAUSAL_HEADS[LifecycleOp(indices["op"])]
    return {head: values[head][indices[head]] if head in used else None for head in HEAD_NAMES}


def causal_table() -> Tensor:
    """Return bool [ops, heads]: whether an op uses a head."""
    import torch

    table = torch.zeros(NUM_OPS, len(HEAD_NAMES), dtype=torch.bool)
    for op, heads in CAUSAL_HEADS.items():
        for head in heads:
            table[op, HEAD_NAMES.index(head)] = True
    return table


def placeholder_actions(rows: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the action in which every row waits."""
    import torch

    return {
        head: torch.full((rows,), int(PLACEHOLDERS[head]), dtype=torch.int64, device=device)
        for head in HEAD_NAMES
    }


@dataclass(frozen=True, slots=True)
class Command(TensorRecord):
    """One operation per row, with values instead of indices; tensors [R]."""

    op: Tensor
    """int64, a `LifecycleOp`."""
    slot: Tensor
    """int64, index of the slot."""
    blueprint: Tensor
    """int64, id of the blueprint to germinate."""
    algorithm: Tensor
    """int64, an `AlphaAlgorithm`."""
    ramp: Tensor
    """int64, the `AlphaCurve` of the first blend."""
    tempo: Tensor
    """int64, ticks of the first blend."""
    target: Tensor
    """float64, amplitude to aim for."""
    speed: Tensor
    """int64, ticks of a later ramp, 0 at once."""
    curve: Tensor
    """int64, the `AlphaCurve` of a later ramp."""


def decode_actions(actions: Actions) -> Command:
    """Turn head indices into values; raise for a missing head or an index out of range.

    Slots and blueprints are not checked here, because their numbers depend on the host: the rules
    refuse an operation on one that does not exist.
    """
    import torch

    _check_actions(actions)
    device = actions["op"].device

    def look_up(values: Sequence[HeadValue], head: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[actions[head]]

    styles = [STYLE_SPECS[style] for style in BlendStyle]
    return Command(
        op=actions["op"],
        slot=actions["slot"],
        blueprint=actions["blueprint"],
        algorithm=look_up([int(spec.algorithm) for spec in styles], "style", torch.int64),
        ramp=look_up([int(spec.curve) for spec in styles], "style", torch.int64),
        tempo=look_up(TEMPO_EPOCHS, "tempo", torch.int64),
        target=look_up(ALPHA_TARGETS, "alpha_target", torch.float64),
        speed=look_up(SPEED_TICKS, "alpha_speed", torch.int64),
        curve=actions["alpha_curve"],
    )


_FIXED_HEADS = tuple(head for head in HEAD_NAMES if head not in ("slot", "blueprint"))
"""The heads whose size does not depend on the host."""


def _check_actions(actions: Actions) -> None:
    import torch

    missing = [head for head in HEAD_NAMES if head not in actions]
    if missing:
        raise UsageError(
            f"an action needs all heads {', '.join(HEAD_NAMES)}; missing {', '.join(missing)}"
        )
    shape = actions["op"].shape
    for head in HEAD_NAMES:
        tensor = actions[head]
        # A boolean or byte tensor would act as a mask instead of an index.
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.shape != shape:
            raise UsageError(
                f"head {head!r} must be int64 with one index per row ([{shape.numel()}]), "
                f"got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )
    if not shape.numel():
        return
    # One copy to the CPU for all heads together.
    low, high = torch.stack([actions[head] for head in _FIXED_HEADS]).aminmax(dim=1)
    for head, least, most in zip(_FIXED_HEADS, *torch.stack((low, high)).tolist(), strict=True):
        if least < 0 or most >= HEAD_SIZES[head]:
            raise UsageError(
                f"head {head!r} takes 0 to {HEAD_SIZES[head] - 1}, got {least} to {most}"
            )
