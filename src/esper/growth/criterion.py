"""The user's loss as growth needs it: one number to train on, and a loss for every sample.

The network is trained on exactly the number that the user's criterion, or the model itself, gives.
Contributions need a loss, and where answers are right or wrong a correctness, for every sample.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth.batches import Batches, DeviceBatches, OwnersEvaluator, explaining, outputs_of
from esper.kasmina.evaluation import Objective, apply_objective
from esper.kasmina.slots.arguments import label_of, only_argument
from esper.kasmina.slots.probe import map_tensors, shapes_of, tensors_in
from esper.kasmina.training import OBJECTIVES
from esper.leyline.errors import UnknownNameError, UsageError, unknown_name

Loss = str | nn.Module | Callable[..., Any]
"""A name, a criterion of `torch.nn`, or a function of (outputs, targets)."""

OWN = "model"
"""The name of the loss that the model computes itself."""

_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_LOGITS = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
_ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, *_LOGITS)
_FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
}
"""Functions of `torch.nn.functional`, with the criteria that call them."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """A loss, for a batch to train on and for every sample to measure by."""

    per_sample: Objective
    """(outputs, targets) -> (loss [B], correct [B] in 0 to 1, or None)."""
    of_batch: Callable[[Any, Any], Tensor] | None = None
    """(outputs, targets) -> the number to train on; None for the mean over samples."""
    reads_scores: bool = False
    """Whether it needs nothing but a tensor of scores, so that it can judge made-up ones."""


def guessing_loss(criterion: Criterion, outputs: Any, targets: Any) -> float:
    """Return the loss of a network that only guesses, with equal scores; 0 if unknown.

    It is known where answers are right or wrong, not where numbers are compared.
    """
    if not criterion.reads_scores:
        return 0.0
    with torch.no_grad():
        scores = torch.zeros_like(predictions(outputs))
        loss, correct = apply_objective(criterion.per_sample, scores, targets)
    return 0.0 if correct is None else float(loss.double().mean())


def guessed_classes(chance_loss: float) -> int:
    """Return the number of classes of which this is the guessing loss; 0 if there is none."""
    count = round(math.exp(min(chance_loss, 40.0)))
    return count if count > 1 and math.isclose(math.log(count), chance_loss, rel_tol=1e-4) else 0


def predictions(outputs: Any) -> Tensor:
    """Return the scores in the outputs of a model: the output itself, or its logits."""
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
        f"the model returns {shapes_of(outputs)}, neither a tensor nor an object with logits; "
        "write loss=function(outputs, targets)"
    )


def make_criterion(loss: Loss, outputs: Any, targets: Any) -> Criterion:
    """Return a criterion; trying it on one batch finds at once what does not fit."""
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
                f"the loss returned {len(loss_of_each)} numbers for {_samples(targets)} samples; "
                "return one for each sample"
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
        unknown = unknown_name("loss", loss, OBJECTIVES)
        raise UnknownNameError(f"{unknown}, {OWN}; or give a criterion such as nn.MSELoss()")
    if isinstance(loss, type):
        raise UsageError(f"loss is the class {loss.__name__}; write loss={loss.__name__}()")
    if not callable(loss):
        raise UsageError(
            "loss must be a name, a criterion such as nn.CrossEntropyLoss() or a function, got "
            f"{loss!r}"
        )
    if any(loss is objective for objective in OBJECTIVES.values()):
        return Criterion(loss, reads_scores=True)
    if _reduces(loss):
        found = _Reducing(loss)
        return Criterion(found.per_sample, found.of_batch, reads_scores=True)
    return _from_result(loss, outputs, targets)


def _refuse_misfit(name: str, scores: Tensor, targets: Any) -> None:
    """Refuse targets that do not fit a loss given by name."""
    if not isinstance(targets, Tensor):
        raise UsageError(f"targets must be a tensor, got {type(targets).__name__}")
    shapes = f"outputs {list(scores.shape)} and targets {list(targets.shape)} of {targets.dtype}"
    if name in ("multilabel", "regression") and scores.numel() != targets.numel():
        raise UsageError(f"loss={name!r} needs a target for each output, got {shapes}")
    is_labelled = not targets.is_floating_point() and targets.dim() == scores.dim() - 1
    if name in ("classification", "language") and not is_labelled:
        raise UsageError(
            f"loss={name!r} needs one class number for each prediction, got {shapes}; write "
            "loss='regression' for numbers, loss='multilabel' for several labels at once, or give "
            "class numbers as targets.long()"
        )
    if name == "classification" and scores.dim() > 2:
        is_text = scores.dim() == 3 and scores.shape[:2] == targets.shape
        fit = "loss='language'" if is_text else "loss=nn.CrossEntropyLoss()"
        raise UsageError(f"loss={name!r} is for one class per sample, got {shapes}; write {fit}")


def refuse_labels(scores: Tensor, labels: Any) -> None:
    """Refuse labels of classes without a score; a GPU would not say which label is wrong."""
    if scores.dim() != 2 or not isinstance(labels, Tensor) or labels.is_floating_point():
        return
    low, high, most = int(labels.min()), int(labels.max()), scores.shape[1]
    if low < 0 or high >= most:
        raise UsageError(
            f"labels go from {low} to {high}, but the model has {most} outputs, for classes 0 to "
            f"{most - 1}; give the model an output for each class"
        )


def _judged(objective: Objective, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
    return objective(predictions(outputs), targets)


def _reduces(loss: Any) -> bool:
    """Return whether a loss has a `reduction` that can be turned off."""
    if isinstance(loss, nn.Module):
        return isinstance(getattr(loss, "reduction", None), str)
    try:
        return "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return False


class _Reducing:
    """A criterion of `torch.nn`, or one of its functions, that can leave out the reduction.

    Args:
        loss: the criterion.
        arrange: returns scores and targets from (outputs, targets); found by their shapes if None.
    """

    def __init__(self, loss: Any, arrange: Callable[[Any, Any], Any] | None = None) -> None:
        self._loss = loss
        self._arrange = arrange or self._aligned
        self._kind: type = type(loss)
        self._each: Any
        if isinstance(loss, nn.Module):
            self._each = copy.copy(loss)
            self._each.reduction = "none"
            self._how = str(loss.reduction)
            self._ignored = getattr(loss, "ignore_index", None)
        else:
            function: Any = loss
            given: dict[str, Any] = {}
            while isinstance(function, partial):
                given = {**function.keywords, **given}
                function = function.func
            self._kind = _FUNCTIONS.get(function, object)
            self._each = partial(loss, reduction="none")
            self._how = str(given.get("reduction", "mean"))
            default = -100 if function in (F.cross_entropy, F.nll_loss) else None
            self._ignored = given.get("ignore_index", default)

    def of_batch(self, outputs: Any, targets: Any) -> Tensor:
        scores, targets = self._arrange(outputs, targets)
        loss: Tensor = self._loss(scores, targets)
        return loss.mean() if self._how == "none" else loss

    def per_sample(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
        scores, targets = self._arrange(outputs, targets)
        loss = self._each(scores, targets)
        correct = self._correct(scores, targets)
        counted = self._counted(targets) if loss.shape == targets.shape else None
        return _mean_by_sample(loss, counted), (
            None if correct is None else _mean_by_sample(correct, self._counted(targets))
        )

    def _aligned(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Return scores and targets in the shapes that this loss expects."""
        scores = predictions(outputs)
        if not isinstance(targets, Tensor):
            raise UsageError(f"targets must be a tensor, got {type(targets).__name__}")
        if issubclass(self._kind, _ELEMENTWISE) and scores.shape != targets.shape:
            # PyTorch would broadcast, and compare every output with every target.
            if scores.numel() != targets.numel():
                raise UsageError(
                    f"the loss compares outputs {list(scores.shape)} with targets "
                    f"{list(targets.shape)}; give both the same shape"
                )
            targets = targets.reshape(scores.shape)
        if issubclass(self._kind, _ELEMENTWISE) and not targets.is_floating_point():
            raise UsageError(
                f"the loss compares floating-point numbers, but targets are {targets.dtype}; write "
                "targets.float(), or loss='multilabel' or loss='regression'"
            )
        if issubclass(self._kind, _CLASSES) and scores.dim() > 2:
            scores = _classes_second(scores, targets)
        return scores, targets

    def _correct(self, scores: Tensor, targets: Tensor) -> Tensor | None:
        if issubclass(self._kind, _CLASSES):
            wanted = targets if targets.dim() == scores.dim() - 1 else targets.argmax(1)
            return (scores.argmax(1) == wanted).float()
        if issubclass(self._kind, (*_LOGITS, nn.BCELoss)):
            even = 0.5 if issubclass(self._kind, nn.BCELoss) else 0.0
            return ((scores > even) == (targets > 0.5)).float()
        return None

    def _counted(self, targets: Tensor) -> Tensor | None:
        if self._ignored is None or targets.is_floating_point():
            return None
        counted: Tensor = targets != self._ignored
        return counted


