"""Loss and correctness of every single sample, as pure functions.

Per sample, because contributions are measured by comparing the same samples with and without a
seed: a mean alone would hide how sure the difference is.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional as F

from esper.kasmina.evaluation import Objective


ObjectiveName = Literal["classification", "language", "regression", "multilabel"]

ScoreKind = Literal["accuracy", "negative_loss"]
"""Unit of the score: accuracy in points 0 to 100, or the loss with its sign turned."""


def per_sample_classification(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return cross-entropy and 0-or-1 correctness for scores [B, K] and labels [B]."""
    loss = F.cross_entropy(outputs.float(), y, reduction="none")
    return loss, (outputs.argmax(dim=-1) == y).float()


def per_sample_language(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return mean cross-entropy and share of right tokens for scores [B, T, K], tokens [B, T]."""
    loss = F.cross_entropy(outputs.float().transpose(1, 2), y, reduction="none")  # [B, T]
    return loss.mean(dim=1), (outputs.argmax(dim=-1) == y).float().mean(dim=1)


def per_sample_regression(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the mean squared error for outputs and targets [B] or [B, K]; nothing is correct."""
    loss = F.mse_loss(outputs.float(), y.float().reshape(outputs.shape), reduction="none")
    return by_sample(loss).mean(dim=1), None


def per_sample_multilabel(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return binary cross-entropy and share of right labels for scores and labels [B] or [B, K]."""
    y = y.float().reshape(outputs.shape)
    loss = F.binary_cross_entropy_with_logits(outputs.float(), y, reduction="none")
    right = ((outputs > 0) == (y > 0.5)).float()
    return by_sample(loss).mean(dim=1), by_sample(right).mean(dim=1)


def by_sample(values: Tensor) -> Tensor:
    """Return values as [B, K]: those of each sample in a row of its own, one where they are [B]."""
    return values.flatten(1) if values.dim() > 1 else values.reshape(-1, 1)


OBJECTIVES: dict[ObjectiveName, Objective] = {
    "classification": per_sample_classification,
    "language": per_sample_language,
    "regression": per_sample_regression,
    "multilabel": per_sample_multilabel,
}

SCORE_KINDS: dict[ObjectiveName, ScoreKind] = {
    "classification": "accuracy",
    "language": "accuracy",
    "regression": "negative_loss",
    "multilabel": "accuracy",
}

assert set(OBJECTIVES) == set(SCORE_KINDS) == set(get_args(ObjectiveName)), "a name was forgotten"
