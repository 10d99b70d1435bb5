"""The user's batches and optimizer, as growth needs them.

A batch is a pair, a tuple of several inputs and targets, or a dict with labels (Hugging Face). It
is read into (inputs, targets); the model is called with the inputs: a tensor, a tuple of arguments
or a dict of them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from esper.kasmina.evaluation import BatchEvaluator, empty_set, moving_norms
from esper.kasmina.garden import Garden
from esper.kasmina.slots.arguments import read_batch, whole_dict
from esper.kasmina.slots.probe import (
    call_arguments,
    map_tensors,
    shapes_of,
    tensors_in,
    trying,
)
from esper.leyline.errors import EsperError, OwnCodeError, UsageError, describe_exception, warn

Batches = Iterable[Any]
"""(inputs, targets) batches, (input, ..., targets), or dicts with labels; iterated in each epoch.

`set_epoch(n)` is called first, if there is one. If an epoch omits or repeats training samples,
`calibration_batches()` may return other batches for the statistics of BatchNorm."""


@contextmanager
def explaining(
    problem: str | Callable[[], str], kind: type[EsperError] = UsageError
) -> Iterator[None]:
    """Turn exceptions of a user's code into an error of one line.

    Args:
        problem: what could not be done, or a function that returns it.
        kind: class of the error.
    """
    try:
        yield
    except (EsperError, Warning):
        raise
    except Exception as error:
        what = problem if isinstance(problem, str) else problem()
        raise kind(f"{what}: {describe_exception(error)}") from error


class DeviceBatches:
    """Batches read into (inputs, targets) and moved to a device.

    Args:
        batches: the user's batches.
        device: where to move them.
        keeps_label: whether inputs keep the targets (`read_batch`).
        name: name of the batches in errors.
        argument: the only parameter of the model, if it may take a dict as a whole
            (`only_argument`).
    """

    def __init__(
        self,
        batches: Batches,
        device: torch.device,
        *,
        keeps_label: bool = False,
        name: str = "validation",
        argument: str | None = None,
    ) -> None:
        """Read nothing yet."""
        self._batches = batches
        self._device = device
        self._keeps_label = keeps_label
        self.name = name
        self._argument = argument
        self._number = 0
        self._read: tuple[Any, Any] | None = None

    @property
    def place(self) -> str:
        """The current batch by number, with its shapes once it was read."""
        shapes = "" if self._read is None else f" ({', '.join(map(shapes_of, self._read))})"
        return f"{self.name} batch {self._number}{shapes}"

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._number, self._read = 1, None
        with explaining(lambda: f"{self.place} cannot be read", OwnCodeError):
            iterator = iter(self._batches)
        while True:
            with explaining(lambda: f"{self.place} cannot be read", OwnCodeError):
                batch = next(iterator, END)
                if batch is END:
                    return
                inputs, targets = read_batch(batch, keeps_label=self._keeps_label)
                self._read = inputs, targets
                inputs = whole_dict(inputs, self._argument)
                moved = map_tensors(inputs, self._move), map_tensors(targets, self._move)
            yield moved
            self._number, self._read = self._number + 1, None

    def _move(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            raise UsageError(
                f"{self.place} is on the meta device, which holds no numbers; load real data"
            )
        return tensor.to(self._device, non_blocking=True)


class OwnersEvaluator(BatchEvaluator):
    """Measures on the user's batches; an error in the user's code says which batch failed."""

    _batches: DeviceBatches

    @property
    def name(self) -> str:
        """Name of the batches in errors."""
        return self._batches.name

    def measure(self, garden: Garden, configurations: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return loss [K, M] and correctness [K, M] (or None) for configurations [K, S]."""
        with explaining(lambda: f"{self._batches.place} failed", OwnCodeError):
            return super().measure(garden, configurations)


class BatchStream:
    """Batches one after another, pass after pass.

    A data set is read again from its start, with its own `set_epoch`; an iterator ends when it is
    exhausted.
    """

    def __init__(self, batches: Batches) -> None:
        """Begin with the first batch."""
        self._batches = batches
        self._is_once = isinstance(batches, Iterator)
        self._stream: Iterator[Any] | None = batches if isinstance(batches, Iterator) else None
        self._passes = 0
        self.position = 0
        """How many batches were read."""

    def seek(self, position: int) -> None:
        """Go to the batch after so many; going back or ahead reads what lies between again."""
        if position == self.position:
            return
        if self._is_once:
            raise UsageError(
                "train is an iterator, which cannot be resumed; give a list or a DataLoader"
            )
        self._stream, self._passes, self.position = None, 0, 0
        while self.position < position:
            if self.next() is END:
                raise UsageError(empty_set("training"))

    def next(self) -> Any:
        """Return the next batch, `END` where there is none."""
        batch = self._read()
        self.position += batch is not END
        return batch

    def _read(self) -> Any:
        if self._stream is not None:
            batch = next(self._stream, END)
            if batch is not END or self._is_once:
                return batch
        self._passes += 1
        set_epoch = getattr(self._batches, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._passes)
        self._stream = iter(self._batches)
        return next(self._stream, END)


