"""How fast a whole PPO update is, against a reference in the same run.

Everything an update does is in the time: advantages, the reference log-probabilities, all passes
with their steps, and every diagnostic. What the reference does not have is off: the KL limit, which
would end an update early, and imitation. `find_update_reference` says what it is compared with:
sb3-contrib's `RecurrentPPO.train`, or the same update with its episodes scored step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from esper.bench.policy import PLAIN_STEPS, Situation, score_by_steps
from esper.bench.recurrent_ppo import build_reference, tell_left_out
from esper.bench.timing import Comparison, compare
from esper.leyline.errors import UsageError
from esper.leyline.slots import SlotConfig
from esper.simic.agent.config import ImitationConfig
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.controllers.policy_file import new_policy
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.decision import Scores
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.policy.action_masks import available_heads, base_mask
from esper.tamiyo.policy.features import batch_obs_to_features


class UpdateWork:
    """One agent and one round of episodes that were lived; rewards are noise.

    Args:
        situations: what the rows saw, one entry per step.
        hidden: width of the network.
        epochs: passes of an update.
        minibatches: minibatches of a pass; rows are split, so there are at most as many.
        device: where it learns.
    """

    def __init__(
        self,
        situations: Sequence[Situation],
        hidden: int,
        *,
        epochs: int,
        minibatches: int,
        device: str = "cpu",
    ) -> None:
        """Act through the episodes once and keep the round."""
        signals = situations[0][0]
        rows, steps, slots = signals.rows, len(situations), signals.num_slots
        if minibatches > rows:
            raise UsageError(f"{minibatches} minibatches need as many rows, got {rows}")
        self.rows, self.steps, self.hidden, self.device = rows, steps, hidden, device
        self.epochs, self.minibatches = epochs, minibatches
        policy = new_policy(PolicyConfig(num_slots=slots, lstm_hidden_dim=hidden))
        config = PPOConfig(
            epochs=epochs,
            minibatches=minibatches,
            target_kl=0.0,
            imitation=ImitationConfig(weight=0.0),
        )
        self.agent = PPOAgent(policy, config, device)
        self.inputs = policy.network.config.input_dim
        self.parameters = sum(weight.numel() for weight in policy.network.parameters())
        self.buffer = TamiyoRolloutBuffer(rows, steps, policy.network.config, device)
        self._collect(situations, SlotConfig.of(slots))

    def update(self) -> None:
        """Run one whole update."""
        self.learn(self.agent)

    def learn(self, agent: PPOAgent) -> None:
        """Run one whole update of this agent on the round."""
        agent.update(self.buffer, progress=0.5, paid_off=0.5, round=0)

    def plain_agent(self) -> PPOAgent:
        """Return an agent of the same weights that scores one step after another."""
        network = _PlainNetwork.from_config(self.agent.network.config)
        network.load_state_dict(self.agent.network.state_dict())
        policy = replace(self.agent.policy, network=network)
        return PPOAgent(policy, self.agent.config, self.device)

    def _collect(self, situations: Sequence[Situation], slots: SlotConfig) -> None:
        policy, device = self.agent.policy, self.device
        hidden = policy.network.initial_hidden(self.rows)
        nobody = torch.zeros(self.rows, dtype=torch.bool, device=device)
        for at, (signals, legal) in enumerate(situations):
            raw, blueprints = batch_obs_to_features(signals, slots, device)
            masks = legal.to(device)
            state = policy.normalizer.normalize(raw)
            step = policy.network.get_action(state, masks, blueprints, hidden=hidden)
            self.buffer.add_decision(
                raw_state=raw,
                state=state,
                blueprint_indices=blueprints,
                hidden=hidden,
                step=step,
                base_masks=base_mask(masks),
                available=available_heads(masks),
                free=masks.op.sum(-1) > 1,
                active=~nobody,
            )
            self.buffer.add_outcome(
                reward=torch.randn(self.rows).to(device),
                effective_op=step.op,
                terminated=~nobody if at == self.steps - 1 else nobody,
                truncated=nobody,
            )
            hidden = step.hidden


class _PlainNetwork(FactoredRecurrentActorCriticV2):
    """The same network, whose episodes are scored one step of all rows after another."""

    def score(self, *inputs: Any, with_baseline: bool = False, **others: Any) -> Scores:
        """Score as an update asks for it: whole episodes from an empty memory."""
        if with_baseline or others:
            raise UsageError("plain steps are scored without a baseline and from an empty memory")
        return score_by_steps(super().score, *inputs)


@dataclass(frozen=True, slots=True)
class UpdateReference:
    """What an update is compared with."""

    name: str
    parameters: int
    update: Callable[[], None]


def find_update_reference(ours: UpdateWork) -> tuple[UpdateReference, str]:
    """Return `RecurrentPPO.train`, or without sb3-contrib the same update by plain steps.

    Both make the same passes over as many steps in as many minibatches. The second is empty, or one
    line that says what was left out and how to get it.

    Raises:
        UsageError: The reference is of another size.
    """
    try:
        work = build_reference(ours)
    except ModuleNotFoundError as error:
        learn = partial(ours.learn, ours.plain_agent())
        return UpdateReference(PLAIN_STEPS, ours.parameters, learn), tell_left_out(error)
    train = partial(work.train, ours.epochs, ours.minibatches)
    return UpdateReference(work.name, work.parameters, train), ""


def compare_updates(ours: UpdateWork, reference: UpdateReference, *, rounds: int) -> Comparison:
    """Return how an update compares with that of the reference."""
    return compare(
        "update",
        ours.update,
        reference.update,
        against=reference.name,
        rounds=rounds,
        device=ours.device,
    )