def _classes_second(scores: Tensor, targets: Tensor) -> Tensor:
    """Return scores [B, K, ...] for targets [B, ...], whichever axis has the classes."""
    if targets.is_floating_point() or targets.dim() != scores.dim() - 1:
        return scores
    second = scores.shape[2:] == targets.shape[1:]
    last = scores.shape[1:-1] == targets.shape[1:]
    if second and last:
        raise UsageError(
            f"the classes of outputs {list(scores.shape)} could be in axis 1 or the last, for "
            f"targets {list(targets.shape)}; write loss='language' for [B, T, K], or "
            "loss=function(outputs, targets)"
        )
    return scores.movedim(-1, 1) if last else scores


def _mean_by_sample(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the mean over each sample [B], of the entries that count."""
    values = values.float()
    if counted is None or counted.shape != values.shape:
        return values.reshape(len(values), -1).mean(1)
    weights = counted.reshape(len(values), -1).to(values)
    flat = values.reshape(len(values), -1)
    return (flat * weights).sum(1) / weights.sum(1).clamp(min=1)


def _from_result(loss: Callable[..., Any], outputs: Any, targets: Any) -> Criterion:
    """Return a criterion of a function that returns each sample's loss, or one number."""
    result = loss(outputs, targets)
    if isinstance(result, tuple | list):
        return Criterion(loss)
    if not isinstance(result, Tensor):
        raise UsageError(
            "the loss must return a tensor, with one number for the batch or one for each sample; "
            f"it returned a {type(result).__name__}"
        )
    _refuse_without_gradient(result)
    if result.dim() == 1 and len(result) == _samples(targets):
        return Criterion(lambda outputs, targets: (loss(outputs, targets), None))
    if result.numel() != 1:
        raise UsageError(
            f"the loss must return one number for the batch or one for each of its "
            f"{_samples(targets)} samples, got {list(result.shape)}"
        )
    _one_by_one(loss, outputs, targets)
    return Criterion(partial(_one_by_one, loss), lambda *pair: loss(*pair).reshape(()))


def _refuse_without_gradient(loss: Tensor) -> None:
    if not loss.is_floating_point():
        raise UsageError(
            f"the loss is {str(loss.dtype).removeprefix('torch.')}, which has no gradient; return "
            "a floating-point number, such as a cross-entropy"
        )


def _one_by_one(loss: Callable[..., Any], outputs: Any, targets: Any) -> tuple[Tensor, None]:
    """Return each sample's loss of a function that gives a mean, by calling it for each."""
    samples = _samples(targets)
    shared = [t for t in tensors_in(outputs) if t.dim() == 0 or len(t) != samples]
    if shared:
        raise UsageError(
            f"the loss gives one number for a batch, and outputs {shapes_of(outputs)} cannot be "
            "split into samples; return one loss for each sample instead"
        )

    def cut(value: Any, index: int) -> Any:
        return map_tensors(value, lambda tensor: tensor[index : index + 1])

    each = [loss(cut(outputs, i), cut(targets, i)).reshape(()) for i in range(samples)]
    return torch.stack(each).float(), None


def _samples(targets: Any) -> int:
    first = next(iter(tensors_in(targets)), None)
    return 0 if first is None or first.dim() == 0 else len(first)


# ---- The loss that a model computes from labels among its inputs, as those of Hugging Face do


def own_loss_of(outputs: Any) -> Tensor | None:
    """Return the loss that a model has put among its outputs."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else None
    found = getattr(outputs, "loss", None) if found is None else found
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def _own_criterion(outputs: Any, targets: Any) -> Criterion:
    """Return the criterion that reproduces the loss which the model computed itself."""
    loss = own_loss_of(outputs)
    if loss is None:
        raise UsageError("the model returns no loss; write loss='classification' or another")
    value = float(loss)
    for criterion, arrange in _OWN_LOSSES:
        found = _Reducing(criterion, arrange)
        try:
            mean = float(found.of_batch(outputs, targets))
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        if abs(mean - value) <= 1e-3 * max(1.0, abs(value)):
            return Criterion(found.per_sample, _read_own, reads_scores=True)
    raise UsageError(
        f"the model's own loss ({value:.4f}) cannot be computed for each sample from logits "
        f"{list(predictions(outputs).shape)} and labels {shapes_of(targets)}; write "
        "loss=function(outputs, targets)"
    )


def _read_own(outputs: Any, targets: Any) -> Tensor:
    loss = own_loss_of(outputs)
    if loss is None:
        raise UsageError("the model returned no loss for a training batch; always return one")
    return loss.reshape(())


def _tokens(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    return predictions(outputs).float().transpose(1, 2), labels


def _next_tokens(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    return predictions(outputs)[:, :-1].float().transpose(1, 2), labels[:, 1:]


def _entries(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    scores = predictions(outputs).float()
    return scores, labels.reshape(scores.shape)


_OWN_LOSSES: tuple[tuple[nn.Module, Callable[[Any, Tensor], tuple[Tensor, Tensor]]], ...] = (
    (nn.CrossEntropyLoss(), lambda outputs, y: (predictions(outputs).float(), y.reshape(-1))),
    (nn.CrossEntropyLoss(), _tokens),
    (nn.CrossEntropyLoss(), _next_tokens),
    (nn.MSELoss(), _entries),
    (nn.BCEWithLogitsLoss(), _entries),
)
"""Losses that models compute themselves, and how each reads scores and labels."""


# ---- How a model is judged


@dataclass(frozen=True, slots=True)
class FoundCriterion:
    """How a model is judged, and whether it is given the labels for that."""

    criterion: Criterion
    trains_with_labels: bool
    is_measured_with_labels: bool
    chance_loss: float = 0.0
    """Loss of a network that only guesses; 0 if unknown."""
    argument: str | None = None
    """The only parameter of the model, if it may take a dict as a whole."""

    @property
    def facts(self) -> dict[str, float]:
        """Facts about the task for the controller."""
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
        """Return what measures a garden on these batches, which come in a fixed order.

        Args:
            batches: the user's batches.
            device: where the network is.
            name: name of the batches in errors.
            precision: context in which the network runs, such as autocast.
        """
        moved = self.moved(batches, device, name)
        return OwnersEvaluator(moved, self.criterion.per_sample, precision=precision)

    def moved(
        self,
        batches: Batches,
        device: torch.device,
        name: str = "validation",
        *,
        is_training: bool = False,
    ) -> DeviceBatches:
        """Return these batches as the network takes them when it is measured or trained."""
        keeps = self.trains_with_labels if is_training else self.is_measured_with_labels
        return DeviceBatches(batches, device, keeps_label=keeps, name=name, argument=self.argument)


def find_criterion(
    model: nn.Module, loss: Loss | None, batch: Any, device: torch.device
) -> FoundCriterion:
    """Return how a model is judged; without a loss by its own, else by classification."""
    if isinstance(loss, nn.Module):
        loss = loss.to(device)
    argument = only_argument(model)
    inputs, targets = next(iter(DeviceBatches([batch], device, argument=argument)))
    label = label_of(batch)
    is_possible = label in inspect.signature(model.forward).parameters
    if loss == OWN and not is_possible:
        raise UsageError(
            "loss='model' needs a model that takes labels and returns its loss, and batches that "
            "are dicts with labels"
        )
    if is_possible and (loss is None or loss == OWN):
        labelled = next(iter(DeviceBatches([batch], device, keeps_label=True)))[0]
        outputs = outputs_of(model, labelled)
        if loss == OWN or own_loss_of(outputs) is not None:
            own = _own_criterion(outputs, targets)
            chance = guessing_loss(own, outputs, targets)
            return FoundCriterion(own, True, not _does_without(model, inputs), chance)
    outputs = outputs_of(model, inputs)
    chosen = "classification" if loss is None else loss
    criterion = make_criterion(chosen, outputs, targets)
    chance = guessing_loss(criterion, outputs, targets)
    return FoundCriterion(criterion, False, False, chance, argument)


def _does_without(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether a model runs without labels, so that configurations can share passes."""
    try:
        predictions(outputs_of(model, inputs))
    except UsageError:
        return False
    return True
