from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.simic.agent.config import ImitationConfig, RewardScales
from esper.simic.agent.losses import GoodEpisodes, discounted_returns
from esper.simic.agent.rollout_buffer import RolloutBatch, TamiyoRolloutBuffer
from tests.simic.agent.rollouts import collect, make_agent, small_policy

ONE = torch.ones(())
PLAIN = RewardScales()


def paid(buffer: TamiyoRolloutBuffer, returns: list[float]) -> RolloutBatch:
    """Return the round with rewards whose sums are these: all of it in the first step."""
    batch = buffer.batch()
    batch.rewards.zero_()
    batch.rewards[:, 0] = torch.tensor(returns)
    return batch


def keep(good: GoodEpisodes, batch: RolloutBatch) -> None:
    """Show a round of one task, whose returns are what they are."""
    good.keep(batch, ["digits"] * batch.rows, PLAIN)


def test_returns_are_discounted_from_the_end() -> None:
    returns = discounted_returns(torch.tensor([[1.0, 0.0, 4.0]]), 0.5)
    assert returns.tolist() == [[2.0, 2.0, 4.0]]


def test_the_best_episodes_stay() -> None:
    buffer = collect(small_policy(), rows=4, steps=5)
    good = GoodEpisodes(capacity=3)
    keep(good, paid(buffer, [-1.0, 0.0, 0.5, 2.0]))
    assert len(good) == 2
    keep(good, paid(buffer, [1.0, 0.7, -3.0, 0.1]))
    kept = good.state_dict()["tensors"]
    assert kept["rewards"].sum(1).tolist() == pytest.approx([2.0, 1.0, 0.7])
    # The best of all came from the last row of the first round.
    assert torch.equal(kept["actions"][0], buffer.batch().actions[3])


def test_no_task_crowds_out_another() -> None:
    buffer = collect(small_policy(), rows=6, steps=5)
    good, scales = GoodEpisodes(capacity=3), RewardScales()
    tasks = ["rich", "rich", "rich", "poor", "poor", "none"]
    batch = paid(buffer, [9.0, 8.0, 7.0, 0.3, 0.2, -1.0])
    scales.update(tasks, batch.rewards.sum(1))
    good.keep(batch, tasks, scales)
    kept = good.state_dict()
    assert kept["tensors"]["rewards"].sum(1).tolist() == pytest.approx([9.0, 0.3, 8.0])
    assert kept["tasks"] == ["rich", "poor", "rich"]


def test_steps_after_an_episodes_end_do_not_count() -> None:
    buffer = collect(small_policy(), rows=2, steps=6, lengths=[3, 6])
    good = GoodEpisodes(capacity=4)
    batch = paid(buffer, [0.0, 0.0])
    batch.rewards[:, 5] = 1.0
    keep(good, batch)
    assert len(good) == 1


def test_episodes_of_different_lengths_are_kept_side_by_side() -> None:
    policy = small_policy()
    good = GoodEpisodes(capacity=4)
    short, long = collect(policy, rows=2, steps=4), collect(policy, rows=2, steps=7)
    keep(good, paid(short, [1.0, 2.0]))
    keep(good, paid(long, [3.0, -1.0]))
    kept = good.state_dict()["tensors"]
    assert kept["rewards"].shape == (3, 7)
    assert kept["valid"].sum(1).tolist() == [7, 4, 4]
    loss = good.loss(
        policy, gamma=0.9, weights=torch.ones(len(good)), scales=PLAIN, value_scale=ONE
    )
    assert torch.isfinite(loss)


def test_imitation_makes_what_was_done_likelier_and_only_that() -> None:
    policy = small_policy(initial_op_bias=(0.0,) * 6)
    buffer = collect(policy, rows=3, steps=6)
    batch = buffer.batch()
    good = GoodEpisodes(capacity=1)
    paid(buffer, [-1.0, 5.0, -1.0])
    batch.rewards[1, -1] = 1.0
    keep(good, batch)

    def likelihood() -> Tensor:
        scores = policy.network.score(
            policy.normalizer.normalize(batch.raw_states),
            batch.blueprint_indices,
            batch.actions,
            batch.masks,
        )
        return (scores.log_probs.sum(-1) * batch.usable).sum(1).detach()

    before = likelihood()
    optimizer = torch.optim.SGD(policy.network.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        good.loss(
            policy, gamma=0.99, weights=torch.ones(len(good)), scales=PLAIN, value_scale=ONE
        ).backward()
        optimizer.step()
    gained = likelihood() - before
    assert float(gained[1]) > 0
    assert int(gained.argmax()) == 1


def test_what_the_critic_expects_already_is_not_imitated() -> None:
    policy = small_policy()
    buffer = collect(policy, rows=2, steps=5)
    good = GoodEpisodes(capacity=2)
    keep(good, paid(buffer, [0.01, 0.01]))
    with torch.no_grad():
        policy.network.value_head[-1].bias.fill_(100.0)
    loss = good.loss(
        policy, gamma=0.99, weights=torch.ones(len(good)), scales=PLAIN, value_scale=ONE
    )
    assert float(loss.detach()) == 0.0


def test_paying_off_ends_imitation() -> None:
    agent = make_agent(imitation=ImitationConfig(weight=1.0))
    buffer = collect(agent.policy, rows=3, steps=6)
    paid(buffer, [3.0, 2.0, 1.0])
    buffer.batch().rewards[:, -1] = 1.0
    tasks = ["a", "b", "b"]
    agent.update(buffer, progress=0.0, paid_off=0.0, round=0, tasks=tasks)
    assert len(agent.good_episodes) == 3

    def loss(*paid_off: float) -> float:
        agent._paid_off = dict(zip("ab", paid_off, strict=True))
        return float(agent.imitate().detach())

    losses = [loss(rate, rate) for rate in (0.0, 0.25, 0.5)]
    assert losses[0] > 0
    # Only where episodes paid off.
    assert 0 < loss(0.0, 0.5) < losses[0]
    assert loss(0.0, 0.5) + loss(0.5, 0.0) == pytest.approx(losses[0])
    assert losses[1] == pytest.approx(losses[0] / 2)
    assert losses[2] == 0.0


def test_without_weight_nothing_is_kept_and_nothing_imitated() -> None:
    agent = make_agent(imitation=ImitationConfig(weight=0.0))
    buffer = collect(agent.policy, rows=3, steps=6)
    paid(buffer, [3.0, 2.0, 1.0])
    agent.update(buffer, progress=0.0, paid_off=0.0, round=0)
    assert len(agent.good_episodes) == 0
    assert float(agent.imitate()) == 0.0


def test_a_restored_agent_remembers_the_same_episodes() -> None:
    imitation = ImitationConfig(weight=1.0)
    agent = make_agent(imitation=imitation)
    other = make_agent(small_policy(seed=1), imitation=imitation)
    buffer = collect(agent.policy, rows=3, steps=6)
    paid(buffer, [3.0, 2.0, 1.0])
    agent.update(buffer, progress=0.0, paid_off=0.0, round=0)
    other.load_state_dict(agent.state_dict())
    assert len(other.good_episodes) == 3
    assert torch.equal(other.imitate(), agent.imitate())
