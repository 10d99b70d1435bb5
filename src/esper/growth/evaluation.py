"""Scoring a garden: as it is, and with every distinct on/off configuration of its seeds.

An evaluator returns per-sample results, so that contributions can be compared sample by sample.
Where Esper owns the batches, all configurations of a batch run in one fused pass; through a user's
own function they are separate calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from esper.kasmina.ablation import participating, plan_ablations
from esper.kasmina.contribution import Contributions, estimate_contributions, values_in_points
from esper.kasmina.garden import Garden
from esper.kasmina.placement import call_arguments, evaluating
from esper.leyline.errors import NonFiniteError, UsageError
from esper.tasks.objective import Objective

Evaluate = Callable[[nn.Module], tuple[Tensor, Tensor | None]]
"""A user's evaluation: model -> (loss [M], correct [M] or None), samples in a fixed order."""

_FUSED_SAMPLES_CPU = 512
"""Samples a fused pass may hold on the CPU: one giant batch leaves the caches and is slower."""

_FUSED_SAMPLES_ACCELERATOR = 16_384


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
                    results.append(_checked(self._evaluate(garden)))
        losses = torch.stack([loss for loss, _ in results])
        correct = [right for _, right in results if right is not None]
        return losses, torch.stack(correct) if correct else None


class BatchEvaluator:
    """Batches in a fixed order with a per-sample objective: all configurations in fused passes."""

    def __init__(self, batches: Iterable[tuple[Any, Any]], objective: Objective) -> None:
        """Use these (inputs, targets) batches; they are iterated anew each time."""
        self._batches = batches
        self._objective = objective

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
        samples = len(targets)
        on_cpu = targets.device.type == "cpu"
        limit = _FUSED_SAMPLES_CPU if on_cpu else _FUSED_SAMPLES_ACCELERATOR
        losses, corrects = [], []
        for part in configurations.split(max(1, limit // max(samples, 1))):
            repeated = _repeat(inputs, len(part))
            with garden.configured(part, samples):
                args, kwargs = call_arguments(repeated)
                outputs = garden(*args, **kwargs)
            loss, correct = _checked(self._objective(outputs, _repeat(targets, len(part))))
            losses.append(loss.reshape(len(part), samples))
            if correct is not None:
                corrects.append(correct.reshape(len(part), samples))
        return torch.cat(losses), torch.cat(corrects) if corrects else None


def as_evaluator(evaluate: Evaluate | Evaluator) -> Evaluator:
    """Return an evaluator for a user's function, or the evaluator itself."""
    if isinstance(evaluate, FunctionEvaluator | BatchEvaluator):
        return evaluate
    if callable(evaluate):
        return FunctionEvaluator(evaluate)
    return evaluate


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


def _repeat(value: Any, times: int) -> Any:
    """Repeat a batch (a tensor, or a tuple or dict of them) along its first axis."""
    if times == 1:
        return value
    if isinstance(value, Tensor):
        return value.repeat(times, *([1] * (value.dim() - 1)))
    if isinstance(value, dict):
        return {key: _repeat(item, times) for key, item in value.items()}
    return tuple(_repeat(item, times) for item in value)


def _checked(result: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Refuse results that would make every later number meaningless."""
    try:
        loss, correct = result
    except (TypeError, ValueError):
        raise UsageError(
            "evaluate(model) must return (loss[M], correct[M] or None), one entry per sample"
        ) from None
    if not isinstance(loss, Tensor) or loss.dim() != 1:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(f"evaluate must return one loss per validation sample, [M], got {shape}")
    if loss.numel() == 0:
        raise UsageError("the validation set is empty; give it at least one sample")
    if correct is not None and correct.shape != loss.shape:
        raise UsageError(
            f"evaluate returned {loss.numel()} losses but correctness of shape "
            f"{list(correct.shape)}; both need one entry per sample"
        )
    if not bool(torch.isfinite(loss).all()):
        bad = int((~torch.isfinite(loss)).sum())
        raise NonFiniteError(
            f"the validation loss of {bad} of {loss.numel()} samples is not finite; "
            "lower the learning rate, clip gradients or check the data"
        )
    return loss, correct
