"""Losses as their owners have them, made into what growth needs: a loss for every single sample.

The network is trained on the very number its owner's criterion gives. Contributions are measured
sample by sample, so beside it there is a loss, and where one can be told a correctness, for each.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.evaluation import Objective, apply_objective
from esper.kasmina.slots.probe import map_tensors, shapes_of, tensors_in
from esper.kasmina.training import OBJECTIVES
from esper.leyline.errors import UsageError, explaining, unknown_name

Loss = str | nn.Module | Callable[..., Any]
"""A name, a criterion of `torch.nn`, or a function of (outputs, targets)."""

_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_CLASS_FUNCTIONS = (F.cross_entropy, F.nll_loss, F.multi_margin_loss)
_LOGITS = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
_LOGIT_FUNCTIONS = (F.binary_cross_entropy_with_logits, F.multilabel_soft_margin_loss)
_CHANCES = (nn.BCELoss,)
_CHANCE_FUNCTIONS = (F.binary_cross_entropy,)
_ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, *_LOGITS, *_CHANCES)
_ELEMENTWISE_FUNCTIONS = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    *_LOGIT_FUNCTIONS,
    *_CHANCE_FUNCTIONS,
)


@dataclass(frozen=True, slots=True)
class Criterion:
    """A loss, for a batch to train on and for every sample to measure by."""

    per_sample: Objective
    """(outputs, targets) -> (loss [B], correct [B] in 0 to 1, or None)."""
    of_batch: Callable[[Any, Any], Tensor] | None = None
    """(outputs, targets) -> the number to train on; None for the mean over samples."""
    reads_scores: bool = False
    """Whether a tensor of scores is all it needs of the outputs: its owner wrote none of it."""


def guessing_loss(criterion: Criterion, outputs: Any, targets: Any) -> float:
    """Return the loss of a network that only guesses, all its scores being the same; 0 if unknown.

    There is something to guess where an answer is right or wrong, and nothing where numbers are
    compared.
    """
    if not criterion.reads_scores:
        return 0.0
    with torch.no_grad():
        scores = torch.zeros_like(predictions(outputs))
        loss, correct = apply_objective(criterion.per_sample, scores, targets)
    return 0.0 if correct is None else float(loss.double().mean())


def guessed_classes(chance_loss: float) -> int:
    """Return among how many classes a guess costs as much; 0 where it is no cross-entropy."""
    count = round(math.exp(min(chance_loss, 40.0)))
    return count if count > 1 and math.isclose(math.log(count), chance_loss, rel_tol=1e-4) else 0


def predictions(outputs: Any) -> Tensor:
    """Return the tensor to judge: the output itself, or its logits."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    logits = getattr(outputs, "logits", None) if logits is None else logits
    if isinstance(logits, Tensor):
        return logits
    single = list(tensors_in(outputs))
    if isinstance(outputs, Mapping) and len(single) == 1:
        return single[0]
    raise UsageError(
        f"the model returns {shapes_of(outputs)}, neither a tensor nor something with logits; give "
        "loss=function(outputs, targets) that picks what is to be judged"
    )


def make_criterion(loss: Loss, outputs: Any, targets: Any) -> Criterion:
    """Return a criterion, tried on one batch so that what does not fit is said at once."""
    what = f"outputs {shapes_of(outputs)} and targets {shapes_of(targets)}"
    with explaining(f"the loss cannot be taken of {what}"), torch.no_grad():
        made = _make(loss, outputs, targets)
        loss_of_each, _ = apply_objective(made.per_sample, outputs, targets)
        to_train_on = loss_of_each
        if made.of_batch is not None:
            to_train_on = made.of_batch(outputs, targets)
        _refuse_without_gradient(to_train_on)
        if len(loss_of_each) != _samples(targets):
            raise UsageError(
                f"the loss must return one number for each of the {_samples(targets)} samples, "
                f"got {len(loss_of_each)}"
            )
    return made


