"""The policy: a recurrent actor-critic with eight heads over one shared memory.

    observation + embedded blueprints -> Linear, LayerNorm, ReLU -> LSTM -> LayerNorm
        -> slot, blueprint, style, tempo, alpha_target, alpha_speed, alpha_curve, op
        -> value, which also sees the op

It acts step by step (`get_action`) and is scored on whole episodes in one call
(`evaluate_actions`, `score`); both build their distributions by `policy.distribution`, so what is
sampled is what is scored. How heads share one rectangle is in `head_table.py`, the memory in
`memory.py`, the critic in `critic.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.defaults import DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks
from esper.leyline.slots import SlotConfig
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.decision import Evaluation, PolicyStep, Scores, baseline, choose
from esper.tamiyo.networks.head_table import NUM_HEADS, OP, OP_ROW, HeadTable, MaskSource
from esper.tamiyo.networks.layers import (
    BlueprintEmbedding,
    Hidden,
    check_hidden,
    empty_hidden,
    initialize_linear,
    initialize_lstm,
    initialize_output,
    make_blueprint_head,
    make_head,
    make_value_head,
    run_heads,
    run_layers,
    run_sequence,
    run_step,
    state_value,
    value_of_every_op,
    value_of_op,
)
from esper.tamiyo.policy.distribution import (
    FloorKind,
    check_choices,
    chosen_log_probs,
    entropy,
    masked_log_probs,
    must_check,
    sample,
)

__all__ = ["BlueprintEmbedding", "Evaluation", "FactoredRecurrentActorCriticV2", "Scores"]


class FactoredRecurrentActorCriticV2(nn.Module):
    """The recurrent factored policy with its critic.

    Args:
        state_dim: features of the observation; by default 31 and 30 for each slot.
        num_slots: most slots of a host it can serve.
        lstm_hidden_dim: width of the features and of the memory.
        options: further fields of `PolicyConfig`, such as `critic` or `lstm_layers`.
    """

    floors: Tensor
    row_floors: Tensor

    def __init__(
        self,
        state_dim: int | None = None,
        num_slots: int = SlotConfig.default().num_slots,
        lstm_hidden_dim: int = DEFAULT_LSTM_HIDDEN_DIM,
        **options: Any,
    ) -> None:
        """Build and initialise the network from PyTorch's own random numbers."""
        super().__init__()
        config = PolicyConfig(
            state_dim=state_dim, num_slots=num_slots, lstm_hidden_dim=lstm_hidden_dim, **options
        )
        self.config = config
        width, sizes = config.lstm_hidden_dim, config.head_sizes
        self.blueprint_embedding = BlueprintEmbedding(
            config.num_blueprints, config.blueprint_embed_dim
        )
        self.feature_net = nn.Sequential(
            nn.Linear(config.input_dim, width), nn.LayerNorm(width), nn.ReLU()
        )
        self.lstm = nn.LSTM(width, width, config.lstm_layers, batch_first=True)
        self.lstm_ln = nn.LayerNorm(width)
        self.slot_head = make_head(width, sizes["slot"])
        self.blueprint_head = make_blueprint_head(width, sizes["blueprint"])
        self.style_head = make_head(width, sizes["style"])
        self.tempo_head = make_head(width, sizes["tempo"])
        self.alpha_target_head = make_head(width, sizes["alpha_target"])
        self.alpha_speed_head = make_head(width, sizes["alpha_speed"])
        self.alpha_curve_head = make_head(width, sizes["alpha_curve"])
        self.op_head = make_head(width, sizes["op"])
        self.value_head = make_value_head(width, sees_op=config.critic != "state")
        self.table = HeadTable(sizes)
        floors = torch.tensor(config.floor.by_head(), dtype=torch.float32)
        self.register_buffer("floors", floors, persistent=False)
        self.register_buffer("row_floors", floors[self.table.row_heads], persistent=False)
        self._initialize()

    @classmethod
    def from_config(cls, config: PolicyConfig) -> FactoredRecurrentActorCriticV2:
        """Return the network a configuration describes."""
        fields = {name: getattr(config, name) for name in config.describe()}
        return cls(**fields)

    @property
    def heads(self) -> tuple[nn.Sequential, ...]:
        """The heads in the order of `HEAD_NAMES`."""
        return (
            self.slot_head,
            self.blueprint_head,
            self.style_head,
            self.tempo_head,
            self.alpha_target_head,
            self.alpha_speed_head,
            self.alpha_curve_head,
            self.op_head,
        )

    def initial_hidden(self, rows: int) -> Hidden:
        """Return the memory of rows at the start of an episode."""
        return empty_hidden(self.lstm, rows)

    # --------------------------------------------------------------------------------- sequences

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
            hidden: the memory before the first step; empty without one.
            op_for_value: int64 [B, T]; the value is then Q(s, op). Without it the value is the
                baseline of the critic: the mean of Q over the distribution that is sampled from,
                Q of an op drawn from it ('op_sampled'), or V(s).
            masks: which ops that distribution allows; the logits themselves are not masked.
            explore: whether that distribution has floors.
            generator: where 'op_sampled' draws from.
            episode_starts: bool [B, T], the memory is emptied before these steps.

        Returns:
            `<head>_logits` [B, T, choices], `value` [B, T], `op_values` [B, T, ops], `hidden`.
        """
        memory, hidden = self._remember(state, blueprint_indices, hidden, episode_starts)
        parts = [run_layers(head, memory).transpose(0, 1) for head in self.heads]
        op_values = self.op_values(memory).transpose(0, 1)
        if op_for_value is not None:
            value = op_values.gather(-1, op_for_value.unsqueeze(-1)).squeeze(-1)
        else:
            shape = state.shape[:-1]
            mask = self.table.row_masks(masks, shape)[..., OP_ROW, : self.table.sizes["op"]]
            log_probs = masked_log_probs(
                parts[OP].detach(),
                mask,
                self.floors[OP],
                floor_kind=self._floor_kind(explore),
                check=self.config.check,
            )
            op = sample(log_probs, generator, deterministic=self.config.critic != "op_sampled")
            value = baseline(self.config.critic, op_values, log_probs, op)
        logits = {f"{head}_logits": part for head, part in zip(HEAD_NAMES, parts, strict=True)}
        return {**logits, "value": value, "op_values": op_values, "hidden": hidden}

    def evaluate_actions(
        self,
        states: Tensor,
        blueprint_indices: Tensor,
        actions: Mapping[str, Tensor] | Tensor,
        masks: MaskSource | None,
        hidden: Hidden | None = None,
        sampled_op: Tensor | None = None,
        *,
        explore: bool = True,
        episode_starts: Tensor | None = None,
    ) -> Evaluation:
        """Return values, log-probabilities and entropies of whole episodes, by head.

        See `score`, which returns the same in one tensor for all heads, and more.
        """
        scores = self.score(
            states,
            blueprint_indices,
            actions,
            masks,
            hidden,
            sampled_op,
            explore=explore,
            episode_starts=episode_starts,
            with_baseline=False,
        )
        return Evaluation(
            values=scores.values,
            log_probs=dict(zip(HEAD_NAMES, scores.log_probs.unbind(-1), strict=True)),
            entropies=dict(zip(HEAD_NAMES, scores.entropies.unbind(-1), strict=True)),
            hidden=scores.hidden,
        )

    def score(
        self,
        states: Tensor,
        blueprint_indices: Tensor,
        actions: Mapping[str, Tensor] | Tensor,
        masks: MaskSource | None,
        hidden: Hidden | None = None,
        sampled_op: Tensor | None = None,
        *,
        explore: bool = True,
        episode_starts: Tensor | None = None,
        with_baseline: bool = True,
    ) -> Scores:
        """Score whole episodes in one call.

        Args:
            states: [B, T, features].
            blueprint_indices: int64 [B, T, S].
            actions: {head: int64 [B, T]}, or int64 [B, T, 8].
            masks: as they were when the actions were taken: [B, T, 8, K] as a `PolicyStep` has
                them, by head, or as the rules gave them.
            hidden: the memory before the first step; empty without one.
            sampled_op: the op whose value is returned; the op taken by default.
            explore: whether the distribution had floors.
            episode_starts: bool [B, T], the memory is emptied before these steps.
            with_baseline: also compute the baseline; without it, it is the values.
        """
        memory, hidden = self._remember(states, blueprint_indices, hidden, episode_starts)
        taken = self.table.pack(actions)
        legal = self.table.head_masks(masks, taken)
        by_step = run_heads(self.heads, memory)
        logits = self.table.head_logits(by_step.transpose(0, 1))
        log_probs = masked_log_probs(
            logits,
            legal,
            self.floors,
            floor_kind=self._floor_kind(explore),
            check=self.config.check,
            heads=HEAD_NAMES,
        )
        causal = self.table.causal[taken[..., OP]]
        own = torch.where(causal, chosen_log_probs(log_probs, taken), 0.0)
        op = taken[..., OP] if sampled_op is None else sampled_op
        if self.config.critic == "state":
            values = state_value(self.value_head, memory).t()
        else:
            values = value_of_op(self.value_head, memory, op.t()).t()
        expected = values
        if with_baseline and self.config.critic == "op_marginal":
            choices = log_probs[..., OP, : self.table.sizes["op"]]
            every = value_of_every_op(self.value_head, memory).transpose(0, 1)
            expected = baseline(self.config.critic, every, choices, op)
        return Scores(
            values=values,
            baseline=expected,
            log_probs=own,
            entropies=entropy(logits, legal),
            logits=logits,
            masks=legal,
            hidden=hidden,
        )

    # ------------------------------------------------------------------------------------- a step

    @torch.no_grad()
    def get_action(
        self,
        state: Tensor,
        mask: MaskSource | None = None,
        blueprint_indices: Tensor | None = None,
        hidden: Hidden | None = None,
        deterministic: bool = False,
        *,
        explore: bool = True,
        generator: torch.Generator | None = None,
        uniforms: Tensor | None = None,
    ) -> PolicyStep:
        """Decide one step: the op, the slot from that op's row, then the heads the op uses.

        Args:
            state: [N, features], or [features] for one row without its axis.
            mask: what is legal, in any form of `MaskSource`; without one everything is.
            blueprint_indices: int64 [N, S], -1 where a slot is empty; all empty by default.
            hidden: the memory; empty without one.
            deterministic: take the likeliest choices instead of drawing.
            explore: whether the distribution has floors.
            generator: where draws come from.
            uniforms: one draw from [0, 1) per row and head, [N, 8], instead of a generator.
        """
        if state.dim() == 1:
            own = (1,) if isinstance(mask, Masks) else ()
            step = self.get_action(
                state[None],
                self.table.row_masks(mask, own).view(1, self.table.num_rows, -1),
                None if blueprint_indices is None else blueprint_indices[None],
                hidden,
                deterministic,
                explore=explore,
                generator=generator,
                uniforms=None if uniforms is None else uniforms[None],
            )
            return step.row(0)
        state = state.squeeze(1) if state.dim() == 3 else state
        if blueprint_indices is None:
            blueprint_indices = state.new_full(
                (len(state), self.config.num_slots), -1, dtype=torch.int64
            )
        elif blueprint_indices.dim() == 3:
            blueprint_indices = blueprint_indices.squeeze(1)
        self.check_inputs(state, blueprint_indices)
        if hidden is None:
            hidden = self.initial_hidden(len(state))
        check_hidden(hidden, self.lstm, len(state))
        if deterministic:
            uniforms = None
        elif uniforms is None:
            shape = (len(state), NUM_HEADS)
            uniforms = torch.rand(shape, generator=generator, device=state.device)
        legal = self.table.row_masks(mask, (len(state),))
        step, logits = self.decide(
            state, blueprint_indices, legal, uniforms, hidden, explore=explore
        )
        self.check_step(step, logits)
        return step

    def check_step(self, step: PolicyStep, logits: Tensor) -> None:
        """Raise where a decision was made by an empty mask or by logits that are not finite."""
        if not must_check(self.config.check, logits):
            return
        if not bool(step.masks.any(-1).all() & torch.isfinite(logits.sum())):
            check_choices(self.table.head_logits(logits), step.masks, HEAD_NAMES)

    def decide(
        self,
        state: Tensor,
        blueprint_indices: Tensor,
        masks: Tensor,
        uniforms: Tensor | None,
        hidden: Hidden,
        *,
        explore: bool = True,
    ) -> tuple[PolicyStep, Tensor]:
        """Decide one step from tensors to tensors; what is compiled and captured in a graph.

        Args:
            state: [N, features].
            blueprint_indices: int64 [N, S].
            masks: bool [N, R, K], see `HeadTable.row_masks`.
            uniforms: [N, 8] from [0, 1); None takes the likeliest choices.
            hidden: the memory.
            explore: whether the distribution has floors.

        Returns:
            The step, and the logits of all heads side by side. Nothing is checked.
        """
        logits, op_values, hidden = self.respond(state, blueprint_indices, hidden)
        step = self.choose(logits, op_values, hidden, masks, uniforms, explore=explore)
        return step, logits

    def respond(
        self, state: Tensor, blueprint_indices: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, Hidden]:
        """Return the logits of all heads side by side, Q(s, op) [N, ops], and the memory after."""
        memory, hidden = run_step(self.lstm, self.encode(state, blueprint_indices), hidden)
        memory = self.lstm_ln(memory)
        return self._head_logits(memory), self.op_values(memory), hidden

    def choose(
        self,
        logits: Tensor,
        op_values: Tensor,
        hidden: Hidden,
        masks: Tensor,
        uniforms: Tensor | None,
        *,
        explore: bool = True,
    ) -> PolicyStep:
        """Return the decision that these logits, masks and draws make; see `choice.choose`."""
        return choose(
            self.table,
            logits,
            op_values,
            hidden,
            masks,
            uniforms,
            self.row_floors,
            floor_kind=self._floor_kind(explore),
            critic=self.config.critic,
        )

    # ---------------------------------------------------------------------------------- internals

    def _initialize(self) -> None:
        initialize_linear([self.feature_net, *self.heads, self.value_head])
        initialize_lstm(self.lstm)
        for head in self.heads:
            initialize_output(head, self.config.policy_gain)
        initialize_output(self.op_head, self.config.policy_gain, self.config.initial_op_bias)
        initialize_output(self.value_head, self.config.value_gain)

    def encode(self, state: Tensor, blueprint_indices: Tensor) -> Tensor:
        """Return features [..., width] of observations and blueprints."""
        seeds = self.blueprint_embedding(blueprint_indices).flatten(-2)
        features: Tensor = self.feature_net(torch.cat([state, seeds], dim=-1))
        return features

    def _remember(
        self,
        state: Tensor,
        blueprint_indices: Tensor,
        hidden: Hidden | None,
        episode_starts: Tensor | None,
    ) -> tuple[Tensor, Hidden]:
        """Return what the heads read, [T, B, width], and the memory after the last step."""
        if state.dim() != 3:
            raise UsageError(
                f"sequences of states must be [rows, steps, features], got {list(state.shape)}"
            )
        self.check_inputs(state, blueprint_indices)
        if hidden is not None:
            check_hidden(hidden, self.lstm, len(state))
        # The memory's kernels read one step of all rows after another. Laid out like that from the
        # start, nothing that is as wide as the network has to be copied.
        features = self.encode(state.transpose(0, 1), blueprint_indices.transpose(0, 1))
        outputs, hidden = run_sequence(self.lstm, features.transpose(0, 1), hidden, episode_starts)
        memory: Tensor = self.lstm_ln(outputs.transpose(0, 1))
        return memory, hidden

    def _head_logits(self, memory: Tensor) -> Tensor:
        """Return the logits of all heads side by side."""
        return torch.cat([head(memory) for head in self.heads], dim=-1)

    def op_values(self, memory: Tensor) -> Tensor:
        """Return Q(s, op) for every op, [..., ops]; V(s) in every column without ops."""
        if self.config.critic == "state":
            value = state_value(self.value_head, memory)
            return value.unsqueeze(-1).expand(*value.shape, self.table.sizes["op"])
        return value_of_every_op(self.value_head, memory)

    def _floor_kind(self, explore: bool) -> FloorKind:
        return self.config.floor.kind if explore else "off"

    def check_inputs(self, state: Tensor, blueprint_indices: Tensor) -> None:
        """Raise unless observations and blueprints have the shapes this policy reads."""
        wanted = (*state.shape[:-1], self.config.num_slots)
        if state.shape[-1] != self.config.observation_dim:
            raise UsageError(
                f"this policy reads {self.config.observation_dim} features for "
                f"{self.config.num_slots} slots, got {state.shape[-1]}"
            )
        if tuple(blueprint_indices.shape) != wanted:
            raise UsageError(
                f"blueprint_indices must be int64 {list(wanted)}, "
                f"got {list(blueprint_indices.shape)}"
            )
