from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esper.leyline.errors import NonFiniteError
from esper.simic.agent.config import RewardScales, ValueNormalizer
from esper.utils.storage import load_tree, save_tree


def test_the_unit_of_rewards_is_the_size_of_all_returns_so_far() -> None:
    draws = torch.Generator().manual_seed(0)
    rounds = [3.0 + 2.0 * torch.randn(8, generator=draws) for _ in range(5)]
    scales = RewardScales()
    for returns in rounds:
        scales.update(["digits"] * 8, returns)
    expected = float(torch.cat(rounds).square().mean().sqrt())
    assert scales.common == pytest.approx(expected, rel=1e-5)
    assert scales.units(["digits"] * 2).tolist() == pytest.approx([expected] * 2, rel=1e-5)


def test_every_task_has_its_unit_and_a_new_one_leans_on_the_others() -> None:
    scales = RewardScales()
    scales.update(["rich"] * 400 + ["poor"] * 400, torch.tensor([8.0] * 400 + [0.5] * 400))
    scales.update(["new"], torch.tensor([0.5]))
    rich, poor, new, unknown = scales.units(["rich", "poor", "new", "unknown"]).tolist()
    assert rich == pytest.approx(8.0, rel=0.05)
    assert poor == pytest.approx(0.5, rel=0.05)
    assert unknown == pytest.approx(scales.common) == pytest.approx(2.0, rel=0.01)
    assert poor < new < unknown


def test_returns_of_nothing_leave_rewards_as_they_are() -> None:
    scales = RewardScales()
    assert scales.units(["digits"]).tolist() == [1.0]
    scales.update(["digits"] * 16, torch.zeros(16))
    scales.update(["digits"] * 2, torch.tensor([float("nan"), float("inf")]))
    assert scales.units(["digits"]).tolist() == [1.0]
    # A task that only waited does not count among the others either.
    scales.update(["other"] * 4, torch.full((4,), 3.0))
    assert scales.units(["digits", "other"]).tolist() == pytest.approx([3.0, 3.0])


def test_reward_state_comes_back_exactly(tmp_path: Path) -> None:
    scales, restored = RewardScales(), RewardScales()
    scales.update(["a", "b"] * 5, torch.randn(10))
    save_tree(tmp_path / "it", scales.state_dict(), kind="rewards", version=1)
    restored.load_state_dict(load_tree(tmp_path / "it", kind="rewards", version=1)[0])
    assert torch.equal(scales.units(["a", "b", "c"]), restored.units(["a", "b", "c"]))


def test_returns_set_the_scale_after_the_warm_up_and_then_slowly() -> None:
    normalizer = ValueNormalizer()
    normalizer.update(5.0 * torch.randn(31))
    assert float(normalizer.scale) == 1.0
    returns = 100.0 + 5.0 * torch.randn(1000)
    normalizer.update(returns)
    first = float(returns.double().var(correction=0))
    assert float(normalizer.scale) == pytest.approx(first**0.5, rel=1e-5)
    normalizer.update(2.0 * returns)
    assert float(normalizer.scale) ** 2 == pytest.approx(0.99 * first + 0.01 * 4 * first, rel=1e-4)


def test_a_return_that_is_not_finite_leaves_the_scale() -> None:
    normalizer = ValueNormalizer()
    normalizer.update(torch.randn(100))
    before = normalizer.scale
    with pytest.raises(NonFiniteError, match="return"):
        normalizer.update(torch.tensor([1.0, float("nan")]))
    assert torch.equal(normalizer.scale, before)


def test_returns_that_do_not_vary_never_make_the_scale_zero() -> None:
    normalizer = ValueNormalizer()
    normalizer.update(torch.ones(100))
    assert float(normalizer.scale) == 1.0
    for _ in range(3_000):
        normalizer.update(torch.ones(2))
    assert float(normalizer.scale) > 0


def test_value_state_comes_back_exactly() -> None:
    normalizer, restored = ValueNormalizer(), ValueNormalizer()
    normalizer.update(3 * torch.randn(100))
    restored.load_state_dict(normalizer.state_dict())
    more = torch.randn(50)
    normalizer.update(more)
    restored.update(more)
    assert torch.equal(normalizer.scale, restored.scale)