def _make(loss: Loss, outputs: Any, targets: Any) -> Criterion:
    if isinstance(loss, str):
        for name, objective in OBJECTIVES.items():
            if name == loss:
                _refuse_misfit(name, predictions(outputs), targets)
                if name == "classification":
                    refuse_labels(predictions(outputs), targets)
                return Criterion(partial(_judged, objective), reads_scores=True)
        raise unknown_name("loss", loss, [*OBJECTIVES, "model"])
    if isinstance(loss, type):
        raise UsageError(f"loss is the class {loss.__name__}; make one of it: {loss.__name__}()")
    if not callable(loss):
        raise UsageError(
            f"loss must be a name, a criterion such as nn.CrossEntropyLoss() or a function, "
            f"got {loss!r}"
        )
    if any(loss is objective for objective in OBJECTIVES.values()):
        return Criterion(loss, reads_scores=True)
    if _reduces(loss):
        found = _Reducing(loss)
        return Criterion(found.per_sample, found.of_batch, reads_scores=True)
    return _from_result(loss, outputs, targets)


def _refuse_misfit(name: str, scores: Tensor, targets: Any) -> None:
    """Refuse targets that a loss by name would read as something else, or not at all."""
    if not isinstance(targets, Tensor):
        raise UsageError(f"targets must be a tensor, got {type(targets).__name__}")
    shapes = f"outputs {list(scores.shape)} and targets {list(targets.shape)} of {targets.dtype}"
    if name in ("multilabel", "regression") and scores.numel() != targets.numel():
        raise UsageError(f"{name!r} compares one by one, which {shapes} do not allow")
    if name in ("classification", "language") and (
        targets.is_floating_point() or targets.dim() != scores.dim() - 1
    ):
        raise UsageError(
            f"{name!r} needs the number of one class for every prediction, not {shapes}; several "
            "labels at once are loss='multilabel', numbers loss='regression'"
        )


def refuse_labels(scores: Tensor, labels: Any) -> None:
    """Refuse labels of classes that a model has no score for; a GPU would not say which."""
    if scores.dim() != 2 or not isinstance(labels, Tensor) or labels.is_floating_point():
        return
    low, high, most = int(labels.min()), int(labels.max()), scores.shape[1]
    if low < 0 or high >= most:
        raise UsageError(
            f"labels go from {low} to {high}, but the model gives {most} scores, for classes 0 to "
            f"{most - 1}; give it an output for each class"
        )


