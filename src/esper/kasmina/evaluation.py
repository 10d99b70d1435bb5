"""Scoring a garden: as it is, and with every distinct on/off configuration of its seeds.

An evaluator returns per-sample results, so that contributions can be compared sample by sample.
Where Esper owns the batches, all configurations of a batch run in one pass that shares their common
parts (`branching`), or side by side where the model does not allow that. Through a user's own
function they are separate calls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from esper.kasmina.contribution import (
    Contributions,
    estimate_contributions,
    participating,
    plan_ablations,
    values_in_points,
)
from esper.kasmina.garden import Garden
from esper.kasmina.slot import MIXING, Slot
from esper.kasmina.slots.probe import (
    call_arguments,
    evaluating,
    map_tensors,
    shapes_of,
    tensors_in,
)
from esper.leyline.errors import EsperError, NonFiniteError, UsageError, reason_of, warn

# ---- Many configurations of seeds in one pass that shares their common parts


class BranchingError(EsperError, RuntimeError):
    """A model changes the batch size behind a slot where configurations branch."""


class Branches:
    """Configurations of one pass, in groups that were equal at all slots so far.

    The batch is made of one part for every group, in their order, `samples` long each.
    """

    def __init__(self, configurations: Tensor, samples: int) -> None:
        """Start with all configurations, bool [K, S], in one group."""
        self.samples = samples
        self.groups: list[list[int]] = [list(range(len(configurations)))]
        self._is_on = configurations.tolist()

    def split(self, index: int, slot: str, h: Tensor, mix: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the activation behind a slot: mixed with the seed where on, unchanged where off.

        Args:
            index: which column of the configurations is the slot's.
            slot: its name.
            h: the host's activation, one part for every group.
            mix: the activation with the seed mixed in.
        """
        if len(h) != len(self.groups) * self.samples:
            raise BranchingError(
                f"slot {slot!r} got {len(h)} samples where {len(self.groups) * self.samples} were "
                "expected: it does not lie behind the slots before it"
            )
        on = [[k for k in group if self._is_on[k][index]] for group in self.groups]
        off = [[k for k in group if not self._is_on[k][index]] for group in self.groups]
        parts = h.split(self.samples)
        lit = [part for part, group in zip(parts, on, strict=True) if group]
        dark = [part for part, group in zip(parts, off, strict=True) if group]
        self.groups = [group for group in (*on, *off) if group]
        if not lit:
            return h
        mixed = mix(h if len(lit) == len(parts) else torch.cat(lit))
        return torch.cat([mixed, *dark]) if dark else mixed

    def places(self) -> list[int]:
        """Return the index of the output part of every configuration."""
        return [
            next(place for place, group in enumerate(self.groups) if number in group)
            for number in range(len(self._is_on))
        ]


@contextmanager
def branching(garden: Garden, configurations: Tensor, samples: int) -> Iterator[Branches]:
    """Within the block, one pass over a batch of `samples` runs all configurations, bool [K, S]."""
    branches = Branches(configurations, samples)
    changed: list[Slot] = []
    try:
        for index, slot in enumerate(garden.seedbed):
            if slot.mode in MIXING and not bool(configurations[:, index].all()):
                slot.branch = partial(branches.split, index, slot.name)
                changed.append(slot)
        yield branches
    finally:
        for slot in changed:
            slot.branch = None


Results = tuple[Tensor, Tensor | None]
"""Losses of samples and their correctness, None where there is none."""

Objective = Callable[[Any, Any], Results]
"""Per-sample objective: (outputs, targets) -> (loss [B], correct [B] in 0 to 1, or None)."""

Evaluate = Callable[[nn.Module], Results]
"""A user's evaluation: model -> (loss [M], correct [M] or None), samples in a fixed order."""

_CACHED_VALUES = 2**22
"""Values at a slot that a pass on the CPU should hold: larger batches leave the caches."""

_LEAST_SAMPLES, _MOST_SAMPLES = 256, 2048
"""Samples that a pass on the CPU holds at its widest, however large or small a sample is."""

_SAMPLES_ON_ACCELERATOR = 16_384


