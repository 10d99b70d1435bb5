"""Losses as people have them become a loss for every sample, and train as they are."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth.criterion import (
    Criterion,
    guessed_classes,
    guessing_loss,
    make_criterion,
    predictions,
)
from esper.kasmina.training import OBJECTIVES
from esper.leyline.errors import UsageError

torch.manual_seed(0)
SCORES, CLASSES = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
TOKENS, WORDS = torch.randn(6, 5, 4), torch.randint(4, (6, 5))
MANY = torch.randint(2, (6, 4)).float()
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0])


def batch_loss(made: Criterion, outputs: Any, targets: Any) -> Tensor:
    if made.of_batch is None:
        return made.per_sample(outputs, targets)[0].mean()
    return made.of_batch(outputs, targets)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "has_correct"),
    [
        (nn.CrossEntropyLoss(), SCORES, CLASSES, True),
        (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), SCORES, CLASSES, True),
        (nn.CrossEntropyLoss(), SCORES, SCORES.softmax(1), True),
        (nn.CrossEntropyLoss(), TOKENS.transpose(1, 2), WORDS, True),
        (nn.NLLLoss(), SCORES.log_softmax(1), CLASSES, True),
        (nn.BCEWithLogitsLoss(), SCORES, MANY, True),
        (nn.BCELoss(), SCORES.sigmoid(), MANY, True),
        (nn.MSELoss(), SCORES, MANY, False),
        (nn.SmoothL1Loss(reduction="sum"), SCORES, MANY, False),
        (F.cross_entropy, SCORES, CLASSES, True),
        (partial(F.cross_entropy, label_smoothing=0.2), SCORES, CLASSES, True),
        (F.mse_loss, SCORES, MANY, False),
        (lambda outputs, y: F.cross_entropy(outputs, y), SCORES, CLASSES, False),
        (lambda outputs, y: ((outputs - y) ** 2).mean(1), SCORES, MANY, False),
    ],
)
def test_the_network_trains_on_the_very_number_and_samples_have_one_each(
    loss: Any, outputs: Tensor, targets: Tensor, has_correct: bool
) -> None:
    made = make_criterion(loss, outputs, targets)
    each, correct = made.per_sample(outputs, targets)
    assert each.shape == (6,)
    assert (correct is not None) == has_correct
    if correct is not None:
        assert correct.shape == (6,)
        assert 0 <= float(correct.min()) <= float(correct.max()) <= 1
    told = loss(outputs, targets)
    torch.testing.assert_close(batch_loss(made, outputs, targets), told.mean())
    # A sample's loss is its own: others do not move it.
    changed = outputs.clone()
    changed[:5] = changed[:5].flip(-1)
    again, _ = made.per_sample(changed, targets)
    assert torch.equal(again[5], each[5])


def test_a_mean_over_samples_is_the_mean_of_their_losses() -> None:
    for loss, outputs, targets in (
        (nn.CrossEntropyLoss(), SCORES, CLASSES),
        (nn.MSELoss(), SCORES, MANY),
        (nn.BCEWithLogitsLoss(), SCORES, MANY),
    ):
        each, _ = make_criterion(loss, outputs, targets).per_sample(outputs, targets)
        torch.testing.assert_close(each.mean(), loss(outputs, targets))


def test_ignored_positions_count_neither_as_loss_nor_as_right() -> None:
    words = WORDS.clone()
    words[:, 2:] = -100
    whole = make_criterion(nn.CrossEntropyLoss(), TOKENS.transpose(1, 2), words)
    part = make_criterion(nn.CrossEntropyLoss(), TOKENS[:, :2].transpose(1, 2), words[:, :2])
    for one, other in zip(
        whole.per_sample(TOKENS.transpose(1, 2), words),
        part.per_sample(TOKENS[:, :2].transpose(1, 2), words[:, :2]),
        strict=True,
    ):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other)


def test_classes_may_come_last_unless_that_cannot_be_told() -> None:
    made = make_criterion(nn.CrossEntropyLoss(), TOKENS, WORDS)
    expected, _ = OBJECTIVES["language"](TOKENS, WORDS)
    torch.testing.assert_close(made.per_sample(TOKENS, WORDS)[0], expected)
    with pytest.raises(UsageError, match=r"could be in axis 1 or the last"):
        make_criterion(nn.CrossEntropyLoss(), torch.randn(6, 4, 4), torch.randint(4, (6, 4)))


@pytest.mark.parametrize(
    ("outputs", "targets", "fit"),
    [
        (TOKENS, WORDS, "loss='language'"),
        (torch.randn(6, 4, 3, 2), torch.randint(4, (6, 3, 2)), "loss=nn.CrossEntropyLoss()"),
        (TOKENS.transpose(1, 2), WORDS, "loss=nn.CrossEntropyLoss()"),
    ],
    ids=["tokens", "pixels", "positions"],
)
def test_many_predictions_for_a_sample_are_told_which_loss_fits(
    outputs: Tensor, targets: Tensor, fit: str
) -> None:
    with pytest.raises(UsageError, match="is for one class per sample") as told:
        make_criterion("classification", outputs, targets)
    assert str(told.value).endswith(f"write {fit}")
    loss = eval(fit.removeprefix("loss="), {"nn": nn})
    each, correct = make_criterion(loss, outputs, targets).per_sample(outputs, targets)
    assert len(each) == 6
    assert correct is not None


def test_numbers_are_never_compared_all_with_all() -> None:
    # [6, 1] with [6] would broadcast to [6, 6], with no more than a warning of PyTorch's.
    made = make_criterion(nn.MSELoss(), torch.arange(6.0)[:, None], torch.arange(6.0))
    assert made.per_sample(torch.arange(6.0)[:, None], torch.arange(6.0))[0].abs().max() == 0
    with pytest.raises(UsageError, match="the same shape"):
        make_criterion(nn.MSELoss(), torch.zeros(6, 3), torch.zeros(6))


def test_outputs_may_be_objects_or_dicts_with_logits() -> None:
    class Output:
        logits = SCORES

    for outputs in (Output(), {"logits": SCORES, "hidden": TOKENS}, {"scores": SCORES}):
        assert torch.equal(predictions(outputs), SCORES)
        each, _ = make_criterion(nn.CrossEntropyLoss(), outputs, CLASSES).per_sample(
            outputs, CLASSES
        )
        torch.testing.assert_close(each, F.cross_entropy(SCORES, CLASSES, reduction="none"))
    with pytest.raises(UsageError, match=r"returns \(\[6, 4\], \[6, 5, 4\]\), neither a tensor"):
        make_criterion("classification", (SCORES, TOKENS), CLASSES)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss, "write loss=CrossEntropyLoss()"),
        (7, "loss must be a name, a criterion such as nn.CrossEntropyLoss() or a function, got 7"),
        ("clasification", "did you mean 'classification'?"),
        (lambda outputs, y: 3.0, "the loss must return a tensor"),
        (lambda outputs, y: outputs, "6 samples, got [6, 4]"),
        (lambda outputs: outputs.mean(), "TypeError"),
        (nn.MSELoss(), "the same shape"),
    ],
)
def test_what_is_wrong_with_a_loss_is_one_line(loss: Any, words: str) -> None:
    with pytest.raises(UsageError) as error:
        make_criterion(loss, SCORES, CLASSES)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_many_labels_have_a_name() -> None:
    made = make_criterion("multilabel", SCORES, MANY)
    loss, correct = made.per_sample(SCORES, MANY)
    torch.testing.assert_close(loss.mean(), F.binary_cross_entropy_with_logits(SCORES, MANY))
    assert correct is not None
    torch.testing.assert_close(correct, ((SCORES > 0) == (MANY > 0.5)).float().mean(1))


@pytest.mark.parametrize(
    ("loss", "scores", "targets", "chance", "classes"),
    [
        ("classification", SCORES, CLASSES, math.log(4), 4),
        ("language", TOKENS, WORDS, math.log(4), 4),
        (nn.CrossEntropyLoss(), torch.randn(6, 4, 5), WORDS, math.log(4), 4),
        ("multilabel", SCORES, MANY, math.log(2), 2),
        (nn.MultiMarginLoss(), SCORES, CLASSES, 0.75, 0),
        ("regression", SCORES, MANY, 0.0, 0),
        (lambda outputs, y: (outputs - y).square().mean(1), SCORES, MANY, 0.0, 0),
    ],
)
def test_what_a_guess_costs_is_known_where_there_are_classes(
    loss: Any, scores: Tensor, targets: Tensor, chance: float, classes: int
) -> None:
    found = guessing_loss(make_criterion(loss, scores, targets), scores, targets)
    assert found == pytest.approx(chance)
    assert guessed_classes(found) == classes