def _judged(objective: Objective, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
    return objective(predictions(outputs), targets)


def _reduces(loss: Any) -> bool:
    """Return whether a loss can be asked for one number per entry instead of their mean."""
    if isinstance(loss, nn.Module):
        return isinstance(getattr(loss, "reduction", None), str)
    try:
        return "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return False


class _Reducing:
    """A criterion of `torch.nn`, or one of its functions, that can leave out the reduction."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._function = loss
        self._each: Any
        given: dict[str, Any] = {}
        while isinstance(self._function, partial):
            given = {**self._function.keywords, **given}
            self._function = self._function.func
        if isinstance(loss, nn.Module):
            self._each = copy.copy(loss)
            self._each.reduction = "none"
            self._how = str(loss.reduction)
            self._ignored = getattr(loss, "ignore_index", None)
        else:
            self._each = partial(loss, reduction="none")
            self._how = str(given.get("reduction", "mean"))
            default = -100 if self._function in (F.cross_entropy, F.nll_loss) else None
            self._ignored = given.get("ignore_index", default)

    def of_batch(self, outputs: Any, targets: Any) -> Tensor:
        scores, targets = self._aligned(outputs, targets)
        loss: Tensor = self._loss(scores, targets)
        return loss.mean() if self._how == "none" else loss

    def per_sample(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
        scores, targets = self._aligned(outputs, targets)
        loss = self._each(scores, targets)
        correct = self._correct(scores, targets)
        counted = self._counted(targets) if loss.shape == targets.shape else None
        return _mean_by_sample(loss, counted), (
            None if correct is None else _mean_by_sample(correct, self._counted(targets))
        )

    def _aligned(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Return scores and targets whose shapes this loss reads as they are meant."""
        scores = predictions(outputs)
        if not isinstance(targets, Tensor):
            raise UsageError(f"targets must be a tensor, got {type(targets).__name__}")
        if self._is(_ELEMENTWISE, _ELEMENTWISE_FUNCTIONS) and scores.shape != targets.shape:
            # PyTorch would compare everything with everything.
            if scores.numel() != targets.numel():
                raise UsageError(
                    f"the loss compares {list(scores.shape)} with {list(targets.shape)}; outputs "
                    "and targets need the same shape"
                )
            targets = targets.reshape(scores.shape)
        if self._is(_ELEMENTWISE, _ELEMENTWISE_FUNCTIONS) and not targets.is_floating_point():
            raise UsageError(
                f"the loss compares numbers, but targets are {targets.dtype}; give them as "
                "targets.float(), or say loss='multilabel' or loss='regression'"
            )
        if self._is(_CLASSES, _CLASS_FUNCTIONS) and scores.dim() > 2:
            scores = _classes_second(scores, targets)
        return scores, targets

    def _correct(self, scores: Tensor, targets: Tensor) -> Tensor | None:
        if self._is(_CLASSES, _CLASS_FUNCTIONS):
            wanted = targets if targets.dim() == scores.dim() - 1 else targets.argmax(1)
            return (scores.argmax(1) == wanted).float()
        if self._is(_LOGITS, _LOGIT_FUNCTIONS):
            return ((scores > 0) == (targets > 0.5)).float()
        if self._is(_CHANCES, _CHANCE_FUNCTIONS):
            return ((scores > 0.5) == (targets > 0.5)).float()
        return None

    def _counted(self, targets: Tensor) -> Tensor | None:
        if self._ignored is None or targets.is_floating_point():
            return None
        counted: Tensor = targets != self._ignored
        return counted

    def _is(self, kinds: tuple[type, ...], functions: tuple[Any, ...]) -> bool:
        return isinstance(self._loss, kinds) or self._function in functions


def _classes_second(scores: Tensor, targets: Tensor) -> Tensor:
    """Return scores [B, K, ...] for targets [B, ...], whichever axis has the classes."""
    if targets.is_floating_point() or targets.dim() != scores.dim() - 1:
        return scores
    second = scores.shape[2:] == targets.shape[1:]
    last = scores.shape[1:-1] == targets.shape[1:]
    if second and last:
        raise UsageError(
            f"cannot tell where {list(scores.shape)} has its classes for targets "
            f"{list(targets.shape)}; give loss=function(outputs, targets), or 'language' for "
            "[B, T, K]"
        )
    return scores.movedim(-1, 1) if last else scores


def _mean_by_sample(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return [B]: the mean over everything but the samples, of what counts."""
    values = values.float()
    if counted is None or counted.shape != values.shape:
        return values.reshape(len(values), -1).mean(1)
    weights = counted.reshape(len(values), -1).to(values)
    flat = values.reshape(len(values), -1)
    return (flat * weights).sum(1) / weights.sum(1).clamp(min=1)


def _from_result(loss: Callable[..., Any], outputs: Any, targets: Any) -> Criterion:
    """Return a criterion of a function, by what it returns: each sample's loss, or one number."""
    result = loss(outputs, targets)
    if isinstance(result, tuple | list):
        return Criterion(loss)
    if not isinstance(result, Tensor):
        raise UsageError(
            "the loss must return a tensor: one number for the batch, or one for each sample, "
            f"got {type(result).__name__}"
        )
    _refuse_without_gradient(result)
    if result.dim() == 1 and len(result) == _samples(targets):
        return Criterion(lambda outputs, targets: (loss(outputs, targets), None))
    if result.numel() != 1:
        raise UsageError(
            f"the loss must return one number for the batch or one for each of the "
            f"{_samples(targets)} samples, got {list(result.shape)}"
        )
    _one_by_one(loss, outputs, targets)
    return Criterion(partial(_one_by_one, loss), lambda *pair: loss(*pair).reshape(()))


def _refuse_without_gradient(loss: Tensor) -> None:
    if not loss.is_floating_point():
        raise UsageError(
            f"the loss is {str(loss.dtype).removeprefix('torch.')}, of which there is no gradient; "
            "it must be a floating-point number, such as a cross-entropy"
        )


def _one_by_one(loss: Callable[..., Any], outputs: Any, targets: Any) -> tuple[Tensor, None]:
    """Return each sample's loss of a function that gives a mean: it is asked once for each."""
    samples = _samples(targets)
    shared = [t for t in tensors_in(outputs) if t.dim() == 0 or len(t) != samples]
    if shared:
        raise UsageError(
            f"the loss gives one number for a batch, and outputs {shapes_of(outputs)} cannot be "
            "cut into samples; return one loss for each sample instead"
        )

    def cut(value: Any, index: int) -> Any:
        return map_tensors(value, lambda tensor: tensor[index : index + 1])

    each = [loss(cut(outputs, i), cut(targets, i)).reshape(()) for i in range(samples)]
    return torch.stack(each).float(), None


def _samples(targets: Any) -> int:
    first = next(iter(tensors_in(targets)), None)
    return 0 if first is None or first.dim() == 0 else len(first)
