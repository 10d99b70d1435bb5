"""How fast the policy acts and learns, against a reference in the same run.

`PolicyWork` is the policy as it is used: a rollout step from packed weights or a CUDA graph, and
the forward and backward pass of one update over whole episodes. What it is compared with does the
same two things: `PlainWork` step by step with the same network, `RecurrentPPOWork` by sb3-contrib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.lab.bench import Comparison, compare, take_turns
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig
from esper.tamiyo.networks.decision import Scores
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.policy_step import CapturedPolicyStep, rollout_step
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.policy.reference import plain_reports

Situation = tuple[Signals, Masks]
"""What all rows see at one step."""

_STEPS_TOGETHER = 40
"""Rollout steps timed together: one alone is too short for the clock."""
_CLIP, _VALUE_WEIGHT, _ENTROPY_WEIGHT = 0.2, 0.5, 0.01


class Work(Protocol):
    """A policy at work on rows of episodes."""

    name: str
    parameters: int

    def step(self) -> None:
        """Decide one step of all rows."""

    def update(self) -> None:
        """Run the forward and backward pass of one update over the whole batch."""


class PolicyWork:
    """The policy of this package on episodes that were lived.

    Args:
        situations: what the rows saw, one entry per step.
        hidden: width of the network.
        device: where it runs.
    """

    name = "esper"

    def __init__(self, situations: Sequence[Situation], hidden: int, device: str = "cpu") -> None:
        """Act through the episodes once; the actions taken are what an update scores."""
        signals = situations[0][0]
        self.rows, self.steps = signals.rows, len(situations)
        self.hidden, self.device = hidden, device
        self.policy = FactoredRecurrentActorCriticV2(
            num_slots=signals.num_slots, lstm_hidden_dim=hidden
        ).to(device)
        self.inputs = self.policy.config.input_dim
        self.parameters = sum(weight.numel() for weight in self.policy.parameters())
        config = SlotConfig.of(signals.num_slots)
        seen = [batch_obs_to_features(each, config, device) for each, _ in situations]
        self.states = torch.stack([states for states, _ in seen], 1)
        self.blueprints = torch.stack([blueprints for _, blueprints in seen], 1)
        legal = [masks.to(device) for _, masks in situations]
        taken, memory = [], self.policy.initial_hidden(self.rows)
        for at, masks in enumerate(legal):
            taken.append(self._act(at, masks, memory))
            self.now = (masks, memory)
            memory = taken[-1].hidden
        self.actions = torch.stack([step.actions for step in taken], 1)
        self.masks = torch.stack([step.masks for step in taken], 1)
        self.log_probs = torch.stack([step.log_probs for step in taken], 1)
        self.advantages = torch.randn(self.rows, self.steps).to(device)
        self.returns = torch.randn(self.rows, self.steps).to(device)
        self._fast = rollout_step(self.policy, self.rows)

    def step(self) -> None:
        """Decide the last step from packed weights, or on a GPU from a captured graph."""
        masks, memory = self.now
        self._fast(self.states[:, -1], masks, self.blueprints[:, -1], hidden=memory)

    def plain_step(self) -> None:
        """Decide the last step by `get_action`."""
        self._act(-1, *self.now)

    def update(self) -> None:
        """Score all episodes in one call, and go back."""
        self.policy.zero_grad()
        scores = self.policy.score(
            self.states, self.blueprints, self.actions, self.masks, with_baseline=False
        )
        self.loss(scores).backward()

    def loss(self, scores: Scores) -> Tensor:
        """Return the loss of a first pass of PPO."""
        ratio = (scores.log_probs - self.log_probs).sum(-1).exp()
        errors, entropies = self.returns - scores.values, scores.entropies.sum(-1)
        return ppo_losses(ratio, self.advantages, errors, entropies).mean()

    def _act(self, at: int, masks: Masks, memory: Any) -> Any:
        return self.policy.get_action(
            self.states[:, at], masks, self.blueprints[:, at], hidden=memory
        )


PLAIN_STEPS = "plain steps"
"""Name of the reference that needs nothing installed: the same network, one step at a time."""


class PlainWork:
    """The same network without any of the fast ways: `get_action`, and scoring step by step."""

    name = PLAIN_STEPS

    def __init__(self, work: PolicyWork) -> None:
        """Share the network and the episodes of another."""
        self._work = work
        self.parameters = work.parameters

    def step(self) -> None:
        """Decide one step by `get_action`."""
        self._work.plain_step()

    def update(self) -> None:
        """Score one step of all rows after another, and go back."""
        work = self._work
        work.policy.zero_grad()
        scores = score_by_steps(
            work.policy.score, work.states, work.blueprints, work.actions, work.masks
        )
        work.loss(scores).backward()


def ppo_losses(ratio: Tensor, advantages: Tensor, errors: Tensor, entropies: Tensor) -> Tensor:
    """Return the loss of PPO at every step, from the joint ratio and the errors of the critic."""
    clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
    gain = torch.minimum(advantages * ratio, advantages * clipped)
    return _VALUE_WEIGHT * errors.square() - gain - _ENTROPY_WEIGHT * entropies


def score_by_steps(
    score: Callable[..., Scores],
    states: Tensor,
    blueprint_indices: Tensor,
    actions: Tensor,
    masks: Tensor,
) -> Scores:
    """Return what `score` says of whole episodes, without the baseline, one step after another."""
    hidden, steps = None, []
    for at in range(states.shape[1]):
        here = (each[:, at : at + 1] for each in (states, blueprint_indices, actions, masks))
        steps.append(score(*here, hidden, with_baseline=False))
        hidden = steps[-1].hidden
    whole = {
        each.name: torch.cat([getattr(step, each.name) for step in steps], 1)
        for each in fields(Scores)
        if each.name != "hidden"
    }
    return Scores(**whole, hidden=steps[-1].hidden)


def compare_policies(ours: PolicyWork, reference: Work, *, rounds: int) -> list[Comparison]:
    """Return how step and update compare, and the plain step where the reference is another."""
    pairs: dict[str, tuple[Callable[[], None], Callable[[], None], int]] = {
        "step": (ours.step, reference.step, _STEPS_TOGETHER),
        "plain_step": (ours.plain_step, reference.step, _STEPS_TOGETHER),
        "update": (ours.update, reference.update, 1),
    }
    if isinstance(reference, PlainWork):
        del pairs["plain_step"]
    return [
        compare(
            name,
            own,
            theirs,
            against=reference.name,
            rounds=rounds,
            calls=calls,
            device=ours.device,
        )
        for name, (own, theirs, calls) in pairs.items()
    ]


def compare_captured(ours: PolicyWork, *, rounds: int) -> Comparison:
    """Return how a step from a CUDA graph compares with `get_action`, masks prepared for both."""
    masks, hidden = ours.now
    rows = ours.rows
    state, blueprints = ours.states[:, -1], ours.blueprints[:, -1]
    legal = ours.policy.table.row_masks(masks, (rows,))
    graph = CapturedPolicyStep(ours.policy, rows)
    return compare(
        "captured_step",
        lambda: graph(state, legal, blueprints, hidden=hidden),
        lambda: ours.policy.get_action(state, legal, blueprints, hidden=hidden),
        against="get_action",
        rounds=rounds,
        calls=100,
        device="cuda",
    )


# ---- What an observation costs: all rows together against the readable reference, row by row


_CALLS = 20
"""Extractions timed together; the reference is timed once in the same turn."""


@dataclass(frozen=True, slots=True)
class ExtractionTiming:
    """What one observation costs."""

    rows: int
    slots: int
    occupied: float
    """Share of slots that hold a record; an empty slot costs the reference next to nothing."""
    extraction_us: float
    """Microseconds per row, of all rows together."""
    reference_us: float
    """Microseconds per row, one by one from plain floats."""
    ratio: float
    """How many times faster; the median over the turns."""


def time_extraction(signals: Signals, turns: int) -> ExtractionTiming:
    """Time both ways to the observation of these signals."""
    slots = SlotConfig.of(signals.num_slots)
    reports = plain_reports(signals, slots)
    pairs = take_turns(
        lambda: batch_obs_to_features(signals, slots),
        lambda: batch_obs_to_features(*reports, slots),
        rounds=turns,
        calls=_CALLS,
    )
    per_row = 1e6 / signals.rows
    return ExtractionTiming(
        rows=signals.rows,
        slots=slots.num_slots,
        occupied=float(signals.occupied.float().mean()),
        extraction_us=per_row * median(ours.cpu for ours, _ in pairs),
        reference_us=per_row * median(theirs.cpu for _, theirs in pairs),
        ratio=median(theirs.cpu / ours.cpu for ours, theirs in pairs),
    )