class Windows:
    """A stream of batches cut into windows of so many steps, each of which counts as an epoch.

    A window begins where the last one ended.
    """

    def __init__(self, batches: Batches, steps: int) -> None:
        """Cut these batches into windows of `steps`."""
        if steps < 1:
            raise UsageError(f"decide_every must be at least 1 step, got {steps}")
        self._stream = BatchStream(batches)
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def set_epoch(self, epoch: int) -> None:
        """Choose which window is next."""
        self._stream.seek((epoch - 1) * self._steps)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._steps):
            batch = self._stream.next()
            if batch is END:
                return
            yield batch


def batch_size(batch: Any) -> int:
    """Return how many samples a batch has; 1 where nothing in it says so."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 1)


END = object()


def first_batch(batches: Batches) -> Any:
    """Return the first validation batch that is not empty, unread."""
    with explaining("the first validation batch cannot be read", OwnCodeError):
        for batch in batches:
            if not is_empty(batch):
                return batch
    raise UsageError(empty_set("validation"))


def is_empty(batch: Any) -> bool:
    """Return whether a batch has tensors but no samples."""
    sizes = [len(tensor) for tensor in tensors_in(batch) if tensor.dim()]
    return bool(sizes) and not any(sizes)


def check_batches(name: str, batches: Any) -> None:
    """Refuse what cannot be iterated in every epoch."""
    if isinstance(batches, Iterator):
        advice = "give a list or a DataLoader"
        if name == "train":
            advice += ", or write decide_every=N to decide every N steps of one pass"
        raise UsageError(f"{name} is an iterator, which can be read only once; {advice}")
    kind = type(batches).__name__
    if isinstance(batches, tuple | list) and batches and isinstance(batches[0], Tensor):
        raise UsageError(
            f"{name} is a {kind} of tensors, not of batches; write "
            "DataLoader(TensorDataset(inputs, targets), batch_size=64), or [(inputs, targets)] "
            "for a single batch"
        )
    is_wrong = isinstance(batches, Tensor | str | Mapping)
    if not is_wrong and not isinstance(batches, Iterable) and hasattr(batches, "__getitem__"):
        raise UsageError(f"{name} is a {kind} of single samples; wrap it in a DataLoader")
    if is_wrong or not isinstance(batches, Iterable):
        raise UsageError(
            f"{name} must be an iterable of batches, such as a DataLoader, got a {kind}"
        )


def check_data(train: Batches, val: Batches, test: Batches | None) -> Any:
    """Refuse batches that cannot be iterated, or hold no sample; return the first for validation.

    The training set is read only when it is trained on, and the test set at the end.
    """
    check_batches("train", train)
    check_batches("val", val)
    first = first_batch(val)
    if test is not None:
        check_batches("test", test)
        # The test set is read only once, at the end; but a run should not fail there.
        is_listed = isinstance(test, Sequence) and all(map(is_empty, test))
        if is_listed or (isinstance(test, Sized) and not len(test)):
            raise UsageError(empty_set("test"))
    return first


def count_steps(batches: Batches) -> int:
    """Return the number of training batches in an epoch; refuse batches without a length."""
    if not isinstance(batches, Sized):
        raise UsageError(
            "deepen needs the length of the run, but train has no length; give train as a list or "
            "a DataLoader, or write decide_every=N"
        )
    return len(batches)


def usual_batch_size(batches: Batches, otherwise: int) -> int:
    """Return how many samples a batch of somebody's has, where that is known before reading."""
    if isinstance(batches, Sequence) and batches:
        return batch_size(batches[0])
    return getattr(batches, "batch_size", None) or otherwise


def count_samples(batches: Batches) -> int:
    """Return the number of samples in an epoch of the user's batches; 0 if unknown."""
    if isinstance(batches, DataLoader):
        return len(batches.dataset) if isinstance(batches.dataset, Sized) else 0
    if not isinstance(batches, Sequence):
        return 0
    # Errors in a batch are raised when it is trained on.
    first = [next((t for t in tensors_in(batch) if t.dim()), None) for batch in batches]
    return sum(len(each) for each in first if each is not None)


def generators_of(batches: Batches) -> list[torch.Generator]:
    """Return the generators of their own that a `DataLoader` and its samplers draw from."""
    places = [batches, getattr(batches, "sampler", None)]
    places.append(getattr(getattr(batches, "batch_sampler", None), "sampler", None))
    found = [getattr(place, "generator", None) for place in places]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