@runtime_checkable
class Evaluator(Protocol):
    """Gives per-sample results of a garden in several configurations."""

    def measure(self, garden: Garden, configurations: Tensor) -> Results:
        """Return loss [K, M] and correctness [K, M] (or None) for configurations [K, S]."""


class FunctionEvaluator:
    """A user's own evaluation function: one call for each configuration."""

    def __init__(self, evaluate: Evaluate) -> None:
        """Wrap the function."""
        self._evaluate = evaluate

    def measure(self, garden: Garden, configurations: Tensor) -> Results:
        """Return loss [K, M] and correctness [K, M] (or None) for configurations [K, S]."""
        results = []
        with evaluating(garden), torch.no_grad():
            for configuration in configurations:
                with garden.seedbed.configured(configuration[None], None):
                    results.append(_checked(self._evaluate(garden), "evaluate(model)", "M"))
                refuse_change(results[0], results[-1])
        losses = torch.stack([loss for loss, _ in results])
        if not losses.numel():
            raise UsageError("the validation set is empty; give it at least one sample")
        correct = [right for _, right in results if right is not None]
        return losses, torch.stack(correct) if correct else None


def empty_set(name: str) -> str:
    """Return the message about a set of batches without any sample."""
    return f"the {name} set is empty; give it at least one batch"


