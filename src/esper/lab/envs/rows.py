"""`GrowRows`: the rows behind both environments.

It plays the rounds that `esper train` plays: the same seeds, twins and rewards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.actions import HEAD_NAMES, PLACEHOLDERS, LifecycleOp
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.simic.rewards import make_reward
from esper.simic.training.config import TrainConfig, get_recipe
from esper.simic.training.episodes import Episodes, TwinCurves
from esper.simic.training.row_source import TaskRows
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.policy.action_masks import available_heads
from esper.utils.settings import change_settings

# ---- Observations and actions of rows as NumPy arrays


class RowSpaces:
    """The observation and action space of one row, and conversions to and from tensors.

    Args:
        policy: a policy's configuration, fitted to the rows; it has the observation's layout.
    """

    def __init__(self, policy: PolicyConfig) -> None:
        """Build the spaces."""
        self._layout = policy.observation
        self._blueprints = policy.num_blueprints
        self.sizes = tuple(policy.head_sizes[head] for head in HEAD_NAMES)
        """Number of choices of every head."""
        specs = self._layout.specs
        hots = policy.num_slots * policy.num_blueprints
        low = [spec.low for spec in specs] + [0.0] * hots
        high = [spec.high for spec in specs] + [1.0] * hots
        self.observation: Any = spaces.Box(
            np.array(low, np.float32), np.array(high, np.float32), dtype=np.float32
        )
        """Box of float32."""
        self.action: Any = spaces.MultiDiscrete(self.sizes)
        """MultiDiscrete, one entry per head."""

    def observe(self, signals: Signals) -> NDArray[np.float32]:
        """Return float32 [R, D]."""
        with torch.no_grad():
            numbers, blueprints = self._layout.observe(signals, "cpu")
            # An empty slot is -1: shifted by one it is class 0, whose column is left out.
            hot = F.one_hot(blueprints + 1, self._blueprints + 1)[..., 1:]
            seen = torch.cat([numbers, hot.flatten(1).to(numbers.dtype)], dim=1)
        # Rounding may exceed a bound by one bit.
        low, high = self.observation.low, self.observation.high
        clipped: NDArray[np.float32] = np.clip(seen.numpy(), low, high)
        return clipped

    def decode(self, actions: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return {head: int64 [R]} of arrays [R, 8]."""
        table = torch.as_tensor(np.asarray(actions), dtype=torch.int64)
        return {head: table[:, index] for index, head in enumerate(HEAD_NAMES)}


def union_mask(masks: Masks) -> Tensor:
    """Return bool [R, choices of all heads]: the choices that occur in some legal action.

    A head that no legal action uses may only take its placeholder.
    """
    masks = masks.to("cpu")
    acting = masks.slot_by_op.clone()
    acting[:, LifecycleOp.WAIT] = False
    plantable = masks.slot_by_op[:, LifecycleOp.GERMINATE].unsqueeze(-1)
    depending = {
        "slot": acting.any(1),
        "blueprint": (masks.blueprint_by_slot & plantable).any(1),
    }
    used = available_heads(masks)
    flat = []
    for index, head in enumerate(HEAD_NAMES):
        part = depending[head] if head in depending else getattr(masks, head)
        idle = torch.arange(part.shape[-1]) == int(PLACEHOLDERS[head])
        flat.append(torch.where(used[:, index, None], part, idle))
    return torch.cat(flat, dim=1)


Recipe = str | TrainConfig
Bools = NDArray[np.bool_]


