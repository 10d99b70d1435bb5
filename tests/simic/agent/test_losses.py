from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.simic.agent.losses import (
    compute_ppo_loss,
    head_ratios,
    joint_ratio,
    mean_weights,
    surrogate_losses,
    value_errors,
)


def slow_surrogate(log_ratio: float, advantage: float, clip: float = 0.2) -> float:
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - clip), 1 + clip)
    return -min(ratio * advantage, clipped * advantage)


@pytest.mark.parametrize("joint", [False, True])
def test_the_surrogate_against_a_slow_reference(joint: bool) -> None:
    torch.manual_seed(0)
    log_ratios, advantages = 0.3 * torch.randn(40, 8), torch.randn(40)
    counts = torch.rand(40, 8) < 0.5
    log_ratios = log_ratios * counts
    weights = mean_weights(counts.any(-1, keepdim=True) if joint else counts)
    found = surrogate_losses(log_ratios, advantages, weights, 0.2, joint=joint)
    if joint:
        rows = [step for step in range(40) if counts[step].any()]
        each = [slow_surrogate(float(log_ratios[s].sum()), float(advantages[s])) for s in rows]
        assert float(found) == pytest.approx(sum(each) / len(rows), rel=1e-4)
        return
    for head in range(8):
        rows = [step for step in range(40) if counts[step, head]]
        each = [slow_surrogate(float(log_ratios[s, head]), float(advantages[s])) for s in rows]
        assert float(found[head]) == pytest.approx(sum(each) / len(rows), rel=1e-4)


def test_a_step_without_weight_has_no_gradient() -> None:
    log_ratios = torch.zeros(3, 2, requires_grad=True)
    counts = torch.tensor([[True, False], [True, True], [False, False]])
    surrogate_losses(
        log_ratios, torch.ones(3), mean_weights(counts), 0.2, joint=False
    ).sum().backward()
    assert log_ratios.grad is not None
    assert torch.equal(log_ratios.grad != 0, counts)


def test_each_head_is_clipped_by_its_own_ratio_or_by_the_product() -> None:
    # One head has run away, the others have not moved.
    new = {f"head_{i}": torch.tensor([0.0]) for i in range(8)}
    new["head_0"] = torch.log(torch.tensor([1.5]))
    new = {name: each.requires_grad_() for name, each in new.items()}
    old = {name: torch.tensor([0.0]) for name in new}
    per_head = compute_ppo_loss(
        old_log_probs=old, new_log_probs=new, advantages=torch.tensor([1.0])
    )
    gradients = torch.autograd.grad(per_head, list(new.values()))
    assert [float(each) for each in gradients] == pytest.approx([0.0] + [-1.0] * 7)
    joint = compute_ppo_loss(
        old_log_probs=old, new_log_probs=new, advantages=torch.tensor([1.0]), joint=True
    )
    assert joint.item() == pytest.approx(-1.2)
    assert not any(each.any() for each in torch.autograd.grad(joint, list(new.values())))


def test_idle_steps_are_left_out_of_a_heads_mean() -> None:
    old = {"op": torch.zeros(4), "slot": torch.zeros(4)}
    new = {"op": torch.zeros(4), "slot": torch.tensor([0.1, 5.0, 5.0, 5.0])}
    masks = {
        "op": torch.ones(4, dtype=torch.bool),
        "slot": torch.tensor([True, False, False, False]),
    }
    loss = compute_ppo_loss(
        old_log_probs=old, new_log_probs=new, advantages=torch.ones(4), masks=masks
    )
    assert float(loss) == pytest.approx(-1.0 - math.exp(0.1))


def test_a_huge_log_ratio_stays_finite() -> None:
    ratios = torch.tensor([[500.0, -500.0], [1.0, 1.0]])
    assert torch.isfinite(head_ratios(ratios)).all()
    assert torch.isfinite(joint_ratio(torch.tensor([[500.0, 500.0]]))).all()


def test_heads_must_agree() -> None:
    one: dict[str, Tensor] = {"op": torch.zeros(1)}
    with pytest.raises(UsageError, match="new_log_probs must have the heads of old_log_probs"):
        compute_ppo_loss(
            old_log_probs=one, new_log_probs={"slot": torch.zeros(1)}, advantages=torch.zeros(1)
        )


def test_value_errors_are_half_squares_and_the_clip_keeps_the_worse() -> None:
    values, targets = torch.tensor([3.0, 0.1]), torch.tensor([1.0, 1.0])
    old = torch.zeros(2)
    assert value_errors(values, targets, old).tolist() == pytest.approx([2.0, 0.405])
    # 3 may move to 0.5 only, which is a smaller error than 2: the larger one counts.
    assert value_errors(values, targets, old, 0.5).tolist() == pytest.approx([2.0, 0.405])
    assert value_errors(torch.tensor([1.0]), torch.tensor([1.0]), torch.zeros(1), 0.5).tolist() == (
        pytest.approx([0.125])
    )
