"""`GrowVectorEnv`: a whole population as one vector environment.

All rows are one population, so they live, end and begin again together. A row that ends before the
others, because the governor took it back or its horizon is shorter, waits in its place: its mask
allows WAIT alone and it is paid nothing, so its return is what it was. When the last row has ended
all of them report their end in the same step and have begun a new episode there, which Gymnasium
calls `AutoresetMode.SAME_STEP`: the last observation is `infos["final_obs"]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from esper.envs.rows import Bools, GrowRows, Recipe
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks

Step = tuple[NDArray[np.float32], NDArray[np.float64], Bools, Bools, dict[str, Any]]


class GrowVectorEnv(VectorEnv):
    """Rows of evolving networks on the tasks of a recipe, paid as the recipe says.

    Args:
        num_envs: number of rows; the recipe's by default.
        recipe: name of a recipe of `esper train`, or a whole configuration.
        settings: settings of the recipe to change, by dotted key, as in {"episode_length": 20}.
    """

    metadata: ClassVar[dict[str, Any]] = {
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(
        self,
        num_envs: int | None = None,
        recipe: Recipe = "digits",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Look the tasks up; data is read and rows are built by `reset`."""
        self.rows = GrowRows(num_envs, recipe, settings)
        self.num_envs = self.rows.config.rows
        self.single_observation_space = self.rows.spaces.observation
        self.single_action_space = self.rows.spaces.action
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start a new episode in every row.

        Args:
            seed: seed of all episodes from now on, of which this is the first; by default they go
                on, at first with the recipe's seed. Of several seeds the first counts.
            options: `reset_mask`, which must be true for every row: rows begin together.
        """
        if seed is not None:
            first = seed if isinstance(seed, int) else seed[0]
            super().reset(seed=first)
            self.rows.reseed(first)
        mask = (options or {}).get("reset_mask")
        if mask is not None and not np.all(mask):
            raise UsageError("all rows begin together; reset them when every one has ended")
        self.rows.begin()
        return self.rows.observe(), self._infos()

    def step(self, actions: NDArray[np.int64]) -> Step:
        """Carry out one action per row and live through the epoch that follows."""
        rewards = self.rows.step(actions)
        observation, infos = self.rows.observe(), self._infos()
        if bool(self.rows.active.any()):
            going_on = np.zeros(self.num_envs, dtype=np.bool_)
            return observation, rewards, going_on, going_on.copy(), infos
        ends, cuts = self.rows.ends()
        self.rows.begin()
        everyone = np.ones(self.num_envs, dtype=np.bool_)
        last = {
            "final_obs": _objects(observation),
            "_final_obs": everyone,
            "final_info": infos,
            "_final_info": everyone.copy(),
        }
        return self.rows.observe(), rewards, ends, cuts, self._infos() | last

    def action_masks(self) -> Bools:
        """Return bool [R, choices of all heads]: what every head may take now."""
        return self.rows.spaces.mask(self.rows.masks).astype(np.bool_)

    def masks(self) -> Masks:
        """Return what is legal now, with the slots of every op and the blueprints of every slot."""
        return self.rows.masks

    def close_extras(self, **kwargs: Any) -> None:
        """Free processes and memory of the rows."""
        self.rows.close()

    def _infos(self) -> dict[str, Any]:
        told = self.rows.infos()
        return told | {f"_{name}": np.ones(self.num_envs, dtype=np.bool_) for name in told}


def _objects(rows: NDArray[np.float32]) -> NDArray[Any]:
    """Return rows as an array of arrays, as Gymnasium hands out last observations."""
    found = np.empty(len(rows), dtype=object)
    found[:] = list(rows)
    return found
