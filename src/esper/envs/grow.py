"""`GrowEnv`: one evolving network as an environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from esper.envs.rows import Bools, GrowRows, Recipe
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks


class GrowEnv(gymnasium.Env):
    """A network that grows on a task of a recipe, paid as the recipe says.

    Args:
        recipe: name of a recipe of `esper train`, or a whole configuration.
        settings: settings of the recipe to change, by dotted key, as in {"episode_length": 20}.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        recipe: Recipe = "digits",
        settings: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Look the task up; data is read and the network is built by `reset`."""
        if render_mode is not None:
            raise UsageError("this environment is not drawn; leave render_mode out")
        self.rows = GrowRows(1, recipe, settings)
        self.observation_space = self.rows.spaces.observation
        self.action_space = self.rows.spaces.action
        self.render_mode = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start a new episode.

        Args:
            seed: seed of all episodes from now on, of which this is the first; by default they go
                on, at first with the recipe's seed.
            options: none are known.
        """
        super().reset(seed=seed)
        if seed is not None:
            self.rows.reseed(seed)
        self.rows.begin()
        return self.rows.observe()[0], self._info()

    def step(
        self, action: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Carry out an action and live through the epoch that follows."""
        rewards = self.rows.step(np.asarray(action)[None])
        ends, cuts = self.rows.ends()
        seen = self.rows.observe()[0]
        return seen, float(rewards[0]), bool(ends[0]), bool(cuts[0]), self._info()

    def action_masks(self) -> Bools:
        """Return bool [choices of all heads]: what every head may take now."""
        flat: Bools = self.rows.spaces.mask(self.rows.masks)[0].astype(np.bool_)
        return flat

    def masks(self) -> Masks:
        """Return what is legal now in the only row."""
        return self.rows.masks

    def close(self) -> None:
        """Free the memory of the network."""
        self.rows.close()

    def _info(self) -> dict[str, Any]:
        return {
            name: value[0] if value[0:1].ndim > 1 or value.dtype == object else value[0].item()
            for name, value in self.rows.infos().items()
        }