class BatchEvaluator:
    """Batches in a fixed order with a per-sample objective: all configurations in shared passes."""

    def __init__(
        self,
        batches: Iterable[tuple[Any, Any]],
        objective: Objective,
        *,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Use these (inputs, targets) batches; they are iterated anew each time.

        Args:
            batches: in a fixed order.
            objective: per-sample loss and correctness.
            precision: context in which the network runs, for instance autocast.
        """
        self._batches = batches
        self._objective = objective
        self._precision = precision
        self._fuses = True
        self._problems: dict[tuple[type, tuple[str, ...]], str] = {}

    @property
    def name(self) -> str:
        """Name of the batches in errors."""
        return "validation"

    @property
    def problem(self) -> str | None:
        """Why some configurations did not share their passes; None while all do.

        The results are the same; they take longer.
        """
        return next(iter(self._problems.values()), None)

    def measure(self, garden: Garden, configurations: Tensor) -> Results:
        """Return loss [K, M] and correctness [K, M] (or None) for configurations [K, S]."""
        with evaluating(garden), torch.no_grad():
            mixer = _batch_mixer(garden) if len(configurations) > 1 else None
            found = [
                self._measure_batch(garden, configurations, inputs, targets, mixer)
                for inputs, targets in self._batches
            ]
        if not any(loss.numel() for loss, _ in found):
            raise UsageError(empty_set(self.name))
        return joined(found, 1)

    def _measure_batch(
        self, garden: Garden, configurations: Tensor, inputs: Any, targets: Any, mixer: str | None
    ) -> Results:
        """Run one batch in all configurations, shared if the model allows it."""
        leaves = [*tensors_in(targets), *tensors_in(inputs)]
        if not leaves or leaves[0].dim() == 0:
            raise UsageError(
                f"a validation batch holds inputs {shapes_of(inputs)} and targets "
                f"{shapes_of(targets)}; give tensors with one entry per sample, such as [B, C]"
            )
        samples = len(leaves[0])
        # A tensor that all samples share can be neither repeated nor cut; then each configuration
        # has its own pass. It stays so: in a short batch the sizes may agree by chance.
        self._fuses &= garden.batch_axis == 0
        self._fuses &= all(leaf.dim() > 0 and len(leaf) == samples for leaf in leaves)
        limit = pass_samples(garden, leaves[0].device)
        batch = _Batch(inputs, targets, samples)
        if len(configurations) == 1 or samples == 0:
            return self._measure_apart(garden, configurations, batch, limit)
        if mixer is not None or not self._fuses:
            found = self._measure_apart(garden, configurations, batch, 1)
            shared = "inputs or targets hold a tensor that has no entry for each sample"
            self._note(garden, configurations, mixer or shared)
            return found
        problem = self._problems.get(_key(garden, configurations))
        if problem is None:
            try:
                return self._measure_shared(garden, configurations, batch, limit)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                # Any error of a user's model when its batch becomes longer inside it. If that is
                # not the reason, the plain pass below raises the same error.
                reason = reason_of(error)
                problem = (
                    f"the model cannot run them together as one longer batch ({reason}), for "
                    "example because a mask or a shortcut around a slot has the length of the "
                    "original batch"
                )
        found = self._measure_apart(garden, configurations, batch, limit)
        self._note(garden, configurations, problem)
        return found

    def _measure_shared(
        self, garden: Garden, configurations: Tensor, batch: _Batch, limit: int
    ) -> Results:
        """Run all configurations in one pass, over as many samples at a time as it should hold."""
        found = []
        passes = -(-batch.samples * len(configurations) // limit)
        bounds = [batch.samples * number // passes for number in range(passes + 1)]
        for start, stop in itertools.pairwise(sorted(set(bounds))):
            args, kwargs = call_arguments(_cut(batch.inputs, start, stop))
            with branching(garden, configurations, stop - start) as branches, self._precision():
                outputs = garden(*args, **kwargs)
            count = len(branches.groups)
            targets = _repeat(_cut(batch.targets, start, stop), count)
            results = apply_objective(self._objective, outputs, targets)
            if (losses := results[0].numel()) != count * (stop - start):
                raise BranchingError(f"{count * (stop - start)} samples gave {losses} losses")
            found.append(_arranged(results, count, branches.places()))
        return joined(found, 1)

    def _measure_apart(
        self, garden: Garden, configurations: Tensor, batch: _Batch, limit: int
    ) -> Results:
        """Run a batch once per configuration, with as many side by side as a pass should hold."""
        found, samples = [], batch.samples
        for part in configurations.split(max(1, limit // max(samples, 1))):
            count = len(part)
            args, kwargs = call_arguments(_repeat(batch.inputs, count))
            with garden.seedbed.configured(part, samples), self._precision():
                outputs = garden(*args, **kwargs)
            results = apply_objective(self._objective, outputs, _repeat(batch.targets, count))
            if (losses := results[0].numel()) != count * samples:
                raise UsageError(
                    f"the loss function must return one loss per sample: {samples} for this "
                    f"batch, got {losses / count:g}"
                )
            found.append(_arranged(results, count, slice(None)))
        return joined(found, 0)

    def _note(self, garden: Garden, configurations: Tensor, problem: str) -> None:
        """Remember why these slots are not measured in shared passes, and warn once."""
        if not self._problems:
            warn(
                f"each validation takes up to {len(configurations)} passes over the data instead "
                f"of one (the network, and again without each seed, to measure it), because "
                f"{problem}; results are the same, and ablate_every=5 measures seeds in every "
                "fifth epoch only"
            )
        self._problems.setdefault(_key(garden, configurations), problem)


class _Batch(NamedTuple):
    inputs: Any
    targets: Any
    samples: int


def _arranged(results: Results, count: int, places: list[int] | slice) -> Results:
    """Return results by configuration, from those of `count` parts of a batch one by one."""
    loss, correct = results
    by_part = correct if correct is None else correct.reshape(count, -1)[places]
    return loss.reshape(count, -1)[places], by_part


def joined(found: Sequence[Results], dim: int) -> Results:
    """Concatenate results along a dimension."""
    correct = [right for _, right in found if right is not None]
    return torch.cat([loss for loss, _ in found], dim), torch.cat(correct, dim) if correct else None


def apply_objective(objective: Objective, outputs: Any, targets: Any) -> Results:
    """Return loss [B] and correctness [B] or None, or refuse what is not one entry per sample."""
    return _checked(objective(outputs, targets), "the loss function", "B")


def pass_samples(garden: Garden, device: torch.device) -> int:
    """Return the largest batch size of a pass, all configurations together."""
    if device.type != "cpu":
        return _SAMPLES_ON_ACCELERATOR
    largest = max((math.prod(slot.shape[1:]) for slot in garden.seedbed), default=1)
    return min(_MOST_SAMPLES, max(_LEAST_SAMPLES, _CACHED_VALUES // largest))


def as_evaluator(evaluate: Evaluate | Evaluator) -> Evaluator:
    """Return an evaluator for a user's function, or the evaluator itself."""
    if isinstance(evaluate, Evaluator):
        return evaluate
    if callable(evaluate):
        return FunctionEvaluator(evaluate)
    raise UsageError(
        "evaluate must be a function from the model to (loss[M], correct[M] or None), "
        f"got {evaluate!r}"
    )


def evaluate_contributions(
    garden: Garden, evaluate: Evaluate | Evaluator, *, fossils: bool = True
) -> Contributions:
    """Measure what each seed contributes to the score, by switching seeds off and on.

    The result says what the network would lose without each seed, what each seed and each pair give
    alone, and how much more a pair is worth together than apart. Each estimate has a paired
    standard error. For up to four seeds there are Shapley values too. Nothing is recorded in the
    garden.

    Args:
        garden: the network with its seeds.
        evaluate: a function of the model that returns loss and correctness of every sample, always
            in the same order; or an evaluator.
        fossils: whether fossilized seeds are switched off too.
    """
    members = participating(garden.state, fossils=fossils)[0].tolist()
    configurations = plan_ablations(members)
    loss, correct = as_evaluator(evaluate).measure(garden, configurations)
    _refuse_non_finite(loss)
    values = values_in_points(loss, correct).cpu()
    return estimate_contributions(configurations, values, members, garden.slot_names)


def _repeat(value: Any, times: int) -> Any:
    """Repeat the tensors of a batch along their first axis; anything else stays as it is."""
    return map_tensors(value, lambda part: part.repeat(times, *([1] * (part.dim() - 1))))


def _cut(value: Any, start: int, stop: int) -> Any:
    """Return some samples of a batch; anything that is no tensor stays as it is."""
    return map_tensors(value, lambda part: part[start:stop])


def _key(garden: Garden, configurations: Tensor) -> tuple[type, tuple[str, ...]]:
    """Return the key of a problem with shared passes: the model and the slots that differ."""
    varied = (~configurations).any(0).tolist()
    names = [name for name, varies in zip(garden.slot_names, varied, strict=True) if varies]
    return type(garden.model), tuple(names)


def moving_norms(model: nn.Module) -> list[_NormBase]:
    """Return the layers whose running statistics move while the model trains.

    A layer that its owner keeps in eval mode while the model trains is frozen, and left alone.
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
    ]
    if not norms or model.training:
        return [norm for norm in norms if norm.training]
    with evaluating(model):
        model.train()
        return [norm for norm in norms if norm.training]


def _batch_mixer(garden: Garden) -> str | None:
    """Return which layer makes samples of a batch depend on each other, None without one."""
    for name, module in garden.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            return f"{name!r} normalises over the batch even when it evaluates"
    return None


def _checked(result: Any, who: str, size: str) -> Results:
    """Refuse anything but one loss, and one correctness or None, for each sample."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise UsageError(
            f"{who} must return (loss[{size}], correct[{size}] or None), one entry per sample (no "
            f"mean over the batch), got {_kind(result)}"
        )
    loss, correct = result
    if not isinstance(loss, Tensor) or loss.dim() != 1:
        raise UsageError(f"{who} must return one loss per sample, [{size}], got {_kind(loss)}")
    if correct is not None and not (isinstance(correct, Tensor) and correct.shape == loss.shape):
        what = "shape" if isinstance(correct, Tensor) else "type"
        raise UsageError(
            f"{who} returned {loss.numel()} losses but correctness of {what} {_kind(correct)}; "
            "both need one entry per sample"
        )
    return loss, correct


def _refuse_non_finite(loss: Tensor) -> None:
    if not bool(torch.isfinite(loss).all()):
        bad = int((~torch.isfinite(loss)).sum())
        raise NonFiniteError(
            f"the validation loss of {bad} of {loss.numel()} samples is not finite; "
            "lower the learning rate, clip gradients or check the data"
        )


def refuse_change(first: Results, other: Results) -> None:
    """Refuse results of other samples than in the first call."""
    if first[0].shape != other[0].shape:
        raise UsageError(
            f"evaluate returned {first[0].numel()} samples in one call and {other[0].numel()} in "
            "another; it must use the same samples in the same order"
        )
    if (first[1] is None) != (other[1] is None):
        raise UsageError(
            "evaluate returned correctness in some calls and None in others; return it in all, as "
            "in (loss, scores.argmax(1) == targets), or None in all"
        )


def _kind(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
