"""The passes of one update over its round: score, step, and measure the change of the policy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.actions import HEAD_NAMES, LifecycleOp
from esper.leyline.errors import NonFiniteError
from esper.simic.agent.config import GROUP_NAMES, VALUE, PPOConfig
from esper.simic.agent.diagnostics import (
    FEEDBACK_ROWS,
    OP,
    describe_heads,
    describe_round,
    kl_of_steps,
    measure_feedback,
    measure_policy,
    to_floats,
)
from esper.simic.agent.losses import entropy_coefficient, not_yet, value_errors
from esper.simic.agent.objective import Objective, Scored, Targets
from esper.simic.agent.report import ClampCounter, NonFinite, UpdateReport, head_rows
from esper.simic.agent.rollout_buffer import RolloutBatch
from esper.tamiyo.controllers.policy_file import Policy
from esper.tamiyo.networks.decision import Scores
from esper.utils.process import gpu_memory_share, resident_bytes

KL_SLACK = 1.5
"""An update stops when its KL exceeds the target by this factor."""


class GradientNorms:
    """Measures and clips gradients, by parameter group."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Look up the group of every parameter."""
        self._parameters: list[nn.Parameter] = []
        owners: list[int] = []
        for index, group in enumerate(optimizer.param_groups):
            self._parameters += group["params"]
            owners += [index] * len(group["params"])
        self._owners = torch.tensor(owners, device=self._parameters[0].device)

    def clip(self, longest: float) -> Tensor:
        """Clip the total norm; return the norms before, float32 [groups + 1], the total last.

        A gradient that is not finite is left as it is.
        """
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        assert len(gradients) == len(self._parameters), "every parameter takes part in the loss"
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        by_group = squares.new_zeros(len(GROUP_NAMES)).index_add_(0, self._owners, squares)
        total = by_group.sum().sqrt()
        torch._foreach_mul_(gradients, (longest / (total + 1e-6)).clamp(max=1.0))
        return torch.cat([by_group.sqrt(), total.unsqueeze(0)])


@dataclass(slots=True)
class _Epoch:
    """One pass: its start, and the gradient norms of its steps."""

    ordinal: int
    started: float = field(default_factory=time.perf_counter)
    norms: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0


