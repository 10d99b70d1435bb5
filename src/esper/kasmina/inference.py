"""Finding out what the axes of an activation are, by trying the model; what stays open is refused.

Which axis holds the samples decides everything: a seed with attention along a wrong one lets the
samples of a batch read each other, and no error says so. It is found by changing all samples but
one: along the right axis that one stays as it is, to the bit. Which of the other axes holds the
channels follows from which ones change with the length or the resolution of the inputs, else from
the layers around the slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from esper.kasmina.probe import Dependence, Trial, first_tensor, look, shrinking_axes
from esper.leyline.axes import AXES, Axes, AxesName
from esper.leyline.errors import SlotError, warn

_CHANNELS_FIRST = (_ConvNd, _BatchNorm, _InstanceNorm, nn.GroupNorm)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)

_BATCH_FIRST: dict[int, tuple[AxesName, ...]] = {
    2: ("BC",),
    3: ("BTC", "BCL"),
    4: ("BCHW", "BHWC"),
}
"""By rank, what an activation with the samples first can be."""


class Inference:
    """What is found out about the axes at some submodules of a model.

    Args:
        model: the host.
        modules: the submodules behind which slots are to be, by path.
        example: one batch.
        shapes: what each of them puts out for it.
        declared: the axes of those whose owner has said so.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        example: Any,
        shapes: Mapping[str, tuple[int, ...]],
        declared: Mapping[str, Axes],
    ) -> None:
        """Try the model; what cannot be told is refused when it is asked for."""
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
        """Return the axes at a submodule, or refuse what cannot be told."""
        trial = next(trial for trial in self._trials if trial.axis == self.batch_axis)
        found = trial.at(path)
        if path in self._declared:
            self._check_declared(path, self._declared[path], found)
            return self._declared[path]
        shape = self._shapes[path]
        is_sequence = len(shape) == 3
        if found is not None and not found.following:
            raise SlotError(
                f"submodule {path!r} puts out {list(shape)}: no axis has one entry for each "
                "sample; choose a submodule that keeps the samples of a batch apart, such as the "
                "block around it, and give several samples as the example"
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
                f"submodule {path!r} puts out {list(shape)} with the samples not in front; choose "
                "one that puts out [B, C] or [B, C, H, W]"
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
        mixes = any(
            found is not None and found.is_telling and found.following and not found.independent
            for found in watched
        )
        # What a model returns may well be without samples, such as a loss.
        loses = any(found and not found.following for found in (watched if trial.axis else slots))
        fits = all(
            found is None or self._declared[path].batch in found.following
            for path in self._declared
            for found in [trial.at(path)]
        )
        return mixes or loses or not fits

    def _is_open(self) -> bool:
        """Return whether every axis of the inputs that was tried could hold the samples."""
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
        """Return the axes by which one holds the channels: the one that inputs do not stretch."""
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
        """Return the axes that layers of a known kind take for channels at a submodule."""
        slot, shape = self._modules[path], self._shapes[path]
        inside = set(map(id, slot.modules()))
        votes: dict[bool, set[int]] = {True: set(), False: set()}
        known = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(module, _CHANNELS_FIRST + _CHANNELS_LAST)
        }
        entered: dict[str, list[Any]] = {}
        handles = [
            module.register_forward_pre_hook(
                lambda module, args, name=name: entered.setdefault(name, []).extend(args)
            )
            for name, module in known.items()
        ]
        try:
            seen = look(self._model, {**known, path: slot}, self._example)
        finally:
            for handle in handles:
                handle.remove()
        output = seen.tensor(path)
        for name, module in known.items():
            axis = 1 if isinstance(module, _CHANNELS_FIRST) else len(shape) - 1
            if any(_is_same(output, value) for value in entered.get(name, [])):
                votes[True].add(axis)
            mine = [first_tensor(value) for value in seen.outputs[name]]
            alike = any(isinstance(value, Tensor) and value.shape == shape for value in mine)
            # Of two equal sizes nobody can say which is which.
            if id(module) in inside and alike and shape[1] != shape[-1]:
                votes[False].add(axis)
        # Whoever takes the activation itself knows better than who has worked towards it.
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
        "the others changes each of them"
    )
