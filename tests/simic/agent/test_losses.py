from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES, HEAD_SIZES
from esper.leyline.controller import ENTROPY_COEF_PER_HEAD
from esper.leyline.errors import UsageError
from esper.leyline.slots import NUM_BLUEPRINTS
from esper.simic.agent.config import ExplorationConfig, PPOConfig
from esper.simic.agent.losses import (
    compute_entropy_floor_penalty,
    compute_ppo_loss,
    curiosity,
    curiosity_weights,
    entropy_coefficient,
    entropy_weights,
    exploration_coefficients,
    head_ratios,
    joint_ratio,
    mean_weights,
    penalty_schedule,
    value_errors,
)
from esper.tamiyo.networks.config import SENTINEL_PRIOR


def slow_surrogate(log_ratio: float, advantage: float, clip: float = 0.2) -> float:
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - clip), 1 + clip)
    return -min(ratio * advantage, clipped * advantage)


def by_head(tensor: Tensor) -> dict[str, Tensor]:
    return {f"head_{index}": each for index, each in enumerate(tensor.unbind(-1))}


@pytest.mark.parametrize("joint", [False, True])
def test_the_surrogate_against_a_slow_reference(joint: bool) -> None:
    torch.manual_seed(0)
    log_ratios, advantages = 0.3 * torch.randn(40, 8), torch.randn(40)
    counts = torch.rand(40, 8) < 0.5
    log_ratios = log_ratios * counts
    masked = {
        "old_log_probs": by_head(torch.zeros(40, 8)),
        "new_log_probs": by_head(log_ratios),
        "masks": by_head(counts),
    }
    found = float(compute_ppo_loss(**masked, advantages=advantages, joint=joint))
    if joint:
        rows = [step for step in range(40) if counts[step].any()]
        each = [slow_surrogate(float(log_ratios[s].sum()), float(advantages[s])) for s in rows]
        assert found == pytest.approx(sum(each) / len(rows), rel=1e-4)
        return
    total = 0.0
    for head in range(8):
        rows = [step for step in range(40) if counts[step, head]]
        each = [slow_surrogate(float(log_ratios[s, head]), float(advantages[s])) for s in rows]
        total += sum(each) / len(rows)
    assert found == pytest.approx(total, rel=1e-4)
    masked["advantages"] = by_head(torch.where(counts, advantages[:, None], 0.0))
    assert float(compute_ppo_loss(**masked)) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("joint", [False, True])
def test_weights_say_what_a_step_counts(joint: bool) -> None:
    torch.manual_seed(0)
    log_ratios, advantages, weights = 0.3 * torch.randn(40, 8), torch.randn(40), torch.rand(40, 8)
    found = compute_ppo_loss(
        old_log_probs=by_head(torch.zeros(40, 8)),
        new_log_probs=by_head(log_ratios),
        advantages=advantages,
        joint=joint,
        weights=weights[:, 0] if joint else by_head(weights),
    )
    heads = [log_ratios.sum(-1)] if joint else log_ratios.unbind(-1)
    expected = sum(
        float(weights[step, head]) * slow_surrogate(float(ratios[step]), float(advantages[step]))
        for head, ratios in enumerate(heads)
        for step in range(40)
    )
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_a_step_without_weight_has_no_gradient() -> None:
    log_ratios = torch.zeros(3, 2, requires_grad=True)
    counts = torch.tensor([[True, False], [True, True], [False, False]])
    compute_ppo_loss(
        old_log_probs=by_head(torch.zeros(3, 2)),
        new_log_probs=by_head(log_ratios),
        advantages=torch.ones(3),
        weights=by_head(mean_weights(counts)),
    ).backward()
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


OP = HEAD_NAMES.index("op")


def test_the_coefficient_moves_linearly_to_its_end() -> None:
    config = PPOConfig(entropy_coef=0.05, entropy_coef_end=0.01)
    assert [entropy_coefficient(config, share) for share in (0.0, 0.5, 1.0, 2.0)] == pytest.approx(
        [0.05, 0.03, 0.01, 0.01]
    )


def test_the_penalty_is_strong_early_and_half_at_the_end() -> None:
    shares = (0.0, 0.24, 0.25, 0.75, 0.875, 1.0, 1.5)
    assert [penalty_schedule(share) for share in shares] == pytest.approx(
        [1.5, 1.5, 1.0, 1.0, 0.75, 0.5, 0.5]
    )


def masks() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    valid = torch.tensor([[True, True, True, False]])
    free = torch.tensor([[True, True, False, False]])
    available = torch.zeros(1, 4, 8, dtype=torch.bool)
    available[..., OP] = True
    available[0, 0, :] = True
    return valid, free, available


def test_every_head_has_an_entropy_bonus_on_every_valid_step() -> None:
    config = PPOConfig(
        entropy_coef=0.1,
        entropy_coef_end=0.1,
        exploration=ExplorationConfig(op_curiosity=0.0, sparse_entropy=0.0, sparse_curiosity=0.0),
    )
    weights = entropy_weights(config, *masks(), progress=0.0, shares=torch.ones(8))
    for index, head in enumerate(HEAD_NAMES):
        expected = 0.1 * ENTROPY_COEF_PER_HEAD[head] / 3
        assert weights[0, :, index].tolist() == pytest.approx([expected] * 3 + [0.0])


