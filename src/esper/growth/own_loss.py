"""The loss that a model computes itself from labels among its inputs, as those of Hugging Face do.

It is one number for a batch, and growth needs one for every sample. Which loss it is, is found by
what reproduces the model's number on the first batch: classes, tokens, the next token, several
labels, or numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth.batches import Batches, Moved, label_of
from esper.growth.criterion import (
    Criterion,
    Loss,
    guessed_classes,
    guessing_loss,
    make_criterion,
    predictions,
)
from esper.kasmina.evaluation import BatchEvaluator, Objective
from esper.kasmina.garden import Garden
from esper.kasmina.slots.probe import call_arguments, shapes_of, trying
from esper.kasmina.training import by_sample
from esper.leyline.errors import OwnCodeError, UsageError, explaining

OWN = "model"
"""The name of the loss that the model computes itself."""


class OwnersEvaluator(BatchEvaluator):
    """Batches and a network of their owner's, whose failures are told with where they happened."""

    def __init__(
        self,
        batches: Moved,
        objective: Objective,
        *,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Measure on these batches."""
        super().__init__(batches, objective, precision=precision)
        self._moved = batches

    def measure(self, garden: Garden, configurations: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return loss [K, M] and correctness [K, M] (or None) for configurations [K, S]."""
        with explaining(lambda: f"{self._moved.place} failed", OwnCodeError):
            return super().measure(garden, configurations)


@dataclass(frozen=True, slots=True)
class Judged:
    """How a model is judged, and what of a batch it is to be given for that."""

    criterion: Criterion
    trains_with_labels: bool
    is_measured_with_labels: bool
    chance_loss: float = 0.0
    """Loss of a network that only guesses; 0 where nobody knows."""

    @property
    def facts(self) -> dict[str, float]:
        """What a controller is told of the task where the settings do not say it."""
        return {
            "chance_loss": self.chance_loss,
            "num_classes": guessed_classes(self.chance_loss),
        }

    def evaluator(
        self,
        batches: Batches,
        device: torch.device,
        *,
        name: str = "validation",
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> OwnersEvaluator:
        """Return what measures a garden on such batches.

        Args:
            batches: in a fixed order.
            device: where to.
            name: what they are called where one of them fails.
            precision: context in which the network runs, for instance autocast.
        """
        moved = Moved(batches, device, keeps_label=self.is_measured_with_labels, name=name)
        return OwnersEvaluator(moved, self.criterion.per_sample, precision=precision)


def find_criterion(model: nn.Module, loss: Loss | None, batch: Any, device: torch.device) -> Judged:
    """Return how a model is judged; without a loss it is its own, else that of classification."""
    if isinstance(loss, nn.Module):
        loss = loss.to(device)
    inputs, targets = next(iter(Moved([batch], device)))
    label = label_of(batch)
    is_possible = label is not None and _takes(model, label)
    if loss == OWN and not is_possible:
        raise UsageError(
            "loss='model' is for a model that takes labels among its inputs and returns its loss; "
            "batches must be dicts that hold them"
        )
    if is_possible and (loss is None or loss == OWN):
        labelled = next(iter(Moved([batch], device, keeps_label=True)))[0]
        outputs = outputs_of(model, labelled)
        if loss == OWN or own_loss_of(outputs) is not None:
            own = own_criterion(outputs, targets)
            chance = guessing_loss(own, outputs, targets)
            return Judged(own, True, not _does_without(model, inputs), chance)
    outputs = outputs_of(model, inputs)
    chosen = "classification" if loss is None else loss
    criterion = make_criterion(chosen, outputs, targets)
    return Judged(criterion, False, False, guessing_loss(criterion, outputs, targets))


def outputs_of(model: nn.Module, inputs: Any) -> Any:
    """Return what a model that evaluates puts out; say so where it cannot take the inputs."""
    args, kwargs = call_arguments(inputs)
    problem = f"the model cannot take a validation batch {shapes_of(inputs)}"
    with explaining(problem), trying(model, inputs), torch.no_grad():
        return model(*args, **kwargs)


def _does_without(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether a model can do without labels: configurations then share their passes."""
    try:
        predictions(outputs_of(model, inputs))
    except UsageError:
        return False
    return True


def _takes(model: nn.Module, name: str) -> bool:
    """Return whether a model takes an argument of this name."""
    return name in inspect.signature(model.forward).parameters


def own_loss_of(outputs: Any) -> Tensor | None:
    """Return the loss that a model has put among its outputs."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else None
    found = getattr(outputs, "loss", None) if found is None else found
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def own_criterion(outputs: Any, targets: Any) -> Criterion:
    """Return a criterion of the model's own loss.

    A loss for each sample is found by what reproduces the model's number: classes, tokens, the
    next token, several labels or numbers. A model whose loss is none of these is refused.
    """
    told = own_loss_of(outputs)
    if told is None:
        raise UsageError("the model returns no loss of its own; give loss=... to grow()")
    scores = predictions(outputs)
    value = float(told)
    for rule in (_classes, _tokens, _next_tokens, _numbers, _labels):
        try:
            found = rule(scores, targets)
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        if found is None:
            continue
        loss, counts, _ = found
        mean = float(loss.sum() / counts.sum().clamp(min=1))
        if abs(mean - value) <= 1e-3 * max(1.0, abs(value)):
            return Criterion(partial(_by_rule, rule), _read_own, reads_scores=True)
    raise UsageError(
        f"the model's own loss ({value:.4f}) is of a kind that cannot be measured for each sample "
        f"from logits {list(scores.shape)} and labels {shapes_of(targets)}; give loss=function"
    )


def _read_own(outputs: Any, targets: Any) -> Tensor:
    loss = own_loss_of(outputs)
    if loss is None:
        raise UsageError("the model returned no loss for a training batch")
    return loss.reshape(())


_Counted = tuple[Tensor, Tensor, Tensor | None]
"""Sums of losses [B], how many entries they are of [B], and how many of those are right [B]."""


def _by_rule(
    rule: Callable[[Tensor, Any], _Counted | None], outputs: Any, targets: Any
) -> tuple[Tensor, Tensor | None]:
    found = rule(predictions(outputs), targets)
    assert found is not None, "the rule fitted the first batch"
    loss, counts, right = found
    counts = counts.clamp(min=1)
    return loss / counts, None if right is None else right / counts


def _classes(scores: Tensor, labels: Tensor) -> _Counted | None:
    if labels.is_floating_point() or scores.dim() != 2 or labels.dim() > 2:
        return None
    wanted = labels.reshape(-1)
    loss = F.cross_entropy(scores.float(), wanted, reduction="none")
    return loss, torch.ones_like(loss), (scores.argmax(-1) == wanted).float()


def _tokens(scores: Tensor, labels: Tensor) -> _Counted | None:
    if labels.is_floating_point() or scores.dim() != 3 or labels.shape != scores.shape[:2]:
        return None
    counted = labels != -100
    loss = F.cross_entropy(scores.float().transpose(1, 2), labels, reduction="none")
    right = (scores.argmax(-1) == labels) & counted
    return loss.sum(1), counted.sum(1).float(), right.sum(1).float()


def _next_tokens(scores: Tensor, labels: Tensor) -> _Counted | None:
    return _tokens(scores[:, :-1], labels[:, 1:])


def _numbers(scores: Tensor, labels: Tensor) -> _Counted | None:
    if not labels.is_floating_point() or labels.numel() != scores.numel():
        return None
    loss = by_sample(F.mse_loss(scores.float(), labels.reshape(scores.shape), reduction="none"))
    return loss.sum(1), torch.full_like(loss[:, 0], loss.shape[1]), None


def _labels(scores: Tensor, labels: Tensor) -> _Counted | None:
    if labels.shape != scores.shape or not labels.is_floating_point():
        return None
    loss = by_sample(F.binary_cross_entropy_with_logits(scores.float(), labels, reduction="none"))
    right = by_sample(((scores > 0) == (labels > 0.5)).float())
    return loss.sum(1), torch.full_like(loss[:, 0], loss.shape[1]), right.sum(1)