class Passes:
    """One update while it runs.

    Args:
        policy: the policy that learns.
        optimizer: its optimizer.
        config: settings of the learner.
        batch: the round.
        targets: learning targets of the round.
        progress: share of the training that is done.
        paid_off: [R], running share of the episodes of a row's task that pay off.
        op_reference: logits that the op stays close to, as in `curiosity`.
        anchor: [R, T, 8, K], logits of the policy that training started from; None without one.
        imitate: returns the imitation loss of one of several parts of a pass.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        config: PPOConfig,
        batch: RolloutBatch,
        targets: Targets,
        *,
        progress: float,
        paid_off: Tensor,
        op_reference: Tensor,
        anchor: Tensor | None,
        imitate: Callable[[int, int], Tensor],
    ) -> None:
        """Prepare the objective; `run` scores and steps."""
        self._policy, self._network, self._config = policy, policy.network, config
        self._optimizer, self._norms = optimizer, GradientNorms(optimizer)
        self._batch, self._targets = batch, targets
        self._progress, self._paid_off = progress, paid_off
        self._reference, self._anchor, self._imitate = op_reference, anchor, imitate
        self._device = batch.values.device
        self._objective = Objective(config, progress, targets.shares)
        self._count = min(config.minibatches, batch.rows)
        self._usable = batch.usable
        self._latest = Scored.empty(batch.values, len(HEAD_NAMES))
        self._old = torch.zeros_like(self._latest.log_probs)
        self._feedback: float | None = None
        self._updates: list[dict[str, Any]] = []
        self._heads: list[dict[str, Any]] = []
        self._steps = 0
        self._stopped = False
        self.nonfinite: list[NonFinite] = []

    def run(self, order: torch.Generator) -> None:
        """Make up to K passes; with minibatches, rows are shuffled by `order`."""
        parts = self._split(order)
        if self._count > 1 and not self._score_reference(parts):
            return
        finished: _Epoch | None = None
        for ordinal in range(self._config.epochs):
            epoch = _Epoch(ordinal)
            seen: list[Tensor] = []
            for part, rows in enumerate(parts):
                if not self._learn(rows, epoch, part):
                    break
                if rows is not None:
                    seen.append(rows)
            epoch.seconds = time.perf_counter() - epoch.started
            if self.nonfinite:
                self._latest.forget()
            if finished is not None and (epoch.norms or self._count == 1):
                # The forward passes just made measure the pass before them.
                self._record(finished, torch.cat(seen) if seen else None)
                finished = None
            if epoch.norms:
                finished = epoch
            if self._stopped or self.nonfinite:
                break
            parts = self._split(order)
        if finished is not None:
            self._measure_last(parts, finished)

    # ------------------------------------------------------------------------------ one minibatch

    def _split(self, order: torch.Generator) -> list[Tensor | None]:
        """Return the rows of every minibatch; None stands for all rows in order."""
        if self._count == 1:
            return [None]
        shuffled = torch.randperm(self._batch.rows, generator=order).to(self._device)
        return list(shuffled.tensor_split(self._count))

    def _learn(self, rows: Tensor | None, epoch: _Epoch, part: int) -> bool:
        """Take one optimizer step on some rows, one part of a pass; return whether it was taken."""
        scores = self._score(rows, epoch.ordinal, "log_prob")
        if scores is None:
            return False
        is_first = self._count == 1 and epoch.ordinal == 0
        if is_first:
            # The weights are those that the update starts from, so the first pass is the reference.
            self._old.copy_(scores.log_probs.detach())
            self._measure_feedback(rows, scores)
        scored = self._scored(scores, rows)
        targets = self._targets if rows is None else self._targets.rows(rows)
        old = _rows(self._old, rows)
        share = 1.0 if rows is None else len(rows) / self._batch.rows
        losses = self._objective(scored, old, targets, share)
        loss = losses.total + self._imitate(part, self._count)
        self._latest.write(rows, scored)
        kl = self._kl(scored.log_probs.detach() - old, _rows(self._usable, rows))
        moved, total = torch.stack([kl, loss.detach()]).tolist()
        if not (math.isfinite(moved) and math.isfinite(total)):
            self._diagnose(scored, epoch.ordinal)
            return False
        if 0 < self._config.target_kl * KL_SLACK < moved:
            self._stopped = True
            return False
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norms = self._norms.clip(self._config.max_grad_norm)
        if not bool(torch.isfinite(norms[-1])):
            heads = [
                name
                for name, norm in zip(GROUP_NAMES, norms.tolist(), strict=False)
                if not math.isfinite(norm)
            ]
            self.nonfinite.append(NonFinite(epoch.ordinal, "gradient", tuple(heads)))
            return False
        self._optimizer.step()
        self._steps += 1
        epoch.norms.append(norms)
        return True

    def _score(self, rows: Tensor | None, epoch: int, kind: str) -> Scores | None:
        """Return the scores of some rows; None if a logit is not finite, which is recorded."""
        batch = self._batch
        states, blueprints = _rows(batch.states, rows), _rows(batch.blueprint_indices, rows)
        actions, masks = _rows(batch.actions, rows), _rows(batch.masks, rows)
        precision = torch.autocast(
            states.device.type, torch.bfloat16, enabled=self._config.use_bf16
        )
        try:
            with precision:
                return self._network.score(states, blueprints, actions, masks, with_baseline=False)
        except NonFiniteError:
            with torch.no_grad(), precision:
                out = self._network.score(
                    states, blueprints, actions, masks, with_baseline=False, check=False
                )
            logits = out.logits.unbind(-2)
            heads = [
                head for head, own in zip(HEAD_NAMES, logits, strict=True) if not _all_finite(own)
            ]
            self.nonfinite.append(NonFinite(epoch, kind, tuple(heads)))
            if not _all_finite(out.values):
                self.nonfinite.append(NonFinite(epoch, "value"))
            return None

    def _scored(self, scores: Scores, rows: Tensor | None) -> Scored:
        anchor = None if self._anchor is None else _rows(self._anchor, rows)
        masks = _rows(self._batch.base_masks, rows)
        return Scored.of(scores, masks, self._reference, anchor)

    def _diagnose(self, scored: Scored, epoch: int) -> None:
        """Record which values of a minibatch are not finite."""
        found = {"log_prob": scored.log_probs, "entropy": scored.entropies}
        for kind, tensor in found.items():
            finite = torch.isfinite(tensor).flatten(0, -2).all(0).tolist()
            heads = [head for head, fine in zip(HEAD_NAMES, finite, strict=True) if not fine]
            if heads:
                self.nonfinite.append(NonFinite(epoch, kind, tuple(heads)))
        if not _all_finite(scored.values):
            self.nonfinite.append(NonFinite(epoch, "value"))
        if not self.nonfinite:
            self.nonfinite.append(NonFinite(epoch, "loss"))

    def _kl(self, log_ratios: Tensor, usable: Tensor) -> Tensor:
        steps = kl_of_steps(log_ratios).sum(-1)
        return torch.where(usable, steps, 0.0).sum() / usable.sum().clamp(min=1)

    # ---------------------------------------------------------------------------------- measuring

    @torch.no_grad()
    def _score_reference(self, parts: list[Tensor | None]) -> bool:
        """Score the reference log-probabilities of the ratios; return whether all are finite."""
        for index, rows in enumerate(parts):
            scores = self._score(rows, 0, "old_log_prob")
            if scores is None:
                return False
            self._old[rows] = scores.log_probs
            if index == 0:
                self._measure_feedback(rows, scores)
        return True

    def _measure_feedback(self, rows: Tensor | None, scores: Scores) -> None:
        rows = torch.arange(self._batch.rows, device=self._old.device) if rows is None else rows
        some = self._batch.select(rows[:FEEDBACK_ROWS])
        ops = self._network.config.head_sizes["op"]
        logits = scores.logits[:FEEDBACK_ROWS, :, OP, :ops].detach()
        self._feedback = measure_feedback(self._network, some, logits)

    @torch.no_grad()
    def _measure_last(self, parts: list[Tensor | None], epoch: _Epoch) -> None:
        """Score the round once more after the last step, and record the change."""
        for rows in parts:
            scores = self._score(rows, epoch.ordinal, "log_prob")
            if scores is None:
                self._latest.forget()
                break
            self._latest.write(rows, self._scored(scores, rows))
        self._record(epoch, None)

    @torch.no_grad()
    def _record(self, epoch: _Epoch, rows: Tensor | None) -> None:
        """Write down one pass as it shows on the latest scores of these rows, or of all."""
        batch = self._batch if rows is None else self._batch.select(rows)
        targets = self._targets if rows is None else self._targets.rows(rows)
        latest = self._latest if rows is None else self._latest.select(rows)
        old = _rows(self._old, rows)
        share = 1.0 if rows is None else len(rows) / self._batch.rows
        losses = self._objective(latest, old, targets, share)
        joint, by_head = measure_policy(
            batch,
            targets,
            old_log_probs=old,
            log_probs=latest.log_probs,
            entropies=latest.entropies,
            own_entropies=latest.own_entropies,
            clip=self._config.clip,
        )
        norms = torch.stack(epoch.norms).mean(0)
        parts = norms[:-1]
        scalars = {
            "policy_loss": losses.policy,
            "value_loss": losses.value,
            "floor_penalty": losses.penalty,
            "exploration_kl": losses.exploration.mean(),
            "total_loss": losses.total,
            "grad_norm": norms[-1],
            "value_grad_norm": norms[GROUP_NAMES.index(VALUE)],
            "grad_cv": parts.std(correction=0) / parts.mean().clamp(min=1e-12),
        }
        errors = value_errors(
            latest.values, targets.value_targets, targets.old_values, self._config.value_clip
        )
        self._updates.append(
            {
                "ordinal": epoch.ordinal,
                **to_floats(scalars),
                **joint,
                "value_loss_by_op": _mean_by_op(errors, batch),
                "seconds": epoch.seconds,
            }
        )
        count = len(HEAD_NAMES)
        is_joint = self._config.ratio == "joint"
        by_head["loss"] = [
            None
            if is_joint
            else float(self._objective.policy_loss(latest, old, targets, share, [head]))
            for head in HEAD_NAMES
        ]
        by_head["grad_norm"] = norms[:count].tolist()
        by_head["floor_penalty"] = [
            float(self._objective.floor_penalty(latest, targets, [head])) for head in HEAD_NAMES
        ]
        by_head["exploration_kl"] = losses.exploration.tolist()
        self._heads += head_rows(epoch.ordinal, by_head)

    # ------------------------------------------------------------------------------------- report

    def _clamp_share(self) -> float:
        """Return the share of the round's observations at their clamps."""
        counter = ClampCounter(self._policy.layout, self._device)
        batch = self._batch
        counter.count(
            batch.raw_states.flatten(0, 1), batch.states.flatten(0, 1), batch.valid.flatten()
        )
        return counter.share

    @torch.no_grad()
    def report(self, scale: Tensor) -> UpdateReport:
        """Return the report of the update; `scale` is that of the critic during the rollout."""
        config = self._config
        shared = {
            **describe_round(
                self._batch,
                self._targets,
                scale,
                sees_op=self._network.config.critic != "state",
            ),
            "learning_rate": config.learning_rate_at(self._progress),
            "entropy_coef": entropy_coefficient(config, self._progress),
            "op_entropy_coef": config.exploration.op_curiosity
            * float(not_yet(self._paid_off).mean()),
            "paid_off_rolling": float(self._paid_off.mean()),
            "feedback_dependence": self._feedback,
            "obs_clamp_share": self._clamp_share(),
            "nonfinite": len(self.nonfinite),
            "was_skipped": bool(self.nonfinite),
            "memory_bytes": resident_bytes(),
            "gpu_memory_share": gpu_memory_share(self._device),
            "time": time.time(),
        }
        updates = self._updates or [{"ordinal": 0}]
        last = len(updates) - 1
        rows = [
            {
                **shared,
                **row,
                "is_last": index == last,
                "stopped_early": self._stopped and index == last,
            }
            for index, row in enumerate(updates)
        ]
        usage = describe_heads(self._batch, self._targets, self._network.config.head_sizes)
        described = head_rows(0, usage)
        heads = self._heads or head_rows(0, {})
        by_name = {row["head"]: row for row in described}
        return UpdateReport(
            updates=[_known(row) for row in rows],
            heads=[_known({**by_name[row["head"]], **row}) for row in heads],
            nonfinite=self.nonfinite,
            steps=self._steps,
        )


def _rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor[rows]


def _known(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns with None for values that are not finite."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in columns.items()
    }


def _all_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _mean_by_op(errors: Tensor, batch: RolloutBatch) -> dict[str, float]:
    """Return the mean error of decisions, by op."""
    ops, valid = batch.op.flatten(), batch.valid.flatten().to(errors.dtype)
    total = errors.new_zeros(len(LifecycleOp)).index_add_(0, ops, errors.flatten() * valid)
    count = errors.new_zeros(len(LifecycleOp)).index_add_(0, ops, valid)
    means = (total / count.clamp(min=1)).tolist()
    return {
        op.name: mean
        for op, mean, taken in zip(LifecycleOp, means, count.tolist(), strict=True)
        if taken
    }
