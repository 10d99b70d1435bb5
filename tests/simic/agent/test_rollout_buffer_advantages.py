from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES, LifecycleOp, causal_table
from esper.leyline.errors import UsageError
from esper.simic.agent.rollout_buffer import (
    compute_gae,
    compute_per_head_advantages,
    decision_lambda,
    normalize_advantages,
)


def slow_gae(
    rewards: list[float],
    values: list[float],
    following: list[float],
    terminated: list[bool],
    truncated: list[bool],
    gamma: list[float],
    gae_lambda: float,
) -> list[float]:
    """One row, step by step, as a sum over everything that follows until the row's end."""
    advantages = []
    for start in range(len(rewards)):
        total, weight = 0.0, 1.0
        for at in range(start, len(rewards)):
            ahead = 0.0 if terminated[at] else gamma[at] * following[at]
            total += weight * (rewards[at] + ahead - values[at])
            if terminated[at] or truncated[at]:
                break
            weight *= gamma[at] * gae_lambda
        advantages.append(total)
    return advantages


def random_rows(rows: int, steps: int, seed: int = 0) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, steps, generator=draws, dtype=torch.float64)

    ends = torch.rand(rows, steps, generator=draws)
    return {
        "rewards": normal(),
        "values": normal(),
        "next_values": normal(),
        "terminated": ends < 0.1,
        "truncated": (ends >= 0.1) & (ends < 0.2),
    }


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_gae_against_a_slow_reference(gae_lambda: float, kind: str) -> None:
    given = random_rows(7, 25)
    gamma: float | Tensor = 0.9
    if kind == "tensor":
        gamma = 0.9 ** torch.randint(1, 5, (7, 25), dtype=torch.float64)
    advantages, returns = compute_gae(**given, gamma=gamma, gae_lambda=gae_lambda)
    table = torch.as_tensor(gamma, dtype=torch.float64).expand(7, 25)
    for row in range(7):
        expected = slow_gae(
            *(given[name][row].tolist() for name in given), table[row].tolist(), gae_lambda
        )
        assert advantages[row].tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.equal(returns, advantages + given["values"])