class GrowRows:
    """Rows of growing networks.

    Args:
        rows: how many; the recipe's number by default.
        recipe: name of a recipe of `esper train`, or a whole configuration.
        settings: settings of the recipe to change, by dotted key, as in {"episode_length": 20}.
    """

    def __init__(
        self,
        rows: int | None = None,
        recipe: Recipe = "digits",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Look up the tasks; `begin` reads the data and builds the rows."""
        config = get_recipe(recipe) if isinstance(recipe, str) else recipe
        config = change_settings(config, dict(settings or {}))
        if config.curriculum:
            raise UsageError("an environment cannot follow a curriculum; set curriculum to []")
        self.config = config if rows is None else config.replace(rows=rows)
        self._reward = make_reward(config.reward)
        self._source = TaskRows(self.config)
        self._twins = self._make_twins()
        self._episodes: Episodes | None = None
        self._masks: Masks | None = None
        """The current masks, once they were asked for."""
        self._rolled_back = torch.zeros(self.config.rows, dtype=torch.bool)
        self._round = 0
        policy = config.policy.fitted(self._source.num_slots, len(self._source.blueprint_names))
        self.spaces = RowSpaces(policy)
        """Observation and action space of a row."""

    @property
    def active(self) -> Tensor:
        """Bool [R], rows whose episode still runs."""
        return self._playing.active

    @property
    def masks(self) -> Masks:
        """The current masks; rows whose episode has ended may only wait."""
        episodes = self._playing
        # Cached: observation, info and learner each ask for it, and it costs half of the overhead.
        if self._masks is None:
            masks = episodes.environment.masks().to("cpu")
            self._masks = waiting_masks(masks, episodes.active.cpu())
        return self._masks

    def reseed(self, seed: int) -> None:
        """Start a new sequence of episodes with this seed."""
        self.close()
        self.config = self.config.replace(seed=seed)
        self._source = TaskRows(self.config)
        self._twins = self._make_twins()
        self._round = 0

    def begin(self) -> None:
        """Start the next episode in every row."""
        number, self._round = self._round, self._round + 1
        plan = self._source.plan(number, 0)
        curves = regression = None
        if self._twins is not None:
            ahead = range(number, number + self._twins.rounds_ahead)
            for _ in self._twins.prepare([self._source.plan(each, 0) for each in ahead]):
                pass
            curves, regression = self._twins.scores(plan), self._twins.regression(plan)
        environment = self._source.environment(number, 0)
        episodes = self._episodes or Episodes(environment, self._reward)
        episodes.environment = environment
        self._masks = None
        episodes.start(plan, curves, regression)
        self._episodes = episodes
        self._rolled_back = torch.zeros(self.config.rows, dtype=torch.bool)

    def step(self, actions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Carry out actions [R, 8], train one epoch, and return the rewards [R]."""
        episodes = self._playing
        decided = self.spaces.decode(actions)
        self._masks = None
        transition, paid = episodes.step(
            {head: chosen.to(episodes.device) for head, chosen in decided.items()}
        )
        self._rolled_back |= (transition.active & transition.after.rolled_back).cpu()
        rewards: NDArray[np.float64] = paid.total.double().cpu().numpy()
        return rewards

    def ends(self) -> tuple[Bools, Bools]:
        """Return which rows have terminated, and which were truncated.

        A rollback terminates; at the horizon the recipe's `horizon` decides.
        """
        over = ~self._playing.active.cpu()
        is_cut = self.config.horizon == "bootstrap"
        cut = over & ~self._rolled_back if is_cut else torch.zeros_like(over)
        return (over & ~cut).numpy(), cut.numpy()

    def observe(self) -> NDArray[np.float32]:
        """Return the observations, float32 [R, D]."""
        return self.spaces.observe(self._playing.signals)

    def action_mask(self) -> Bools:
        """Return bool [R, choices of all heads]: the choices of every head that are legal now."""
        flat: Bools = union_mask(self.masks).numpy()
        return flat

    def infos(self) -> dict[str, NDArray[Any]]:
        """Return masks, scores, seeds and tasks, one entry per row each."""
        episodes = self._playing
        return {
            "action_mask": self.action_mask().astype(np.int8),
            "active": episodes.active.cpu().numpy(),
            "score": episodes.signals.val_score.cpu().numpy(),
            "twin_score": episodes.twin_scores.cpu().numpy(),
            "env_seed": np.array(episodes.plan.env_seeds, dtype=np.int64),
            "task": np.array(episodes.plan.tasks, dtype=object),
        }

    def close(self) -> None:
        """Free the processes and the memory of the rows."""
        self._source.close()
        self._episodes = None

    def _make_twins(self) -> TwinCurves | None:
        return TwinCurves(self._source, self.config) if self._reward.needs_twin else None

    @property
    def _playing(self) -> Episodes:
        if self._episodes is None:
            raise UsageError("the environment has no rows yet; call reset() first")
        return self._episodes


def waiting_masks(masks: Masks, active: Tensor) -> Masks:
    """Return the masks, with only WAIT for rows whose episode has ended."""
    wait = torch.arange(masks.op.shape[-1]) == int(LifecycleOp.WAIT)
    op = masks.op & (active.unsqueeze(1) | wait)
    return dataclasses.replace(masks, op=op, slot_by_op=masks.slot_by_op & op.unsqueeze(-1))
