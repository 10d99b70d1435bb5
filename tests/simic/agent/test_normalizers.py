from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.storage import load_tree, save_tree
from esper.simic.agent.normalizers import RewardNormalizer, ValueNormalizer


def test_rewards_are_divided_by_the_deviation_of_all_so_far() -> None:
    draws = torch.Generator().manual_seed(0)
    steps = [3.0 + 2.0 * torch.randn(8, generator=draws) for _ in range(40)]
    normalizer = RewardNormalizer()
    for rewards in steps:
        last = normalizer(rewards)
    everything = torch.cat(steps).double()
    std = everything.std(correction=0)
    assert float(normalizer.std) == pytest.approx(float(std), rel=1e-9)
    assert float(normalizer.mean) == pytest.approx(float(everything.mean()), rel=1e-9)
    assert torch.allclose(last, (steps[-1] / std).float(), atol=1e-6)


def test_rows_that_ended_are_left_out_and_get_zero() -> None:
    normalizer, only_active = RewardNormalizer(), RewardNormalizer()
    active = torch.tensor([True, False, True])
    for _ in range(5):
        rewards = torch.randn(3)
        paid = normalizer(rewards, active)
        only_active(rewards[active])
        assert paid[1] == 0.0
    assert float(normalizer.std) == pytest.approx(float(only_active.std))


def test_a_frozen_row_is_normalised_but_not_learned_from() -> None:
    normalizer = RewardNormalizer()
    normalizer(torch.randn(64))
    std = normalizer.std.clone()
    paid = normalizer(torch.tensor([-50.0]), frozen=torch.tensor([True]))
    assert torch.equal(normalizer.std, std)
    assert float(paid) == -10.0


def test_rewards_are_clipped_and_the_sign_stays() -> None:
    normalizer = RewardNormalizer()
    normalizer(0.01 * torch.randn(100))
    assert normalizer.normalize(torch.tensor([5.0, -5.0, 0.0])).tolist() == [10.0, -10.0, 0.0]


def test_rewards_that_do_not_vary_are_left_as_they_are() -> None:
    normalizer = RewardNormalizer()
    assert torch.equal(normalizer(torch.full((4,), 0.5)), torch.full((4,), 0.5))
    assert torch.equal(normalizer(torch.zeros(4), torch.zeros(4, dtype=torch.bool)), torch.zeros(4))


def test_reward_state_comes_back_exactly(tmp_path: Path) -> None:
    normalizer, restored = RewardNormalizer(), RewardNormalizer()
    normalizer(torch.randn(10))
    save_tree(tmp_path / "it", normalizer.state_dict(), kind="rewards", version=1)
    restored.load_state_dict(load_tree(tmp_path / "it", kind="rewards", version=1)[0])
    rewards = torch.randn(10)
    assert torch.equal(normalizer(rewards), restored(rewards))


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
    with pytest.raises(UsageError, match="clip"):
        RewardNormalizer(clip=0.0)
