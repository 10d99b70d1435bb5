"""Per-sample losses agree with the plain formulas."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from esper.kasmina.training import (
    per_sample_classification,
    per_sample_language,
    per_sample_multilabel,
    per_sample_regression,
)


def test_classification() -> None:
    outputs = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 1.0], [1.0, 3.0, 0.0]])
    y = torch.tensor([0, 0, 1])
    loss, correct = per_sample_classification(outputs, y)
    assert torch.allclose(loss, -outputs.log_softmax(-1)[torch.arange(3), y])
    assert correct is not None
    assert correct.tolist() == [1.0, 0.0, 1.0]


def test_language_is_a_mean_over_tokens() -> None:
    outputs, y = torch.randn(4, 6, 11), torch.randint(0, 11, (4, 6))
    loss, correct = per_sample_language(outputs, y)
    assert correct is not None
    assert loss.shape == correct.shape == (4,)
    assert torch.allclose(loss.mean(), F.cross_entropy(outputs.flatten(0, 1), y.flatten()))
    assert torch.allclose(correct.mean(), (outputs.argmax(-1) == y).float().mean())
    alone, _ = per_sample_language(outputs[2:3], y[2:3])
    assert torch.allclose(alone[0], loss[2])


def test_regression_has_no_correctness() -> None:
    outputs, y = torch.randn(5, 1), torch.randn(5)
    loss, correct = per_sample_regression(outputs, y)
    assert correct is None
    assert torch.allclose(loss, (outputs[:, 0] - y) ** 2)


def test_one_number_for_each_sample_needs_no_second_axis() -> None:
    outputs, y = torch.randn(5), torch.rand(5).round()
    loss, _ = per_sample_regression(outputs, y)
    assert torch.allclose(loss, (outputs - y) ** 2)
    loss, right = per_sample_multilabel(outputs, y)
    assert right is not None
    assert torch.allclose(loss, F.binary_cross_entropy_with_logits(outputs, y, reduction="none"))
    assert torch.equal(right, ((outputs > 0) == (y > 0.5)).float())


def test_low_precision_outputs_give_float_losses() -> None:
    outputs = torch.randn(3, 4).bfloat16()
    loss, correct = per_sample_classification(outputs, torch.zeros(3, dtype=torch.int64))
    assert correct is not None
    assert loss.dtype == correct.dtype == torch.float32


def test_they_run_under_vmap() -> None:
    outputs, y = torch.randn(2, 5, 4), torch.randint(0, 4, (2, 5))
    loss, correct = torch.vmap(per_sample_classification)(outputs, y)
    for row in range(2):
        expected = per_sample_classification(outputs[row], y[row])
        assert torch.allclose(loss[row], expected[0])
        assert expected[1] is not None
        assert torch.equal(correct[row], expected[1])
