"""ActorCritic: the base class of policy networks.

A network encodes an observation, passes it through an LSTM, and returns the logits of eight heads
and the value of every op. Networks differ in three methods: `read`, `every_logits` and
`taken_logits`. Acting step by step, scoring whole episodes, the LSTM and the critic are here.
Acting and scoring both use `policy.distribution`, so they cannot disagree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.decision import (
    NUM_HEADS,
    OP,
    SLOT,
    Evaluation,
    HeadTable,
    MaskSource,
    PolicyStep,
    Scores,
    choose,
)
from esper.tamiyo.networks.layers import (
    Hidden,
    check_hidden,
    empty_hidden,
    encode_ops,
    finish,
    initialize_linear,
    initialize_lstm,
    initialize_output,
    memory_part,
    op_part,
    run_sequence,
    run_step,
    state_value,
    value_of_op,
)
from esper.tamiyo.policy.distribution import (
    FloorKind,
    check_choices,
    chosen_log_probs,
    entropy,
    masked_log_probs,
    must_check,
    probabilities,
)

Context = TypeVar("Context")
"""What the heads of a network read besides the output of the LSTM."""


class ActorCritic(nn.Module, ABC, Generic[Context]):
    """A recurrent factored policy with its critic.

    Args:
        config: the configuration of the network.
        table: the layout of its heads.

    A subclass creates the modules: every head as `<head>_head`, the critic by `make_value_head` and
    `make_op_encoder`, the LSTM, and the layers that encode the observation.
    """

    lstm: nn.LSTM
    lstm_ln: nn.LayerNorm
    """The normalisation of the LSTM's output, which all heads read."""
    op_head: nn.Sequential
    value_head: nn.Sequential
    """The critic."""
    op_encoder: nn.Sequential | None
    """Layers between the op and the critic."""
    floors: Tensor
    row_floors: Tensor

    def __init__(self, config: PolicyConfig, table: HeadTable) -> None:
        super().__init__()
        self.config, self.table = config, table
        floors = torch.tensor(config.floor.by_head(), dtype=torch.float32)
        self.register_buffer("floors", floors, persistent=False)
        self.register_buffer("row_floors", floors[table.row_heads], persistent=False)

    # ------------------------------------------------------------- what subclasses implement

    @abstractmethod
    def read(self, state: Tensor, blueprint_indices: Tensor) -> tuple[Tensor, Context]:
        """Return the input of the LSTM, [..., width], and the context of the heads.

        Args:
            state: observations, [..., features].
            blueprint_indices: int64 [..., S], -1 where a slot is empty.
        """

    @abstractmethod
    def every_logits(self, memory: Tensor, context: Context) -> Tensor:
        """Return the logits of every row of the `HeadTable`, side by side, [N, ...]."""

    @abstractmethod
    def taken_logits(self, memory: Tensor, context: Context, taken: Tensor) -> Tensor:
        """Return [T, B, 8, K]: the logits of every head under the op and the slot taken.

        Args:
            memory: normalised output of the LSTM, [T, B, width].
            context: of the same observations.
            taken: actions, int64 [T, B, 8].
        """

    def head(self, name: str) -> Any:
        """Return the layers of one head."""
        return getattr(self, f"{name}_head")

    def initialize(self, readers: Sequence[nn.Module], outputs: Iterable[nn.Sequential]) -> None:
        """Initialise all weights; `outputs` are the last layers of the heads."""
        config = self.config
        initialize_linear([*readers, *map(self.head, HEAD_NAMES), self.value_head])
        if self.op_encoder is not None:
            initialize_linear([self.op_encoder])
        initialize_lstm(self.lstm)
        for output in outputs:
            initialize_output(output, config.policy_gain)
        initialize_output(self.op_head, config.policy_gain, config.initial_op_bias)
        initialize_output(self.value_head, config.value_gain)

    def initial_hidden(self, rows: int) -> Hidden:
        """Return the LSTM state of rows at the start of an episode."""
        return empty_hidden(self.lstm, rows)

    # --------------------------------------------------------------------------------- sequences

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

        `score` explains the arguments; it returns the same in one tensor for all heads.
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
        check: bool = True,
    ) -> Scores:
        """Score whole episodes in one call.

        Args:
            states: [B, T, features].
            blueprint_indices: int64 [B, T, S].
            actions: {head: int64 [B, T]}, or int64 [B, T, 8].
            masks: the masks when the actions were taken: [B, T, 8, K] as in a `PolicyStep`, by
                head, or as the rules gave them.
            hidden: the LSTM state before the first step; zeros by default.
            sampled_op: the op whose value is returned; by default the op taken.
            explore: whether the distribution had floors.
            episode_starts: bool [B, T], the LSTM state is reset before these steps.
            with_baseline: also compute the baseline; otherwise it is a copy of the values.
            check: raise if a logit is not finite, provided that the configuration says so.
        """
        memory, context, hidden = self.remember(states, blueprint_indices, hidden, episode_starts)
        taken = self.table.pack(actions)
        legal = self.table.head_masks(masks, taken)
        logits = self.taken_logits(memory, context, taken.transpose(0, 1)).transpose(0, 1)
        log_probs = masked_log_probs(
            logits,
            legal,
            self.floors,
            floor_kind=self.floor_kind(explore),
            check=self.config.check and check,
            heads=HEAD_NAMES,
        )
        causal = self.table.causal[taken[..., OP]]
        own = torch.where(causal, chosen_log_probs(log_probs, taken), 0.0)
        op = taken[..., OP] if sampled_op is None else sampled_op
        if self.config.critic == "state":
            values = state_value(self.value_head, memory).t()
        else:
            values = value_of_op(self.value_head, self.op_encoder, memory, op.t()).t()
        expected = values
        if with_baseline and self.config.critic in ("op_marginal", "op_soft"):
            choices = log_probs[..., OP, : self.table.sizes["op"]]
            judged = self.judge(memory).transpose(0, 1)
            expected = self.baseline(judged, self.op_values(judged), choices, op)
        return Scores(
            values=values.float(),
            baseline=expected.float(),
            log_probs=own,
            entropies=entropy(logits, legal),
            logits=logits,
            masks=legal,
            hidden=hidden,
        )

    def remember(
        self,
        state: Tensor,
        blueprint_indices: Tensor,
        hidden: Hidden | None,
        episode_starts: Tensor | None,
    ) -> tuple[Tensor, Context, Hidden]:
        """Return the LSTM's normalised output [T, B, width], the context, and the state after.

        Args:
            state: [B, T, features].
            blueprint_indices: int64 [B, T, S].
            hidden: the LSTM state before the first step; zeros by default.
            episode_starts: bool [B, T], the LSTM state is reset before these steps.
        """
        if state.dim() != 3:
            raise UsageError(
                f"sequences of states must be [rows, steps, features], got {list(state.shape)}"
            )
        self.check_inputs(state, blueprint_indices)
        if hidden is not None:
            check_hidden(hidden, self.lstm, len(state))
        # The LSTM's kernels read one step of all rows after another. With this layout from the
        # start, no wide tensor has to be copied.
        features, context = self.read(state.transpose(0, 1), blueprint_indices.transpose(0, 1))
        outputs, hidden = run_sequence(self.lstm, features.transpose(0, 1), hidden, episode_starts)
        memory: Tensor = self.lstm_ln(outputs.transpose(0, 1))
        return memory, context, hidden

    # ------------------------------------------------------------------------------- the critic

    def judge(self, memory: Tensor) -> Tensor:
        """Return what the LSTM's output adds to the critic's first layer."""
        return memory_part(self.value_head, memory)

    def op_values(self, judged: Tensor) -> Tensor:
        """Return Q(s, op) for every op, [..., ops]; V(s) in every column for critic 'state'."""
        ops = self.table.sizes["op"]
        if self.config.critic == "state":
            return finish(self.value_head, judged).unsqueeze(-1).expand(*judged.shape[:-1], ops)
        every = torch.eye(ops, dtype=judged.dtype, device=judged.device)
        return finish(self.value_head, judged.unsqueeze(-2) + self._effects(every))

    def baseline(self, judged: Tensor, op_values: Tensor, log_probs: Tensor, op: Tensor) -> Tensor:
        """Return the value that returns are compared with; the policy gets no gradient from it.

        Args:
            judged: result of `judge`, [..., width / 2].
            op_values: result of `op_values`, [..., ops].
            log_probs: log-probabilities of the ops in the sampling distribution, [..., ops].
            op: the op sampled from it, int64 [...].
        """
        critic = self.config.critic
        if critic == "op_marginal":
            return (probabilities(log_probs.detach()) * op_values).sum(-1)
        if critic == "op_soft":
            shares = probabilities(log_probs.detach())
            return finish(self.value_head, judged + self._effects(shares))
        if critic == "op_sampled":
            return op_values.gather(-1, op.unsqueeze(-1)).squeeze(-1)
        return op_values[..., 0]

    def _effects(self, shares: Tensor) -> Tensor:
        """Return what ops, given as probabilities [..., ops], add to the critic's first layer."""
        return op_part(self.value_head, encode_ops(self.op_encoder, shares))

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
        """Decide one step: the op, the slot for that op, then the heads that the op uses.

        Args:
            state: [N, features], or [features] for a single row.
            mask: what is legal, in any form of `MaskSource`; by default everything.
            blueprint_indices: int64 [N, S], -1 where a slot is empty; by default all are.
            hidden: the LSTM state; zeros by default.
            deterministic: take the likeliest choices instead of drawing.
            explore: whether the distribution has floors.
            generator: source of the draws.
            uniforms: one draw from [0, 1) per row and head, [N, 8], in place of the generator.
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
        """Raise if a mask was empty or a logit was not finite."""
        if not must_check(self.config.check, logits):
            return
        if not bool(step.masks.any(-1).all() & torch.isfinite(logits.sum())):
            rows = self.table.rows_of(step.actions[..., OP], step.actions[..., SLOT])
            taken = self.table.select(self.table.row_logits(logits), rows)
            check_choices(taken, step.masks, HEAD_NAMES)

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
        """Decide one step without checks; this part can be captured in a CUDA graph.

        Args:
            state: [N, features].
            blueprint_indices: int64 [N, S].
            masks: bool [N, R, K], see `HeadTable.row_masks`.
            uniforms: [N, 8] from [0, 1); None takes the likeliest choices.
            hidden: the LSTM state.
            explore: whether the distribution has floors.

        Returns:
            The step, and the logits of `every_logits`.
        """
        logits, judged, hidden = self.respond(state, blueprint_indices, hidden)
        step = self.choose(logits, judged, hidden, masks, uniforms, explore=explore)
        return step, logits

    def respond(
        self, state: Tensor, blueprint_indices: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, Hidden]:
        """Return the results of `every_logits` and `judge`, and the LSTM state after the step."""
        features, context = self.read(state, blueprint_indices)
        memory, hidden = run_step(self.lstm, features, hidden)
        memory = self.lstm_ln(memory)
        return self.every_logits(memory, context), self.judge(memory), hidden

    def choose(
        self,
        logits: Tensor,
        judged: Tensor,
        hidden: Hidden,
        masks: Tensor,
        uniforms: Tensor | None,
        *,
        explore: bool = True,
    ) -> PolicyStep:
        """Return the decision from logits, masks and draws; see `decision.choose`."""
        op_values = self.op_values(judged)
        return choose(
            self.table,
            logits,
            op_values,
            hidden,
            masks,
            uniforms,
            self.row_floors,
            floor_kind=self.floor_kind(explore),
            expect=lambda log_probs, op: self.baseline(judged, op_values, log_probs, op),
        )

    def floor_kind(self, explore: bool) -> FloorKind:
        """Return how floors are enforced: not at all without exploration."""
        return self.config.floor.kind if explore else "off"

    def check_inputs(self, state: Tensor, blueprint_indices: Tensor) -> None:
        """Raise unless observations and blueprints have the right shapes."""
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
