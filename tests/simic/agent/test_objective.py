from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.leyline.actions import HEAD_NAMES, NUM_OPS
from esper.simic.agent.config import PerHead, PPOConfig
from esper.simic.agent.exploration import compute_entropy_floor_penalty
from esper.simic.agent.losses import compute_ppo_loss
from esper.simic.agent.objective import Losses, Objective, Scored
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.agent.targets import Targets, make_targets
from tests.simic.agent.rollouts import collect, small_policy

CPU = torch.device("cpu")


def scene(**options: Any) -> tuple[TamiyoRolloutBuffer, Targets, Scored, PPOConfig]:
    policy = small_policy()
    buffer = collect(policy, rows=8, lengths=[12, 5, 12, 7, 12, 12, 3, 12])
    config, batch = PPOConfig(**options), buffer.batch()
    targets = make_targets(buffer, config, scale=torch.ones(()), progress=0.5, success=0.5)
    with torch.no_grad():
        scores = policy.network.score(
            batch.states, batch.blueprint_indices, batch.actions, batch.masks
        )
    return buffer, targets, Scored.of(scores, batch.base_masks, torch.zeros(NUM_OPS)), config


def moved(buffer: TamiyoRolloutBuffer, targets: Targets, scored: Scored) -> torch.Tensor:
    """Return old log-probabilities that differ from the new ones where a head mattered."""
    noise = 0.3 * torch.randn(scored.log_probs.shape, generator=torch.Generator().manual_seed(0))
    return scored.log_probs - noise * targets.causal


@pytest.mark.parametrize("ratio", ["per_head", "joint"])
def test_the_policy_part_is_the_loss_of_the_documents(ratio: str) -> None:
    buffer, targets, scored, config = scene(ratio=ratio)
    old = moved(buffer, targets, scored)
    found = Objective(config, 0.5, CPU)(scored, old, targets)
    usable = buffer.batch().usable
    by_head = {
        name: dict(zip(HEAD_NAMES, tensor[usable].unbind(-1), strict=True))
        for name, tensor in {
            "old_log_probs": old,
            "new_log_probs": scored.log_probs,
            "masks": targets.causal,
        }.items()
    }
    expected = compute_ppo_loss(
        **by_head, advantages=targets.advantages[usable], joint=ratio == "joint"
    )
    assert float(found.policy.sum()) == pytest.approx(float(expected), rel=1e-4)


def test_the_floor_part_is_the_penalty_of_the_documents() -> None:
    _, targets, scored, config = scene(entropy_floor=PerHead.same(1.0))
    found = Objective(config, 0.5, CPU)(scored, scored.log_probs, targets)
    expected = compute_entropy_floor_penalty(
        dict(zip(HEAD_NAMES, scored.entropies.unbind(-1), strict=True)),
        dict(zip(HEAD_NAMES, targets.floor_counts.unbind(-1), strict=True)),
        dict.fromkeys(HEAD_NAMES, 1.0),
        dict(zip(HEAD_NAMES, config.entropy_floor_penalty.by_head(), strict=True)),
    )
    assert float(found.penalties.sum()) == pytest.approx(float(expected), rel=1e-5)
    early = Objective(config, 0.0, CPU)(scored, scored.log_probs, targets)
    assert float(early.penalties.sum()) == pytest.approx(1.5 * float(expected), rel=1e-5)


def test_the_total_is_the_sum_of_its_parts() -> None:
    buffer, targets, scored, config = scene(value_coef=0.7, exploration_kl=0.3)
    found: Losses = Objective(config, 0.5, CPU)(scored, moved(buffer, targets, scored), targets)
    expected = (
        found.policy.sum()
        + 0.7 * found.value
        - found.bonus
        + found.penalties.sum()
        + 0.3 * found.exploration.sum()
    )
    assert float(found.total) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("ratio", ["per_head", "joint"])
def test_minibatches_add_up_to_the_round(ratio: str) -> None:
    """A mean is taken over the whole round, however the rows are split."""
    buffer, targets, scored, config = scene(ratio=ratio)
    old = moved(buffer, targets, scored)
    objective = Objective(config, 0.5, CPU)
    whole = objective(scored, old, targets)
    parts = [
        objective(scored.rows(rows), old[rows], targets.rows(rows), len(rows) / 8)
        for rows in torch.randperm(8).tensor_split(4)
    ]
    for name in ("policy", "value", "bonus", "exploration"):
        mean = torch.stack([getattr(part, name) for part in parts]).mean(0)
        assert torch.allclose(mean, getattr(whole, name), atol=1e-5), name


def test_padding_has_no_say() -> None:
    buffer, targets, scored, config = scene()
    old = moved(buffer, targets, scored)
    objective = Objective(config, 0.5, CPU)
    before = objective(scored, old, targets)
    padding = ~buffer.batch().valid
    for name in scored.__dataclass_fields__:
        getattr(scored, name)[padding] = 5.0
    after = objective(scored, old, targets)
    assert torch.equal(before.total, after.total)


def test_scores_are_kept_by_row_and_can_be_forgotten() -> None:
    _, _, scored, _ = scene()
    kept = Scored.empty(scored.values, len(HEAD_NAMES))
    rows = torch.tensor([5, 0])
    kept.write(rows, scored.rows(rows))
    assert torch.equal(kept.log_probs[rows], scored.log_probs[rows])
    assert not kept.log_probs[[1, 2, 3, 4, 6, 7]].any()
    kept.write(None, scored)
    assert torch.equal(kept.values, scored.values)
    kept.forget()
    assert torch.isnan(kept.entropies).all()
