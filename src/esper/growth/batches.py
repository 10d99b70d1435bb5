"""Batches as their owners have them: pairs, several inputs, or a dict with labels (Hugging Face).

A batch is read into (inputs, targets): inputs are what the model is called with, a tensor, a tuple
of arguments or a dict of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from esper.kasmina.probe import map_tensors, shapes_of, tensors_in
from esper.leyline.errors import OwnCodeError, UsageError
from esper.leyline.explaining import explaining

Batches = Iterable[Any]
"""(inputs, targets) batches, (input, ..., targets), or dicts with labels; iterated anew each epoch.

`set_epoch(n)` is called first, where it exists. Where an epoch leaves training samples out or has
some twice, `calibration_batches()` may return other batches for the statistics of BatchNorm."""

LABELS = ("labels", "label", "targets", "target", "y")
"""Under which of these names a dict may hold its targets."""


def label_of(batch: Any) -> str | None:
    """Return the name of the targets in a batch that is a dict, None for any other."""
    if not isinstance(batch, Mapping):
        return None
    found = [name for name in LABELS if name in batch]
    if len(found) != 1:
        has = ", ".join(map(str, batch)) or "nothing"
        raise UsageError(
            f"a batch that is a dict must hold its targets under one of {', '.join(LABELS)}, "
            f"got {has}; give (inputs, targets) pairs instead"
        )
    return found[0]


def read_batch(batch: Any, *, keeps_label: bool = False) -> tuple[Any, Any]:
    """Return (inputs, targets); a label stays among the inputs where the model is to see it."""
    label = label_of(batch)
    if label is not None:
        kept = {key: value for key, value in batch.items() if keeps_label or key != label}
        return kept, batch[label]
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise UsageError(
            "batches must be (inputs, targets) pairs, (input, ..., targets), or dicts with labels, "
            f"got a {type(batch).__name__}{size}"
        )
    *inputs, targets = batch
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets


class Moved:
    """Batches, read and on a device."""

    def __init__(
        self,
        batches: Batches,
        device: torch.device,
        *,
        keeps_label: bool = False,
        name: str = "validation",
    ):
        """Read these batches; see `read_batch` about labels. The name is for messages."""
        self._batches = batches
        self._device = device
        self._keeps_label = keeps_label
        self._name = name
        self._number = 0
        self._read: tuple[Any, Any] | None = None

    @property
    def place(self) -> str:
        """Which batch it is, with its shapes, once it was read."""
        shapes = "" if self._read is None else f" ({', '.join(map(shapes_of, self._read))})"
        return f"{self._name} batch {self._number}{shapes}"

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._number, self._read = 1, None
        with explaining(lambda: f"{self.place} cannot be read", OwnCodeError):
            iterator = iter(self._batches)
        while True:
            with explaining(lambda: f"{self.place} cannot be read", OwnCodeError):
                batch = next(iterator, _END)
                if batch is _END:
                    return
                inputs, targets = read_batch(batch, keeps_label=self._keeps_label)
                self._read = inputs, targets
                moved = self._moved(inputs), self._moved(targets)
            yield moved
            self._number, self._read = self._number + 1, None

    def _moved(self, value: Any) -> Any:
        return map_tensors(value, self._move)

    def _move(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            raise UsageError(f"{self.place} is on the meta device, which holds no numbers")
        return tensor.to(self._device, non_blocking=True)


class Windows:
    """A stream of batches cut into windows of so many steps, each of which counts as an epoch.

    A window begins where the last one ended. A data set that can be read again is, with its own
    `set_epoch`; an iterator ends when it is read through.
    """

    def __init__(self, batches: Batches, steps: int) -> None:
        """Cut these batches into windows of `steps`."""
        if steps < 1:
            raise UsageError(f"decide_every must be at least 1 step, got {steps}")
        self._batches = batches
        self._steps = steps
        self._is_stream = isinstance(batches, Iterator)
        self._window = 0
        self._stream: Iterator[Any] | None = batches if isinstance(batches, Iterator) else None
        self._passes = 0

    def __len__(self) -> int:
        return self._steps

    def set_epoch(self, epoch: int) -> None:
        """Choose which window is next; going back or ahead reads what lies between again."""
        if epoch == self._window + 1:
            return
        if self._is_stream:
            raise UsageError(
                "batches that can be read only once cannot be resumed; give a list or a DataLoader"
            )
        self._stream, self._passes, self._window = None, 0, 0
        for _ in range((epoch - 1) * self._steps):
            if self._next() is _END:
                raise UsageError("the training set is empty; give it at least one batch")
        self._window = epoch - 1

    def __iter__(self) -> Iterator[Any]:
        self._window += 1
        for _ in range(self._steps):
            batch = self._next()
            if batch is _END:
                return
            yield batch

    def _next(self) -> Any:
        if self._stream is not None:
            batch = next(self._stream, _END)
            if batch is not _END or self._is_stream:
                return batch
        self._passes += 1
        set_epoch = getattr(self._batches, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._passes)
        self._stream = iter(self._batches)
        return next(self._stream, _END)


_END = object()


def first_batch(batches: Batches) -> Any:
    """Return the first validation batch that holds something, as it comes."""
    with explaining("the first validation batch cannot be read", OwnCodeError):
        for batch in batches:
            if not is_empty(batch):
                return batch
    raise UsageError("the validation set is empty; give it at least one batch")


def is_empty(batch: Any) -> bool:
    """Return whether a batch holds tensors, but no sample."""
    sizes = [len(tensor) for tensor in tensors_in(batch) if tensor.dim()]
    return bool(sizes) and not any(sizes)


def check_batches(name: str, batches: Any) -> None:
    """Refuse what cannot be iterated anew each epoch."""
    if isinstance(batches, Iterator):
        advice = "give a list or a DataLoader"
        if name == "train":
            advice += ", or decide_every=N to take decisions within one pass"
        raise UsageError(f"{name} can be read only once; {advice}")
    if isinstance(batches, Tensor | str | Mapping) or not isinstance(batches, Iterable):
        is_indexed = hasattr(batches, "__getitem__") and hasattr(batches, "__len__")
        if isinstance(batches, Tensor | str | Mapping) or not is_indexed:
            raise UsageError(
                f"{name} must be batches to iterate over, such as a DataLoader, got a "
                f"{type(batches).__name__}"
            )
        raise UsageError(
            f"{name} is a {type(batches).__name__} of single samples; wrap it in a DataLoader"
        )


def count_steps(batches: Batches) -> int:
    """Return how many training batches an epoch has; refuse those that do not say."""
    if not isinstance(batches, Sized):
        raise UsageError(
            "to deepen a network, it must be known how long the run is, but train has no length; "
            "give it one (a list, a DataLoader), or decide_every=N steps that count as an epoch"
        )
    return len(batches)


def count_samples(batches: Batches) -> int:
    """Return how many samples an epoch of somebody's batches has; 0 where they do not say."""
    if isinstance(batches, DataLoader):
        return len(batches.dataset) if isinstance(batches.dataset, Sized) else 0
    if not isinstance(batches, Sequence):
        return 0
    # What is wrong with a batch is said when it is trained on.
    first = [next((t for t in tensors_in(batch) if t.dim()), None) for batch in batches]
    return sum(len(each) for each in first if each is not None)