# ---- Checks of the model before training


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU without any."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def outputs_of(model: nn.Module, inputs: Any) -> Any:
    """Return the outputs of a model in eval mode; refuse inputs that it cannot take."""
    args, kwargs = call_arguments(inputs)
    is_dict = isinstance(inputs, tuple) and len(inputs) == 1 and isinstance(inputs[0], Mapping)
    problem = (
        f"the model cannot take a validation batch {shapes_of(inputs[0] if is_dict else inputs)}"
    )
    if is_dict:
        problem += " as the one argument of its forward; rename its keys, or give (input, target)"
    with explaining(problem), trying(model, inputs), torch.no_grad():
        return model(*args, **kwargs)


def refuse_meta(model: nn.Module) -> None:
    """Refuse a model with tensors on the meta device."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UsageError(
                f"{name!r} of the model is on the meta device, which holds no numbers; build the "
                "model on a real device, or call model.to_empty(device=...) and load weights"
            )


def warn_of_moving_statistics(model: nn.Module, *, has_own_loop: bool = False) -> None:
    """Warn if a frozen model has BatchNorm layers whose running statistics still change.

    Args:
        model: the model.
        has_own_loop: whether the user's code calls `model.train()`.
    """
    moving = set(moving_norms(model))
    found = {
        name: module
        for name, module in model.named_modules()
        if module in moving and module.weight is not None and not module.weight.requires_grad
    }
    if not found:
        return
    first = next(iter(found))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    classes = {
        f"torch.nn.{kind.__name__}" if kind.__module__.startswith("torch.") else kind.__name__
        for kind in map(type, found.values())
    }
    hold = f"[m.eval() for m in {{}}.modules() if isinstance(m, {' | '.join(sorted(classes))})]"
    if has_own_loop:
        advice = f"write after each model.train(): {hold.format('model')}"
    else:
        advice = (
            "write in the model's class, or in a subclass: def train(self, mode=True): "
            f"super().train(mode); {hold.format('self')}; return self"
        )
    warn(
        f"the parameters of {first!r}{more} are frozen, but the running statistics still change; "
        f"to hold them still, {advice}"
    )


# ---- Optimizers: an instance, or a function that makes one


OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes an optimizer of a network's parameters before it grows; seeds are added later."""

MakeOptimizer = Callable[[Garden], Optimizer]
"""Returns the optimizer of a garden, or of its twin."""


def optimizer_maker(given: Optimizer | OptimizerFactory, model: nn.Module) -> MakeOptimizer:
    """Return what makes the optimizer of a garden around this model, or around a copy of it."""
    if isinstance(given, Optimizer):
        return _instance_maker(given, model)
    if not callable(given):
        raise UsageError(
            "optimizer must be a torch.optim.Optimizer, or a function that makes one, got "
            f"{given!r}; write optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )

    def make(garden: Garden) -> Optimizer:
        parameters = list(garden.parameters())
        problem = "the optimizer cannot be made from the model's parameters"
        if not any(parameter.requires_grad for parameter in parameters):
            problem += ", which are all frozen (pass them on all the same; seeds are added to them)"
        with explaining(problem):
            made = given(parameters)
        if not isinstance(made, Optimizer):
            raise UsageError(
                f"optimizer must return a torch.optim.Optimizer, got {type(made).__name__}; write "
                "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
            )
        return made

    return make


def warn_of_left_out(optimizer: Optimizer, model: nn.Module) -> None:
    """Warn if an optimizer does not hold all trainable parameters of a model."""
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
    left_out = [name for name, one in trainable.items() if id(one) not in held]
    if left_out:
        warn(
            f"the optimizer lacks {len(left_out)} of the model's {len(trainable)} trainable "
            f"parameters, such as {left_out[0]!r}, which will not change; make it from "
            "model.parameters(), or call requires_grad_(False) on those that are to stay"
        )


def _instance_maker(given: Optimizer, model: nn.Module) -> MakeOptimizer:
    own = {id(parameter) for parameter in model.parameters()}
    strangers = [p for group in given.param_groups for p in group["params"] if id(p) not in own]
    if strangers:
        raise UsageError(
            f"the optimizer holds {len(strangers)} parameters that are not the model's; make it "
            "from model.parameters(), after all changes to the model"
        )

    def make(garden: Garden) -> Optimizer:
        if garden.model is model:
            return given
        places: dict[int, Any] = {
            id(old): new
            for old, new in zip(model.parameters(), garden.model.parameters(), strict=True)
        }
        # Without the original's state and seeds: the twin's own are filled in by name.
        fresh = type(given).__new__(type(given))
        groups = [
            {
                **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
                "params": [places[id(p)] for p in group["params"] if id(p) in places],
            }
            for group in given.param_groups
        ]
        fresh.__setstate__(
            {"defaults": given.defaults, "state": defaultdict(dict), "param_groups": groups}
        )
        return fresh

    return make