def test_steps_without_a_choice_are_passed_over() -> None:
    """Decisions at steps 0, 3 and 4; the episode ends after step 5, where nothing is decided."""
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]], dtype=torch.float64)
    # What the critic says of a state in which nothing can be decided must not matter.
    values = torch.tensor([[3.0, 1e6, -1e6, 5.0, 7.0, 1e6]], dtype=torch.float64)
    free = torch.tensor([[True, False, False, True, True, False]])
    following = torch.cat([values[:, 1:], torch.zeros(1, 1, dtype=torch.float64)], 1)
    terminated = torch.tensor([[False] * 5 + [True]])
    gamma, own_lambda = 0.5, 0.8
    found, returns = compute_gae(
        rewards,
        values,
        following,
        terminated,
        torch.zeros_like(terminated),
        gamma,
        decision_lambda(free, own_lambda),
    )
    fourth = 16 + 0.5 * 32 - 7
    third = 8 + 0.5 * 7 - 5 + 0.5 * own_lambda * fourth
    first = (1 + 0.5 * 2 + 0.25 * 4) + 0.125 * 5 - 3 + 0.125 * own_lambda * third
    wanted = torch.tensor([first, third, fourth], dtype=torch.float64)
    torch.testing.assert_close(found[free], wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(returns[free], wanted + values[free], rtol=1e-6, atol=1e-6)


def test_where_every_step_is_a_decision_nothing_is_passed_over() -> None:
    free = torch.ones(3, 8, dtype=torch.bool)
    assert torch.equal(decision_lambda(free, 0.9), torch.full((3, 8), 0.9))


def test_rows_do_not_mix_and_time_is_the_last_axis() -> None:
    given = random_rows(6, 9)
    whole, _ = compute_gae(**given, gamma=0.95, gae_lambda=0.9)
    for row in range(6):
        alone, _ = compute_gae(
            **{name: each[row] for name, each in given.items()}, gamma=0.95, gae_lambda=0.9
        )
        assert torch.equal(alone, whole[row])
    folded = {name: each.view(2, 3, 9) for name, each in given.items()}
    assert torch.equal(compute_gae(**folded, gamma=0.95, gae_lambda=0.9)[0], whole.view(2, 3, 9))


def test_what_lies_behind_an_end_does_not_matter() -> None:
    given = random_rows(1, 8)
    given["terminated"].zero_()
    given["truncated"].zero_()
    given["terminated"][0, 3] = True
    before, _ = compute_gae(**given, gamma=0.99, gae_lambda=0.95)
    for name in ("rewards", "values", "next_values"):
        given[name][0, 4:] = math.nan
    given["next_values"][0, 3] = math.nan
    after, _ = compute_gae(**given, gamma=0.99, gae_lambda=0.95)
    assert torch.equal(before[0, :4], after[0, :4])


def test_a_truncated_step_is_worth_its_bootstrap_and_a_terminated_one_is_not() -> None:
    def advantage(**flags: bool) -> float:
        ends = {name: torch.tensor([flags.get(name, False)]) for name in FLAGS}
        found, _ = compute_gae(
            torch.tensor([1.0]),
            torch.tensor([0.5]),
            torch.tensor([10.0]),
            **ends,
            gamma=0.9,
            gae_lambda=0.9,
        )
        return float(found)

    FLAGS = ("terminated", "truncated")
    assert advantage(truncated=True) == pytest.approx(1.0 + 9.0 - 0.5)
    assert advantage(terminated=True) == pytest.approx(1.0 - 0.5)


def test_shapes_must_agree() -> None:
    given = random_rows(2, 5)
    given["next_values"] = given["next_values"][:, :4]
    with pytest.raises(UsageError, match=r"next_values must have the shape.*\[2, 5\]"):
        compute_gae(**given, gamma=0.9, gae_lambda=0.9)


@pytest.mark.parametrize("op", list(LifecycleOp))
def test_each_head_has_its_advantage_where_it_mattered(op: LifecycleOp) -> None:
    advantages = torch.randn(16)
    free = torch.arange(16) % 2 == 0
    found = compute_per_head_advantages(advantages, torch.full((16,), int(op)), free)
    assert list(found) == list(HEAD_NAMES)
    for index, head in enumerate(HEAD_NAMES):
        expected = advantages * free if causal_table()[op, index] else torch.zeros(16)
        assert torch.equal(found[head], expected)


def test_masked_zeros_never_enter_the_statistics() -> None:
    draws = torch.Generator().manual_seed(0)
    advantages = 5.0 + 3.0 * torch.randn(20, 30, generator=draws)
    valid = torch.rand(20, 30, generator=draws) < 0.3
    junk = torch.where(valid, advantages, 1e9)
    normalised, mean, std, floored = normalize_advantages(junk, valid)
    chosen = advantages[valid].double()
    assert float(mean) == pytest.approx(float(chosen.mean()), rel=1e-5)
    assert float(std) == pytest.approx(float(chosen.std(correction=0)), rel=1e-5)
    assert not floored
    assert float(normalised[valid].mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(normalised[valid].std(correction=0)) == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(normalised[~valid], torch.zeros_like(normalised[~valid]))


def test_normalising_twice_changes_nothing() -> None:
    valid = torch.rand(200) < 0.5
    once = normalize_advantages(torch.randn(200) * 7 + 2, valid)[0]
    twice = normalize_advantages(once, valid)[0]
    assert torch.allclose(once, twice, atol=1e-5)


@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_a_small_deviation_is_floored_and_said_so(spread: float) -> None:
    advantages = spread * torch.randn(500)
    normalised, _, std, floored = normalize_advantages(
        advantages, torch.ones(500, dtype=torch.bool)
    )
    assert floored
    assert torch.allclose(normalised, (advantages - advantages.mean()) / 0.1, atol=1e-6)
    assert float(std) < 0.1


def test_nothing_that_counts_gives_zeros() -> None:
    normalised, mean, _, floored = normalize_advantages(
        torch.randn(5), torch.zeros(5, dtype=torch.bool)
    )
    assert torch.equal(normalised, torch.zeros(5))
    assert float(mean) == 0.0
    assert floored


def test_no_group_is_louder_than_another() -> None:
    draws = torch.Generator().manual_seed(0)
    advantages = torch.randn(8, 50, generator=draws)
    advantages[:4] *= 30.0
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    valid = torch.rand(8, 50, generator=draws) < 0.8
    normalised, mean, std, floored = normalize_advantages(advantages, valid, groups=groups)
    for group in (0, 1):
        own = normalised[groups == group][valid[groups == group]]
        assert float(own.std(correction=0)) == pytest.approx(1.0, rel=1e-4)
    assert float(normalised[valid].mean()) == pytest.approx(0.0, abs=1e-5)
    assert not normalised[~valid].any()
    # What is told is the raw ones' own.
    assert float(mean) == pytest.approx(float(advantages[valid].mean()), rel=1e-3, abs=1e-4)
    assert float(std) == pytest.approx(float(advantages[valid].std(correction=0)), rel=1e-4)
    assert not bool(floored)
