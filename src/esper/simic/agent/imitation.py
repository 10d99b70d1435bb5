"""Self-imitation: the best episodes so far are learned from until most pay off.

Where one episode in thousands finds what pays, a round's gradient shows it once and forgets it. So
the best episodes are kept, and every update also raises the likelihood of what was done in them,
as far as it paid more than the critic expects (Oh et al. 2018). The weight falls as such
episodes become common: then the rounds themselves teach enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.simic.agent.normalizers import RewardScales, clip_rewards
from esper.simic.agent.rollout_buffer import RolloutBatch
from esper.tamiyo.controllers.policy_file import Policy

MOST_ADVANTAGE = 5.0
"""Largest advantage of a step, in the critic's scale; one surprise must not drown all others."""

_KEPT = (
    *("raw_states", "blueprint_indices", "actions", "masks"),
    *("valid", "free", "potentials"),
)
"""What is kept of an episode; observations raw, because their statistics go on moving."""


class GoodEpisodes:
    """The episodes with the highest returns so far: the best of every task, then the second, ...

    Args:
        capacity: most episodes to keep; the best stay, in units of their tasks' returns, and of
            equals the oldest.
        least: an episode is good only if its raw return exceeds this.
        device: where they are kept.
    """

    def __init__(self, capacity: int, least: float, device: torch.device | str = "cpu") -> None:
        """Start without any."""
        self.capacity, self.least = capacity, least
        self.device = torch.device(device)
        self._tensors: dict[str, Tensor] = {}
        self.tasks: list[str] = []
        """Names of the tasks of the episodes that are kept."""

    def __len__(self) -> int:
        return len(self._tensors["rewards"]) if self._tensors else 0

    @torch.no_grad()
    def keep(self, batch: RolloutBatch, tasks: Sequence[str], scales: RewardScales) -> None:
        """Take over the good episodes of a round.

        Args:
            batch: the round.
            tasks: names of the rows' tasks.
            scales: what a return is on every task.
        """
        rewards = batch.rewards * batch.valid
        good = rewards.sum(1) > self.least
        if not bool(good.any()):
            return
        new = {name: getattr(batch, name)[good] for name in _KEPT}
        new["rewards"] = rewards[good]
        names = [name for name, is_good in zip(tasks, good.tolist(), strict=True) if is_good]
        if self._tensors:
            new, names = _join(self._tensors, new), [*self.tasks, *names]
        returns = (new["rewards"].sum(1).cpu() / scales.units(names)).tolist()
        best = _best_of_each(names, returns)[: self.capacity]
        self._tensors = {name: tensor[best] for name, tensor in new.items()}
        self.tasks = [names[place] for place in best]

    def loss(
        self,
        policy: Policy,
        *,
        gamma: float,
        weights: Tensor,
        scales: RewardScales,
        value_scale: Tensor,
        part: int = 0,
        parts: int = 1,
    ) -> Tensor:
        """Return minus the mean log-probability of what was done, weighted by what it gained.

        The mean is over all steps of the episodes, whatever their weights.

        Args:
            policy: who imitates.
            gamma: discount of one step.
            weights: [N], of every kept episode.
            scales: what raw rewards of every task are divided by now.
            value_scale: what the critic's values are multiplied by to be normalised returns.
            part: which of the parts to imitate; together they are all episodes, so that a pass
                imitates each once, however many minibatches it has.
            parts: how many parts there are; some may be empty, and then the loss is 0.
        """
        kept = {name: tensor[part::parts] for name, tensor in self._tensors.items()}
        if not len(kept["rewards"]):
            return value_scale.new_zeros(())
        unit = scales.units(self.tasks[part::parts], self.device).unsqueeze(1)
        states = policy.normalizer.normalize(kept["raw_states"])
        scores = policy.network.score(
            states, kept["blueprint_indices"], kept["actions"], kept["masks"]
        )
        paid = kept["potentials"] / unit
        change = gamma * F.pad(paid[:, 1:], (0, 1)) - paid
        rewards = clip_rewards(kept["rewards"] / unit, change * kept["valid"])
        returns = discounted_returns(rewards, gamma) + paid
        returns = returns / value_scale
        gained = (returns - scores.baseline.detach()).clamp(0.0, MOST_ADVANTAGE)
        usable = (kept["valid"] & kept["free"]).to(gained.dtype)
        steps = usable.sum().clamp(min=1.0)
        wanted = gained * usable * weights[part::parts].unsqueeze(1)
        return -(scores.log_probs.sum(-1) * wanted).sum() / steps

    def state_dict(self) -> dict[str, Any]:
        """Return the episodes."""
        tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        return {"tensors": tensors, "tasks": list(self.tasks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these episodes."""
        saved = state["tensors"].items()
        self._tensors = {name: tensor.to(self.device) for name, tensor in saved}
        self.tasks = list(state["tasks"])


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Return what followed every step, discounted, [R, T]."""
    later = torch.zeros_like(rewards[:, 0])
    returns = []
    for reward in reversed(rewards.unbind(1)):
        later = reward + gamma * later
        returns.append(later)
    return torch.stack(returns[::-1], dim=1)


def _best_of_each(tasks: Sequence[str], returns: Sequence[float]) -> list[int]:
    """Return the places of all episodes: the best of every task first, then the second, ..."""
    order = sorted(range(len(returns)), key=lambda place: -returns[place])
    seen: dict[str, int] = {}
    ranks = {}
    for place in order:
        ranks[place] = seen[tasks[place]] = seen.get(tasks[place], -1) + 1
    return sorted(order, key=lambda place: ranks[place])


def _join(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return old and new episodes; the shorter are padded with steps that do not count."""
    steps = max(old["rewards"].shape[1], new["rewards"].shape[1])

    def pad(episodes: dict[str, Tensor]) -> dict[str, Tensor]:
        missing = steps - episodes["rewards"].shape[1]
        if not missing:
            return episodes
        padded = {}
        for name, tensor in episodes.items():
            # The last step is repeated: its masks fit its actions. It does not count again.
            last = tensor[:, -1:].expand(-1, missing, *tensor.shape[2:])
            last = torch.zeros_like(last) if name in ("rewards", "valid", "potentials") else last
            padded[name] = torch.cat([tensor, last], dim=1)
        return padded

    old, new = pad(old), pad(new)
    return {name: torch.cat([old[name], new[name]]) for name in old}
