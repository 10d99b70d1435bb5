"""Wrappers that turn the factored action into one number whose mask is exact.

Masks of separate heads cannot say that a slot depends on the op. Here every number is a whole
action (`CompoundActions`), and `action_masks()` allows exactly those that would not be refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from esper.envs.compound import CompoundActions
from esper.envs.grow import GrowEnv
from esper.envs.rows import Bools
from esper.envs.vector import GrowVectorEnv, Step


class LegalActions(gymnasium.Wrapper):
    """A `GrowEnv` whose action is one number.

    Args:
        env: the environment, as `gymnasium.make` returns it.
        pinned: heads that keep their placeholder, as in `CompoundActions`.
    """

    def __init__(self, env: Any, pinned: Sequence[str] = ()) -> None:
        """Number the actions."""
        super().__init__(env)
        self._grow: GrowEnv = env.unwrapped
        self.actions = CompoundActions(self._grow.rows.spaces.sizes, pinned)
        self.action_space = spaces.Discrete(len(self.actions))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a new episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, info | {"action_mask": self._mask()}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Carry out the action with a number."""
        chosen = self.actions.table[int(action)].numpy()
        observation, reward, terminated, truncated, info = self.env.step(chosen)
        return observation, reward, terminated, truncated, info | {"action_mask": self._mask()}

    def action_masks(self) -> Bools:
        """Return bool [actions]: exactly those that are legal now."""
        return self._mask().astype(np.bool_)

    def _mask(self) -> NDArray[np.int8]:
        legal: NDArray[np.int8] = self.actions.legal(self._grow.masks())[0].to(torch.int8).numpy()
        return legal


class LegalVectorActions(VectorWrapper):
    """A `GrowVectorEnv` whose actions are one number per row.

    Args:
        env: the environment, as `gymnasium.make_vec` returns it.
        pinned: heads that keep their placeholder, as in `CompoundActions`.
    """

    def __init__(self, env: Any, pinned: Sequence[str] = ()) -> None:
        """Number the actions."""
        super().__init__(env)
        self._grow: GrowVectorEnv = env.unwrapped
        self.actions = CompoundActions(self._grow.rows.spaces.sizes, pinned)
        self.single_action_space = spaces.Discrete(len(self.actions))
        self.action_space = batch_space(self.single_action_space, self._grow.num_envs)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a new episode in every row."""
        observation, infos = self.env.reset(seed=seed, options=options)
        return observation, infos | {"action_mask": self._mask()}

    def step(self, actions: NDArray[np.int64]) -> Step:
        """Carry out the actions with these numbers [R]."""
        chosen = self.actions.decode(torch.as_tensor(np.asarray(actions))).numpy()
        observation, rewards, ends, cuts, infos = self.env.step(chosen)
        return observation, rewards, ends, cuts, infos | {"action_mask": self._mask()}

    def action_masks(self) -> Bools:
        """Return bool [R, actions]: exactly those that are legal now."""
        return self._mask().astype(np.bool_)

    def _mask(self) -> NDArray[np.int8]:
        legal: NDArray[np.int8] = self.actions.legal(self._grow.masks()).to(torch.int8).numpy()
        return legal
