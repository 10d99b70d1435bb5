from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.storage import load_tree, save_tree
from esper.simic.agent.normalizers import RewardScale, ValueNormalizer


def test_the_unit_of_rewards_is_the_size_of_all_returns_so_far() -> None:
    draws = torch.Generator().manual_seed(0)
    rounds = [3.0 + 2.0 * torch.randn(8, generator=draws) for _ in range(5)]
    scale = RewardScale()
    for returns in rounds:
        scale.update(returns)
    expected = torch.cat(rounds).square().mean().sqrt()
    assert float(scale.unit) == pytest.approx(float(expected), rel=1e-5)


def test_returns_of_nothing_leave_rewards_as_they_are() -> None:
    scale = RewardScale()
    assert float(scale.unit) == 1.0
    scale.update(torch.zeros(16))
    scale.update(torch.tensor([float("nan"), float("inf")]))
    assert float(scale.unit) == 1.0


def test_reward_state_comes_back_exactly(tmp_path: Path) -> None:
    scale, restored = RewardScale(), RewardScale()
    scale.update(torch.randn(10))
    save_tree(tmp_path / "it", scale.state_dict(), kind="rewards", version=1)
    restored.load_state_dict(load_tree(tmp_path / "it", kind="rewards", version=1)[0])
    assert torch.equal(scale.unit, restored.unit)
    assert torch.equal(scale.count, restored.count)


def test_returns_set_the_scale_after_the_warm_up_and_then_slowly() -> None:
    normalizer = ValueNormalizer(momentum=0.9)
    normalizer.update(5.0 * torch.randn(31))
    assert float(normalizer.scale) == 1.0
    returns = 100.0 + 5.0 * torch.randn(1000)
    normalizer.update(returns)
    first = float(returns.double().var(correction=0))
    assert float(normalizer.scale) == pytest.approx(first**0.5, rel=1e-5)
    normalizer.update(2.0 * returns)
    assert float(normalizer.scale) ** 2 == pytest.approx(0.9 * first + 0.1 * 4 * first, rel=1e-4)


def test_a_return_that_is_not_finite_leaves_the_scale() -> None:
    normalizer = ValueNormalizer()
    normalizer.update(torch.randn(100))
    before = normalizer.scale
    with pytest.raises(NonFiniteError, match="return"):
        normalizer.update(torch.tensor([1.0, float("nan")]))
    assert torch.equal(normalizer.scale, before)


def test_returns_that_do_not_vary_never_make_the_scale_zero() -> None:
    normalizer = ValueNormalizer(momentum=0.0)
    normalizer.update(torch.ones(100))
    assert float(normalizer.scale) == 1.0
    normalizer.update(torch.ones(100))
    assert float(normalizer.scale) > 0


def test_value_state_comes_back_exactly() -> None:
    normalizer, restored = ValueNormalizer(), ValueNormalizer()
    normalizer.update(3 * torch.randn(100))
    restored.load_state_dict(normalizer.state_dict())
    more = torch.randn(50)
    normalizer.update(more)
    restored.update(more)
    assert torch.equal(normalizer.scale, restored.scale)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="momentum"):
        ValueNormalizer(momentum=1.0)