def test_the_op_is_curious_until_it_succeeds_and_sparse_heads_where_they_could_act() -> None:
    config = PPOConfig(entropy_coef=0.0, entropy_coef_end=0.0)
    valid, free, _ = masks()
    new = curiosity_weights(config, valid & free, paid_off=torch.tensor([0.0]))
    assert new[0].tolist() == pytest.approx([0.5, 0.5, 0.0, 0.0])
    half = curiosity_weights(config, valid & free, paid_off=torch.tensor([0.25]))
    assert half[0].tolist() == pytest.approx([0.25, 0.25, 0.0, 0.0])
    assert not curiosity_weights(config, valid & free, paid_off=torch.tensor([0.5])).any()
    sparse = entropy_weights(config, *masks(), progress=0.0, shares=torch.ones(8))
    assert not sparse[..., OP].any()
    for index in range(len(HEAD_NAMES) - 1):
        assert sparse[0, :, index].tolist() == pytest.approx([0.03, 0.0, 0.0, 0.0])
    for share, weight in ((0.0, 1.01), (0.05, 0.51), (0.1, 0.01), (0.5, 0.01)):
        rate = torch.tensor([share])
        (held,) = exploration_coefficients(config, paid_off=rate, shares=torch.ones(8))
        assert held.tolist() == pytest.approx([weight] * (len(HEAD_NAMES) - 1) + [0.01])


def test_curiosity_is_full_at_the_reference_itself_and_less_elsewhere() -> None:
    ops = HEAD_SIZES["op"]
    logits = torch.zeros(2, len(HEAD_NAMES), NUM_BLUEPRINTS)
    prior = torch.tensor(SENTINEL_PRIOR)
    logits[0, OP, :ops] = prior
    legal = torch.zeros(2, len(HEAD_NAMES), NUM_BLUEPRINTS, dtype=torch.bool)
    legal[:, OP, [0, 3, 5]] = True
    near = curiosity(logits, legal, prior)
    assert float(near[0]) == pytest.approx(1.0)
    own, other = prior[[0, 3, 5]].softmax(0), torch.full((3,), 1 / 3)
    distance = float((own * (own / other).log()).sum())
    assert float(near[1]) == pytest.approx(1.0 - distance / math.log(3))


def test_never_trying_an_op_costs_without_bound() -> None:
    """Always waiting is close to a reference that mostly waits, but only seen from its own side."""
    logits = torch.zeros(3, len(HEAD_NAMES), NUM_BLUEPRINTS)
    logits[:, OP, 0] = torch.tensor([2.0, 20.0, 200.0])
    legal = torch.zeros(3, len(HEAD_NAMES), NUM_BLUEPRINTS, dtype=torch.bool)
    legal[:, OP, :2] = True
    near, far, farther = curiosity(logits, legal, torch.tensor(SENTINEL_PRIOR)).tolist()
    assert near == pytest.approx(1.0)
    assert far < -1.0
    assert farther < 10 * far


def test_curiosity_pulls_a_collapsed_op_back_to_its_reference() -> None:
    logits = torch.zeros(1, len(HEAD_NAMES), NUM_BLUEPRINTS, requires_grad=True)
    legal = torch.zeros(1, len(HEAD_NAMES), NUM_BLUEPRINTS, dtype=torch.bool)
    legal[:, OP, :2] = True
    moved = logits + 3.0 * (torch.arange(NUM_BLUEPRINTS) == 0)
    curiosity(moved, legal, torch.zeros(HEAD_SIZES["op"])).sum().backward()
    gradient = logits.grad
    assert gradient is not None
    assert float(gradient[0, OP, 1]) > 0.05
    assert float(gradient[0, OP, 0]) == pytest.approx(-float(gradient[0, OP, 1]))


def test_the_floor_penalty_is_the_squared_shortfall_of_the_mean() -> None:
    entropy = {"op": torch.tensor([0.0, 0.2, 0.9]), "slot": torch.tensor([0.9, 0.9, 0.9])}
    counts = {"op": torch.tensor([True, True, False]), "slot": torch.ones(3, dtype=torch.bool)}
    penalty = compute_entropy_floor_penalty(
        entropy, counts, {"op": 0.5, "slot": 0.2}, {"op": 2.0, "slot": 2.0}
    )
    assert float(penalty) == pytest.approx(2.0 * (0.5 - 0.1) ** 2)


def test_a_head_that_never_could_act_is_not_penalised() -> None:
    nobody = torch.zeros(3, dtype=torch.bool)
    penalty = compute_entropy_floor_penalty(
        {"op": torch.zeros(3)}, {"op": nobody}, {"op": 0.5}, {"op": 1.0}
    )
    assert float(penalty) == 0.0
    assert float(compute_entropy_floor_penalty({}, {}, {"op": 0.5}, {"op": 1.0})) == 0.0


def test_the_floor_penalty_pulls_entropy_up() -> None:
    entropy = torch.tensor([0.1, 0.1], requires_grad=True)
    compute_entropy_floor_penalty(
        {"op": entropy}, {"op": torch.ones(2, dtype=torch.bool)}, {"op": 0.4}, {"op": 0.5}
    ).backward()
    assert entropy.grad is not None
    assert (entropy.grad < 0).all()
