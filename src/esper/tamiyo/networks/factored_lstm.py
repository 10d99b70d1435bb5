"""The documents' policy: a recurrent actor-critic with eight heads over one LSTM.

    observation + embedded blueprints -> Linear, LayerNorm, ReLU -> LSTM -> LayerNorm
        -> slot, blueprint, style, tempo, alpha_target, alpha_speed, alpha_curve, op
        -> value, which also sees the op

Every head reads only the LSTM's output. `actor_critic.py` has acting and scoring, `decision.py` the
layout of all heads in one tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.controller import DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.slots import SlotConfig
from esper.tamiyo.networks.actor_critic import ActorCritic
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.decision import OP, OP_ROW, Evaluation, HeadTable, MaskSource, Scores
from esper.tamiyo.networks.layers import (
    BlueprintEmbedding,
    Hidden,
    make_blueprint_head,
    make_head,
    make_op_encoder,
    make_value_head,
    run_heads,
    run_layers,
)
from esper.tamiyo.policy.distribution import masked_log_probs, sample

__all__ = ["BlueprintEmbedding", "Evaluation", "FactoredRecurrentActorCriticV2", "Scores"]


class FactoredRecurrentActorCriticV2(ActorCritic[None]):
    """The recurrent factored policy with its critic.

    Args:
        state_dim: features of the observation; by default 31, and 30 for each slot.
        num_slots: largest number of slots of a host.
        lstm_hidden_dim: width of the features and of the LSTM.
        options: further fields of `PolicyConfig`, such as `critic` or `lstm_layers`.
    """

    blueprint_head: nn.Sequential

    def __init__(
        self,
        state_dim: int | None = None,
        num_slots: int = SlotConfig.default().num_slots,
        lstm_hidden_dim: int = DEFAULT_LSTM_HIDDEN_DIM,
        **options: Any,
    ) -> None:
        config = PolicyConfig(
            state_dim=state_dim, num_slots=num_slots, lstm_hidden_dim=lstm_hidden_dim, **options
        )
        super().__init__(config, HeadTable(config.head_sizes))
        width = config.lstm_hidden_dim
        self.blueprint_embedding = BlueprintEmbedding(
            config.num_blueprints, config.blueprint_embed_dim
        )
        self.feature_net = nn.Sequential(
            nn.Linear(config.input_dim, width), nn.LayerNorm(width), nn.ReLU()
        )
        self.lstm = nn.LSTM(width, width, config.lstm_layers, batch_first=True)
        self.lstm_ln = nn.LayerNorm(width)
        for name, size in config.head_sizes.items():
            is_deep = name == "blueprint" and config.blueprint_layers == 3
            make = make_blueprint_head if is_deep else make_head
            self.add_module(f"{name}_head", make(width, size))
        self.value_head = make_value_head(config)
        self.op_encoder = make_op_encoder(config)
        self.initialize([self.feature_net], self.heads)

    @classmethod
    def from_config(cls, config: PolicyConfig) -> FactoredRecurrentActorCriticV2:
        """Return the network a configuration describes."""
        fields = {name: getattr(config, name) for name in config.describe()}
        return cls(**fields)

    @property
    def heads(self) -> tuple[nn.Sequential, ...]:
        """The heads in the order of `HEAD_NAMES`."""
        return tuple(map(self.head, HEAD_NAMES))

    def forward(
        self,
        state: Tensor,
        blueprint_indices: Tensor,
        hidden: Hidden | None = None,
        op_for_value: Tensor | None = None,
        masks: MaskSource | None = None,
        *,
        explore: bool = True,
        generator: torch.Generator | None = None,
        episode_starts: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return the raw logits of every head and the value of every step.

        Args:
            state: [B, T, features].
            blueprint_indices: int64 [B, T, S], -1 where a slot is empty.
            hidden: the LSTM state before the first step; zeros by default.
            op_for_value: int64 [B, T]; the value is then Q(s, op). Without it the value is the
                critic's baseline: the mean of Q over the sampling distribution, Q of an op drawn
                from it ('op_sampled'), Q of its probabilities ('op_soft'), or V(s).
            masks: legal ops of that distribution; the logits themselves are not masked.
            explore: whether that distribution has floors.
            generator: source of the draws of 'op_sampled'.
            episode_starts: bool [B, T], the LSTM state is reset before these steps.

        Returns:
            `<head>_logits` [B, T, choices], `value` [B, T], `op_values` [B, T, ops], `hidden`.
        """
        memory, _, hidden = self.remember(state, blueprint_indices, hidden, episode_starts)
        parts = [run_layers(head, memory).transpose(0, 1) for head in self.heads]
        judged = self.judge(memory).transpose(0, 1)
        op_values = self.op_values(judged)
        if op_for_value is not None:
            value = op_values.gather(-1, op_for_value.unsqueeze(-1)).squeeze(-1)
        else:
            shape = state.shape[:-1]
            mask = self.table.row_masks(masks, shape)[..., OP_ROW, : self.table.sizes["op"]]
            log_probs = masked_log_probs(
                parts[OP].detach(),
                mask,
                self.floors[OP],
                floor_kind=self.floor_kind(explore),
                check=self.config.check,
            )
            op = sample(log_probs, generator, deterministic=self.config.critic != "op_sampled")
            value = self.baseline(judged, op_values, log_probs, op)
        logits = {f"{head}_logits": part for head, part in zip(HEAD_NAMES, parts, strict=True)}
        return {**logits, "value": value, "op_values": op_values, "hidden": hidden}

    def read(self, state: Tensor, blueprint_indices: Tensor) -> tuple[Tensor, None]:
        """Return features; the heads need no further context."""
        return self.encode(state, blueprint_indices), None

    def every_logits(self, memory: Tensor, context: None) -> Tensor:
        """Return the logits of all heads side by side."""
        return torch.cat([head(memory) for head in self.heads], dim=-1)

    def taken_logits(self, memory: Tensor, context: None, taken: Tensor) -> Tensor:
        """Return the logits of all heads, which do not depend on what was taken."""
        return self.table.head_logits(run_heads(self.heads, memory))

    def encode(self, state: Tensor, blueprint_indices: Tensor) -> Tensor:
        """Return features [..., width] of observations and blueprints."""
        seeds = self.blueprint_embedding(blueprint_indices).flatten(-2)
        features: Tensor = self.feature_net(torch.cat([state, seeds], dim=-1))
        return features
