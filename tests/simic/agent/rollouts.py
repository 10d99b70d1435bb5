"""Small policies and whole rounds of random legal situations for the tests of the learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from esper.leyline.rules import Masks
from esper.simic.agent.config import ImitationConfig
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.controllers.policy_file import Policy, new_policy
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.decision import PolicyStep
from esper.tamiyo.policy.action_masks import available_heads
from esper.testing.controllers import random_signals

Pay = Callable[[Tensor, PolicyStep, int], Tensor]
"""From the observation, the decision and the time to the rewards of all rows."""


def small_policy(seed: int = 0, **options: Any) -> Policy:
    """Return a policy of width 32 whose heads are far from uniform."""
    settings: dict[str, Any] = {"lstm_hidden_dim": 32, "policy_gain": 1.0, **options}
    return new_policy(PolicyConfig(**settings), seed=seed)


def make_agent(policy: Policy | None = None, seed: int = 0, **options: Any) -> PPOAgent:
    """Return an agent that learns from its rounds alone unless it is told to imitate."""
    config = PPOConfig(**{"imitation": ImitationConfig(weight=0.0), **options})
    return PPOAgent(policy or small_policy(), config, "cpu", seed)


def situation(rows: int, policy: Policy, draws: torch.Generator) -> tuple[Tensor, Tensor, Masks]:
    """Return raw observations, blueprints and masks of random hosts."""
    signals, masks = random_signals(rows, policy.network.config.num_slots, draws)
    raw, blueprints = policy.layout.observe(signals, "cpu")
    return raw, blueprints, masks


def collect(
    policy: Policy,
    rows: int = 6,
    steps: int = 12,
    *,
    seed: int = 0,
    lengths: list[int] | None = None,
    truncate: bool = False,
    pay: Pay | None = None,
    buffer: TamiyoRolloutBuffer | None = None,
) -> TamiyoRolloutBuffer:
    """Let a policy act in random situations; each row ends after its own number of steps."""
    draws = torch.Generator().manual_seed(seed)
    network = policy.network
    if buffer is None:
        buffer = TamiyoRolloutBuffer(rows, steps, network.config)
    buffer.start()
    ends = torch.tensor(lengths or [steps] * rows)
    hidden = network.initial_hidden(rows)
    for at in range(steps):
        raw, blueprints, masks = situation(rows, policy, draws)
        state = policy.normalizer.normalize(raw)
        step = network.get_action(state, masks, blueprints, hidden, generator=draws)
        reward = torch.randn(rows, generator=draws) if pay is None else pay(state, step, at)
        buffer.add_decision(
            raw_state=raw,
            state=state,
            blueprint_indices=blueprints,
            hidden=hidden,
            step=step,
            base_masks=network.table.head_masks(masks, torch.zeros(rows, 8, dtype=torch.int64)),
            available=available_heads(masks),
            free=masks.op.sum(1) > 1,
            active=at < ends,
        )
        is_last = ends == at + 1
        buffer.add_outcome(
            reward=reward,
            effective_op=step.op,
            terminated=is_last & (not truncate),
            truncated=is_last & truncate,
        )
        hidden = step.hidden
    if truncate:
        buffer.set_bootstrap(torch.arange(rows), torch.randn(rows, generator=draws))
    return buffer


def weights(policy: Policy) -> dict[str, Tensor]:
    """Return a copy of all weights."""
    return {name: each.clone() for name, each in policy.network.state_dict().items()}
