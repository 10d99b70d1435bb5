"""Scoring a garden: as it is, and with every distinct on/off configuration of its seeds.

An evaluator returns per-sample results, so that contributions can be compared sample by sample.
Where Esper owns the batches, all configurations of a batch run in one fused pass; through a user's
own function they are separate calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from esper.kasmina.ablation import participating, plan_ablations
from esper.kasmina.contribution import Contributions, estimate_contributions, values_in_points
from esper.kasmina.garden import Garden
from esper.kasmina.placement import call_arguments, evaluating
from esper.leyline.errors import NonFiniteError, UsageError

Objective = Callable[[Any, Any], tuple[Tensor, Tensor | None]]
"""Per-sample objective: (outputs, targets) -> (loss [B], correct [B] in 0 to 1, or None)."""

Evaluate = Callable[[nn.Module], tuple[Tensor, Tensor | None]]
"""A user's evaluation: model -> (loss [M], correct [M] or None), samples in a fixed order."""

_FUSED_SAMPLES_CPU = 512
"""Samples a fused pass may hold on the CPU: one giant batch leaves the caches and is slower."""

_FUSED_SAMPLES_ACCELERATOR = 16_384


@runtime_checkable
class Evaluator(Protocol):
    """Gives per-sample results of a garden in several configurations."""

    def measure(self, garden: Garden, configurations: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return loss [K, M] and correctness [K, M] (or None) for configurations [K, S]."""
        ...


class FunctionEvaluator:
    """A user's own evaluation function: one call for each configuration."""

    def __init__(self, evaluate: Evaluate) -> None:
        """Wrap the function."""
        self._evaluate = evaluate

    def measure(self, garden: Garden, configurations: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return loss [K, M] and correctness [K, M] (or None) for configurations [K, S]."""
        results = []
        with evaluating(garden), torch.no_grad():
            for configuration in configurations:
                with garden.configured(configuration[None], None):
                    results.append(_checked_results(self._evaluate(garden)))
                _refuse_change(results[0], results[-1])
        losses = torch.stack([loss for loss, _ in results])
        correct = [right for _, right in results if right is not None]
        return losses, torch.stack(correct) if correct else None


class BatchEvaluator:
    """Batches in a fixed order with a per-sample objective: all configurations in fused passes."""

    def __init__(
        self,
        batches: Iterable[tuple[Any, Any]],
        objective: Objective,
        *,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        refuses_non_finite: bool = True,
    ) -> None:
        """Use these (inputs, targets) batches; they are iterated anew each time.

        Args:
            batches: in a fixed order.
            objective: per-sample loss and correctness.
            precision: context in which the network runs, for instance autocast.
            refuses_non_finite: raise on a loss that is not finite; whoever watches over many
                networks turns this off and judges by itself.
        """
        self._batches = batches
        self._objective = objective
        self._precision = precision
        self._refuses_non_finite = refuses_non_finite
        self._fuses = True

    def measure(self, garden: Garden, configurations: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return loss [K, M] and correctness [K, M] (or None) for configurations [K, S]."""
        losses: list[Tensor] = []
        corrects: list[Tensor] = []
        with evaluating(garden), torch.no_grad():
            for inputs, targets in self._batches:
                loss, correct = self._measure_batch(garden, configurations, inputs, targets)
                losses.append(loss)
                if correct is not None:
                    corrects.append(correct)
        if not losses:
            raise UsageError("the validation set is empty; give it at least one batch")
        return torch.cat(losses, 1), torch.cat(corrects, 1) if corrects else None

    def _measure_batch(
        self, garden: Garden, configurations: Tensor, inputs: Any, targets: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run one batch, with as many configurations at a time as a pass should hold."""
        leaves = list(_tensors(inputs))
        first = next(itertools.chain(_tensors(targets), leaves), None)
        if first is None or first.dim() == 0:
            raise UsageError("a validation batch must hold tensors with one entry per sample")
        samples = len(first)
        # Something that all samples share cannot be repeated for several configurations; then each
        # has a pass of its own. It stays so: in a short batch the sizes may agree by chance.
        self._fuses &= all(leaf.dim() > 0 and len(leaf) == samples for leaf in leaves)
        limit = _FUSED_SAMPLES_CPU if first.device.type == "cpu" else _FUSED_SAMPLES_ACCELERATOR
        at_once = max(1, limit // max(samples, 1)) if self._fuses else 1
        losses, corrects = [], []
        for part in configurations.split(at_once):
            count = len(part)
            args, kwargs = call_arguments(_repeat(inputs, count))
            with garden.configured(part, samples), self._precision():
                outputs = garden(*args, **kwargs)
            loss, correct = apply_objective(self._objective, outputs, _repeat(targets, count))
            if loss.numel() != count * samples:
                raise UsageError(
                    f"the loss function must return one loss per sample: {samples} for this "
                    f"batch, got {loss.numel() / count:g}"
                )
            if self._refuses_non_finite:
                _refuse_unusable(loss)
            losses.append(loss.reshape(count, samples))
            if correct is not None:
                corrects.append(correct.reshape(count, samples))
        return torch.cat(losses), torch.cat(corrects) if corrects else None


def apply_objective(
    objective: Objective, outputs: Any, targets: Any
) -> tuple[Tensor, Tensor | None]:
    """Return loss [B] and correctness [B] or None, or refuse what is not one entry per sample."""
    result = objective(outputs, targets)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise UsageError(
            "the loss function must return (loss[B], correct[B] or None), one entry per sample "
            f"(no mean over the batch), got {_kind(result)}"
        )
    return _check_shapes(result, "the loss function must return one loss per sample, [B]")


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
    """Measure what every seed is worth: leave-one-out, solo-on, pairs, all-off, interactions.

    Each estimate carries its paired standard error; for up to four seeds Shapley values are there
    too. Nothing is recorded in the garden.
    """
    members = participating(garden.state, fossils=fossils)[0].tolist()
    configurations = plan_ablations(members)
    loss, correct = as_evaluator(evaluate).measure(garden, configurations)
    values = values_in_points(loss, correct).cpu()
    return estimate_contributions(configurations, values, members, garden.slot_names)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _repeat(value: Any, times: int) -> Any:
    """Repeat the tensors of a batch along their first axis; anything else stays as it is."""
    if times == 1:
        return value
    if isinstance(value, Tensor):
        return value.repeat(times, *([1] * (value.dim() - 1)))
    if isinstance(value, Mapping):
        return {key: _repeat(item, times) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_repeat(item, times) for item in value)
    return value


def _checked_results(result: Any) -> tuple[Tensor, Tensor | None]:
    """Refuse results of a user's evaluation that would make every later number meaningless."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise UsageError(
            "evaluate(model) must return (loss[M], correct[M] or None), one entry per sample, "
            f"got {_kind(result)}"
        )
    loss, correct = _check_shapes(
        result, "evaluate must return one loss per validation sample, [M]"
    )
    _refuse_unusable(loss)
    return loss, correct


def _check_shapes(result: Any, rule: str) -> tuple[Tensor, Tensor | None]:
    loss, correct = result
    if not isinstance(loss, Tensor) or loss.dim() != 1:
        raise UsageError(f"{rule}, got {_kind(loss)}")
    if correct is not None and not (isinstance(correct, Tensor) and correct.shape == loss.shape):
        what = (
            f"shape {_kind(correct)}" if isinstance(correct, Tensor) else f"type {_kind(correct)}"
        )
        raise UsageError(
            f"there are {loss.numel()} losses but correctness of {what}; "
            "both need one entry per sample"
        )
    return loss, correct


def _refuse_unusable(loss: Tensor) -> None:
    if loss.numel() == 0:
        raise UsageError("the validation set is empty; give it at least one sample")
    if not bool(torch.isfinite(loss).all()):
        bad = int((~torch.isfinite(loss)).sum())
        raise NonFiniteError(
            f"the validation loss of {bad} of {loss.numel()} samples is not finite; "
            "lower the learning rate, clip gradients or check the data"
        )


def _refuse_change(
    first: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]
) -> None:
    """Contributions compare sample with sample: every call must see the same ones."""
    if first[0].shape != other[0].shape:
        raise UsageError(
            f"evaluate returned {first[0].numel()} samples in one call and {other[0].numel()} in "
            "another; it must use the same samples in the same order"
        )
    if (first[1] is None) != (other[1] is None):
        raise UsageError("evaluate returned correctness in some calls and None in others")


def _kind(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
