"""TamiyoRolloutBuffer: the decisions, rewards and values of a round, one row per episode.

All tensors are allocated once, [rows, steps, ...], on one device. A step is written in two halves:
`add_decision` when the policy has decided, `add_outcome` when the population has trained the epoch.
A row whose episode is over is padded: one legal placeholder per head, a reward of 0, and `valid` is
False. `docs/decisions` number 0008 explains what is learned from which step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.actions import HEAD_NAMES, NUM_OPS, PLACEHOLDERS, TensorRecord
from esper.leyline.errors import CheckpointError, UsageError
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.decision import PolicyStep
from esper.tamiyo.networks.layers import Hidden
from esper.tamiyo.policy.action_masks import causal_heads

# ---- Advantages, of steps and of heads


STD_FLOOR = 0.1
"""Least standard deviation that advantages are divided by: below it, noise would be amplified."""


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float | Tensor,
    gae_lambda: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and the returns they imply, both [..., T].

    Args:
        rewards: [..., T].
        values: [..., T], the baseline of the state before the step.
        next_values: [..., T], the baseline of the state after it: the next step's, or the
            bootstrap where the rollout was truncated. It is not read where the episode terminated.
        terminated: bool [..., T], the episode ended; nothing follows.
        truncated: bool [..., T], the rollout was cut; `next_values` is the value of what follows,
            and the next entry belongs to another episode.
        gamma: discount of one step; a tensor [..., T] if steps differ in length.
        gae_lambda: 0 is one step with the critic, 1 Monte Carlo; a tensor [..., T] if it differs
            from step to step.
    """
    shape = tuple(rewards.shape)
    given = {"values": values, "next_values": next_values}
    for name, tensor in {**given, "terminated": terminated, "truncated": truncated}.items():
        if tuple(tensor.shape) != shape:
            raise UsageError(
                f"{name} must have the shape of the rewards, {list(shape)}, "
                f"got {list(tensor.shape)}"
            )
    # Where the episode terminated the stored value may be anything, and 0 times NaN is NaN.
    following = torch.where(terminated, 0.0, gamma * next_values)
    errors = (rewards + following - values).unbind(-1)
    ends = (terminated | truncated).unbind(-1)
    decay = torch.as_tensor(gamma * gae_lambda, dtype=rewards.dtype, device=rewards.device)
    factors = decay.expand(shape).unbind(-1)
    advantages: list[Tensor] = []
    later = torch.zeros_like(rewards[..., 0])
    for error, end, factor in zip(errors[::-1], ends[::-1], factors[::-1], strict=True):
        later = torch.where(end, error, torch.addcmul(error, factor, later))
        advantages.append(later)
    stacked = torch.stack(advantages[::-1], dim=-1)
    return stacked, stacked + values


def decision_lambda(free: Tensor, gae_lambda: float) -> Tensor:
    """Return the lambda [..., T] with which GAE skips steps without a choice.

    With a lambda of 1 before such a step, the critic's value there cancels out. The result is GAE
    from decision to decision: over the rewards in between, discounted by gamma to the power of the
    steps that passed.

    Args:
        free: bool [..., T], steps with more than one legal op.
        gae_lambda: of one decision.
    """
    decides_next = F.pad(free[..., 1:], (0, 1), value=True)
    return torch.where(decides_next, gae_lambda, 1.0)


