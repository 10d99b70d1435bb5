"""The loss of an update: surrogate, critic, entropy bonus, entropy floors and exploration.

The same function gives what is minimised and, on the numbers after a step, what is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.simic.agent.config import PPOConfig
from esper.simic.agent.exploration import curiosity, floor_penalties, penalty_schedule
from esper.simic.agent.losses import surrogate_losses, value_errors
from esper.simic.agent.targets import Targets
from esper.tamiyo.networks.records import Scores
from esper.tamiyo.policy.distribution import entropy, exploration_kl


@dataclass(frozen=True, slots=True)
class Scored:
    """What the policy says of some rows; tensors [r, T, 8], values [r, T]."""

    log_probs: Tensor
    """Of the choices taken; exactly 0 in heads the op did not use."""
    values: Tensor
    """Q(s, taken op)."""
    entropies: Tensor
    """Over the base masks."""
    own_entropies: Tensor
    """Over the masks each head was drawn by."""
    exploration: Tensor
    """KL(uniform, policy) over the base masks."""
    curiosity: Tensor
    """[r, T], closeness of the op to its reference."""

    @classmethod
    def of(cls, scores: Scores, base_masks: Tensor, reference: Tensor) -> Scored:
        """Return what the losses need of a scored sequence; `reference` as in `curiosity`."""
        return cls(
            log_probs=scores.log_probs,
            values=scores.values,
            entropies=entropy(scores.logits, base_masks),
            own_entropies=scores.entropies.detach(),
            exploration=exploration_kl(scores.logits, base_masks),
            curiosity=curiosity(scores.logits, base_masks, reference),
        )

    @classmethod
    def empty(cls, values: Tensor, heads: int) -> Scored:
        """Return room for the scores of all rows, like values [R, T]."""
        by_head = (*values.shape, heads)
        return cls(
            log_probs=values.new_zeros(by_head),
            values=torch.zeros_like(values),
            entropies=values.new_zeros(by_head),
            own_entropies=values.new_zeros(by_head),
            exploration=values.new_zeros(by_head),
            curiosity=torch.zeros_like(values),
        )

    def write(self, rows: Tensor | None, scored: Scored) -> None:
        """Take over the scores of these rows, or of all of them."""
        for field in fields(self):
            place, new = getattr(self, field.name), getattr(scored, field.name).detach()
            if rows is None:
                place.copy_(new)
            else:
                place[rows] = new

    def forget(self) -> None:
        """Mark everything as not measured."""
        for field in fields(self):
            getattr(self, field.name).fill_(torch.nan)

    def rows(self, rows: Tensor) -> Scored:
        """Return some rows."""
        return Scored(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Losses:
    """The parts of the loss."""

    policy: Tensor
    """By head [8], or [1] for joint ratios."""
    value: Tensor
    bonus: Tensor
    """Entropies and curiosity times their weights; it is subtracted."""
    penalties: Tensor
    """By head [8]."""
    exploration: Tensor
    """Mean KL by head [8], without its coefficients."""
    total: Tensor


class Objective:
    """The loss with the coefficients of one update.

    Args:
        config: the learner's constants.
        progress: share of the training that is done.
        device: where the tensors are.
    """

    def __init__(self, config: PPOConfig, progress: float, device: torch.device) -> None:
        """Look up what depends on progress."""
        self._config = config
        self._floors = torch.tensor(config.entropy_floor.by_head(), device=device)
        penalties = torch.tensor(config.entropy_floor_penalty.by_head(), device=device)
        self._penalties = penalties * penalty_schedule(progress)

    def __call__(
        self, scored: Scored, old_log_probs: Tensor, targets: Targets, share: float = 1.0
    ) -> Losses:
        """Return the parts of the loss on some rows.

        Args:
            scored: what the policy says of them.
            old_log_probs: [r, T, 8], at the weights the update started from.
            targets: what they teach; its weights are those of the whole round.
            share: these rows' part of the round, so that any part has a loss of the same size.
        """
        config = self._config
        policy = surrogate_losses(
            scored.log_probs - old_log_probs,
            targets.advantages,
            targets.actor_weights / share,
            config.clip,
            joint=config.ratio == "joint",
        )
        errors = value_errors(
            scored.values, targets.value_targets, targets.old_values, config.value_clip
        )
        value = (errors * targets.value_weights).sum() / share
        bonus = (scored.entropies * targets.entropy_weights).sum()
        bonus = (bonus + (scored.curiosity * targets.curiosity_weights).sum()) / share
        penalties = floor_penalties(
            scored.entropies, targets.floor_counts, self._floors, self._penalties
        )
        explored = (scored.exploration * targets.exploration_weights).flatten(0, -2).sum(0) / share
        total = (
            policy.sum()
            + config.value_coef * value
            - bonus
            + penalties.sum()
            + (targets.exploration_coefficients * explored).sum()
        )
        return Losses(policy, value, bonus, penalties, explored, total)
