"""How fast a whole PPO update is, against a reference in the same run.

Everything an update does is in the time: advantages, the reference log-probabilities, all passes
with their steps, and every diagnostic. What the reference does not have is off: the KL limit, which
would end an update early, and imitation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from esper.leyline.errors import UsageError
from esper.leyline.masks import Masks
from esper.leyline.slots import SlotConfig
from esper.simic.agent.config import ImitationConfig
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.controllers.policy_file import new_policy
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.recurrent_ppo import RecurrentPPOWork
from esper.tamiyo.networks.throughput import Comparison, Situation, compare
from esper.tamiyo.policy.action_masks import available_heads, base_mask
from esper.tamiyo.policy.features import batch_obs_to_features


class UpdateWork:
    """One agent and one round of episodes that were lived; rewards are noise.

    Args:
        situations: what the rows saw, one entry per step.
        hidden: width of the network.
        epochs: passes of an update.
        minibatches: minibatches of a pass.
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
        self.agent.update(self.buffer, progress=0.5, success=0.5, round=0)

    def _collect(self, situations: Sequence[Situation], slots: SlotConfig) -> None:
        policy, device = self.agent.policy, self.device
        hidden = policy.network.initial_hidden(self.rows)
        nobody = torch.zeros(self.rows, dtype=torch.bool, device=device)
        for at, (signals, legal) in enumerate(situations):
            raw, blueprints = batch_obs_to_features(signals, slots, device)
            masks = Masks(**{each.name: getattr(legal, each.name).to(device) for each in _MASKS})
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


_MASKS = fields(Masks)


def compare_updates(ours: UpdateWork, *, rounds: int) -> tuple[Comparison, int]:
    """Return how an update compares with `RecurrentPPO.train`, and the reference's parameters.

    Both make the same passes over as many steps in as many minibatches.

    Raises:
        ModuleNotFoundError: sb3-contrib is not installed.
        UsageError: The reference is of another size.
    """
    reference = RecurrentPPOWork(
        ours.rows, ours.steps, ours.hidden, inputs=ours.inputs, device=ours.device
    )
    share = reference.parameters / ours.parameters
    if not 0.9 < share < 1.1:
        raise UsageError(f"the reference has {share:.2f} times the parameters; that is not fair")
    found = compare(
        "update",
        ours.update,
        lambda: reference.train(ours.epochs, ours.minibatches),
        against=reference.name,
        rounds=rounds,
        finish=torch.cuda.synchronize if ours.device == "cuda" else None,
    )
    return found, reference.parameters