def compute_per_head_advantages(
    advantages: Tensor, ops: Tensor, free: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the advantages of every head, exactly 0 at steps that do not use it.

    Args:
        advantages: [...].
        ops: int64 [...], the op that was taken.
        free: bool [...], steps with more than one legal op; all of them by default.
    """
    counts = causal_heads(ops)
    if free is not None:
        counts = counts & free.unsqueeze(-1)
    per_head = torch.where(counts, advantages.unsqueeze(-1), 0.0)
    return dict(zip(HEAD_NAMES, per_head.unbind(-1), strict=True))


def normalize_advantages(
    advantages: Tensor,
    valid: Tensor,
    floor: float = STD_FLOOR,
    groups: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return advantages with mean 0 and deviation 1 over the valid steps, and 0 elsewhere.

    Args:
        advantages: [R, ...].
        valid: bool [R, ...], the steps that enter the statistics.
        floor: least deviation to divide by.
        groups: int64 [R], the group of every row, from 0; one group by default. Each group is
            divided by its own deviation, so that none dominates. All are centred together, because
            the mean of a few rows would remove what they have in common.

    Returns:
        The normalised advantages, mean and population deviation of the raw ones, and whether that
        deviation was below the floor; the last three are scalars.
    """
    everything = torch.zeros(len(advantages), dtype=torch.int64, device=advantages.device)
    mean, std = (each[0] for each in _group_moments(advantages, valid, everything))
    groups = everything if groups is None else groups
    _, own = _group_moments(advantages, valid, groups)
    even = advantages / _like(own.clamp(min=floor)[groups], advantages)
    centre = torch.where(valid, even, 0.0).sum() / valid.sum().clamp(min=1)
    return torch.where(valid, even - centre, 0.0), mean, std, std < floor


def _group_moments(values: Tensor, valid: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and population deviation of the valid values [R, ...] of every group."""
    number = int(groups.max()) + 1

    def add(each: Tensor) -> Tensor:
        by_row = torch.where(valid, each, 0.0).reshape(len(each), -1).sum(1)
        return values.new_zeros(number).index_add_(0, groups, by_row)

    count = add(torch.ones_like(values)).clamp(min=1)
    mean = add(values) / count
    return mean, (add((values - _like(mean[groups], values)).square()) / count).sqrt()


def _like(rows: Tensor, tensor: Tensor) -> Tensor:
    """Return values [R] for every entry of a tensor [R, ...]."""
    return rows.view(-1, *[1] * (tensor.dim() - 1))


NUM_HEADS = len(HEAD_NAMES)


@dataclass(frozen=True, slots=True)
class RolloutBatch(TensorRecord):
    """The steps of R rows so far, [R, T, ...]; views of the buffer."""

    raw_states: Tensor
    """float32 [R, T, D], observations before standardisation."""
    states: Tensor
    """float32 [R, T, D], standardised observations."""
    blueprint_indices: Tensor
    """int64 [R, T, S]."""
    hidden_state: Tensor
    """float32 [R, T, layers, width], hidden state of the LSTM before the step."""
    hidden_cell: Tensor
    """float32 [R, T, layers, width], its cell state."""
    actions: Tensor
    """int64 [R, T, 8], in the order of `HEAD_NAMES`."""
    effective_op: Tensor
    """int64 [R, T], the op that took effect: WAIT where it was refused."""
    log_probs: Tensor
    """float32 [R, T, 8], exactly 0 in heads the op did not use."""
    values: Tensor
    """float32 [R, T], the baseline, in the network's scale."""
    op_values: Tensor
    """float32 [R, T, ops], Q(s, op), in the network's scale."""
    masks: Tensor
    """bool [R, T, 8, K], masks that each head was drawn with."""
    base_masks: Tensor
    """bool [R, T, 8, K], masks of each head before any other head was chosen."""
    available: Tensor
    """bool [R, T, 8], heads that some legal op would use."""
    free: Tensor
    """bool [R, T], more than one op was legal."""
    valid: Tensor
    """bool [R, T], the episode was running; other steps are padding."""
    rewards: Tensor
    """float32 [R, T], raw: their unit is known after the round."""
    potentials: Tensor
    """float32 [R, T], raw: the reward's potential before the step, see `RewardStep`."""
    terminated: Tensor
    """bool [R, T], the episode ended with this step."""
    truncated: Tensor
    """bool [R, T], the rollout was truncated after this step."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.values.shape[0]

    @property
    def op(self) -> Tensor:
        """int64 [R, T], the op that was asked for."""
        return self.actions[..., HEAD_NAMES.index("op")]

    @property
    def usable(self) -> Tensor:
        """Bool [R, T], valid and free: the steps that the actor learns from."""
        return self.valid & self.free


class TamiyoRolloutBuffer:
    """Holds one round of R episodes of up to T decisions.

    Args:
        rows: number of parallel episodes.
        steps: most decisions of an episode.
        network_config: configuration of the policy.
        device: device of the tensors.
    """

    def __init__(
        self,
        rows: int,
        steps: int,
        network_config: PolicyConfig,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate all tensors; they are padding until a step is written."""
        if rows < 1 or steps < 1:
            raise UsageError(f"a buffer needs at least 1 row and 1 step, got {rows} and {steps}")
        self.rows, self.steps = rows, steps
        self.device = torch.device(device)
        config = network_config
        sizes = config.head_sizes
        self._width = max(sizes.values())
        shape = (rows, steps)
        memory = (*shape, config.lstm_layers, config.lstm_hidden_dim)
        observation = (*shape, config.observation_dim)
        choices = (*shape, NUM_HEADS, self._width)

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self._placeholder = torch.tensor(
            [int(PLACEHOLDERS[head]) for head in HEAD_NAMES], device=self.device
        )
        columns = torch.arange(self._width, device=self.device)
        self._lone_mask = columns == self._placeholder[:, None]
        self._all = RolloutBatch(
            raw_states=zeros(*observation),
            states=zeros(*observation),
            blueprint_indices=zeros(*shape, config.num_slots, dtype=torch.int64),
            hidden_state=zeros(*memory),
            hidden_cell=zeros(*memory),
            actions=zeros(*shape, NUM_HEADS, dtype=torch.int64),
            effective_op=zeros(*shape, dtype=torch.int64),
            log_probs=zeros(*shape, NUM_HEADS),
            values=zeros(*shape),
            op_values=zeros(*shape, NUM_OPS),
            masks=zeros(*choices, dtype=torch.bool),
            base_masks=zeros(*choices, dtype=torch.bool),
            available=zeros(*shape, NUM_HEADS, dtype=torch.bool),
            free=zeros(*shape, dtype=torch.bool),
            valid=zeros(*shape, dtype=torch.bool),
            rewards=zeros(*shape),
            potentials=zeros(*shape),
            terminated=zeros(*shape, dtype=torch.bool),
            truncated=zeros(*shape, dtype=torch.bool),
        )
        self.bootstrap = zeros(rows)
        """float32 [R], value of the state after a truncated last step, in the network's scale."""
        self.last_potential = zeros(rows)
        """float32 [R], raw: the potential of that state."""
        self.start()

    def start(self) -> None:
        """Clear the buffer for a new round."""
        self.cursor = 0
        """Number of complete steps."""
        self._is_open = False
        every = self._all
        for tensor in every.state_dict().values():
            tensor.zero_()
        every.blueprint_indices.fill_(-1)
        every.actions.copy_(self._placeholder.expand_as(every.actions))
        every.masks.copy_(self._lone_mask.expand_as(every.masks))
        every.base_masks.copy_(self._lone_mask.expand_as(every.base_masks))
        self.bootstrap.zero_()
        self.last_potential.zero_()

    @torch.no_grad()
    def add_decision(
        self,
        *,
        raw_state: Tensor,
        state: Tensor,
        blueprint_indices: Tensor,
        hidden: Hidden,
        step: PolicyStep,
        base_masks: Tensor,
        available: Tensor,
        free: Tensor,
        active: Tensor,
        potential: Tensor | None = None,
    ) -> None:
        """Write observation and decision; `add_outcome` completes the step.

        Args:
            raw_state: [R, D], the observation before standardisation.
            state: [R, D], the standardised observation.
            blueprint_indices: int64 [R, S].
            hidden: state of the LSTM before the step.
            step: the decision; it is copied, so a captured step may be passed.
            base_masks: bool [R, 8, K], masks of each head before any other head is chosen.
            available: bool [R, 8], see `action_masks.available_heads`.
            free: bool [R], more than one op is legal.
            active: bool [R], the row's episode is still running.
            potential: float32 [R], raw, see `RewardStep.potential`; 0 without one.

        Raises:
            UsageError: The buffer is full, or the previous step has no outcome yet.
        """
        if self._is_open:
            raise UsageError("the step before has no outcome yet; call add_outcome first")
        if self.cursor >= self.steps:
            raise UsageError(f"the buffer holds {self.steps} steps and is full; call start()")
        missing = self._width - base_masks.shape[-1]
        if missing > 0:
            base_masks = F.pad(base_masks, (0, missing))
        written = {
            "raw_states": raw_state,
            "states": state,
            "blueprint_indices": blueprint_indices,
            # The LSTM's state has layers first; here rows come first.
            "hidden_state": hidden[0].transpose(0, 1),
            "hidden_cell": hidden[1].transpose(0, 1),
            "actions": step.actions,
            "log_probs": step.log_probs,
            "values": step.value,
            "op_values": step.op_values,
            "masks": step.masks,
            "base_masks": base_masks,
            "available": available,
            "free": free,
        }
        if potential is not None:
            written["potentials"] = potential
        for name, tensor in written.items():
            place = getattr(self._all, name)[:, self.cursor]
            if tuple(tensor.shape) != tuple(place.shape):
                raise UsageError(
                    f"{name} of a decision must be {list(place.shape)}, got {list(tensor.shape)}"
                )
            running = active.view(-1, *[1] * (tensor.dim() - 1))
            # Rows that are not active keep the padding.
            torch.where(running, tensor.to(place.dtype), place, out=place)
        self._all.valid[:, self.cursor] = active
        self._is_open = True

    @torch.no_grad()
    def add_outcome(
        self, *, reward: Tensor, effective_op: Tensor, terminated: Tensor, truncated: Tensor
    ) -> None:
        """Write the outcome of the decision and complete the step.

        Args:
            reward: float32 [R], raw.
            effective_op: int64 [R], the op that took effect.
            terminated: bool [R], the episode ended; it takes precedence over `truncated`.
            truncated: bool [R], the rollout is truncated here; then call `set_bootstrap`.

        Raises:
            UsageError: There is no open decision.
        """
        if not self._is_open:
            raise UsageError("there is no decision to complete; call add_decision first")
        every, at = self._all, self.cursor
        active = every.valid[:, at]
        every.rewards[:, at] = torch.where(active, reward.to(torch.float32), 0.0)
        every.effective_op[:, at] = torch.where(active, effective_op, 0)
        every.terminated[:, at] = active & terminated
        every.truncated[:, at] = active & truncated & ~terminated
        self._is_open = False
        self.cursor += 1

    def set_bootstrap(self, rows: Tensor, values: Tensor, potentials: Tensor | None = None) -> None:
        """Set the value of the state after a truncated last step.

        Args:
            rows: int64 [N], or bool [R] with N of them True.
            values: float32 [N], in the network's scale.
            potentials: float32 [N], raw, of these states; 0 without them.
        """
        self.bootstrap[rows] = values.detach().to(self.bootstrap)
        if potentials is not None:
            self.last_potential[rows] = potentials.detach().to(self.last_potential)

    def batch(self) -> RolloutBatch:
        """Return views of the complete steps."""
        return self._all.map(lambda tensor: tensor[:, : self.cursor])

    def next_values(self) -> Tensor:
        """Return [R, T]: the baseline after each step, in the network's scale.

        It is the value of the next step, the bootstrap where a row was truncated, and 0 where it
        terminated or is padding.

        Raises:
            UsageError: A row has steps but neither terminated nor was truncated.
        """
        batch = self.batch()
        ends = batch.terminated | batch.truncated
        unfinished = batch.valid.any(1) & ~ends.any(1)
        if bool(unfinished.any()):
            row = int(unfinished.nonzero()[0])
            raise UsageError(
                f"row {row} neither terminated nor was truncated within {self.cursor} steps; "
                "end it, or truncate it and set its bootstrap"
            )
        return _following(batch, batch.values, self.bootstrap)

    def next_potentials(self) -> Tensor:
        """Return [R, T]: the potential after each step, raw; 0 where `next_values` is."""
        batch = self.batch()
        return _following(batch, batch.potentials, self.last_potential)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete steps, also in the middle of an episode."""
        if self._is_open:
            raise UsageError("a step is half written; call add_outcome before saving")
        return {
            "rows": self.rows,
            "steps": self.steps,
            "cursor": self.cursor,
            "bootstrap": self.bootstrap.clone(),
            "last_potential": self.last_potential.clone(),
            "tensors": self.batch().map(Tensor.clone).state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: It was saved by a buffer of another shape.
        """
        if (state["rows"], state["steps"]) != (self.rows, self.steps):
            raise CheckpointError(
                f"the saved buffer has {state['rows']} rows of {state['steps']} steps, this one "
                f"{self.rows} of {self.steps}; resume with the same rows and episode length"
            )
        self.start()
        self.cursor = int(state["cursor"])
        for name, place in self.batch().state_dict().items():
            saved = state["tensors"][name]
            if tuple(place.shape) != tuple(saved.shape):
                raise CheckpointError(
                    f"the saved buffer holds {name} as {list(saved.shape)}, this one as "
                    f"{list(place.shape)}; resume with the same policy"
                )
            place.copy_(saved)
        self.bootstrap.copy_(state["bootstrap"])
        self.last_potential.copy_(state["last_potential"])


def _following(batch: RolloutBatch, values: Tensor, last: Tensor) -> Tensor:
    """Return the values [R, T] of the next steps: `last` [R] after a truncation, 0 at an end."""
    following = F.pad(values[:, 1:], (0, 1))
    following = torch.where(batch.truncated, last[:, None], following)
    return torch.where(batch.terminated | ~batch.valid, 0.0, following)
