"""`GrowVecEnv`: a population as the vector environment of Stable-Baselines3.

    model = MaskablePPO("MlpPolicy", GrowVecEnv(LegalVectorActions(GrowVectorEnv(64))))

It needs the extra: `pip install 'esper-grow[sb3]'`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.lab.envs.grow import GrowVectorEnv, LegalVectorActions
from esper.leyline.errors import UsageError, needing

with needing("esper.lab.envs.stable_baselines", "sb3"):
    from stable_baselines3.common.vec_env import VecEnv

_SHOWN = ("score", "twin_score", "active", "task", "env_seed")


class GrowVecEnv(VecEnv):
    """Adapts a vector environment of `esper.lab.envs` to Stable-Baselines3.

    Args:
        env: the rows, with factored actions or with exact masks.
    """

    def __init__(self, env: GrowVectorEnv | LegalVectorActions) -> None:
        """Take over the spaces."""
        self.env = env
        self._actions: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> NDArray[np.float32]:
        """Start a new episode in every row."""
        seed = self._seeds[0]
        observation, infos = self.env.reset(seed=seed)
        self.reset_infos = self._split(infos)
        self._reset_seeds()
        self._reset_options()
        seen: NDArray[np.float32] = observation
        return seen

    def step_async(self, actions: NDArray[np.int64]) -> None:
        """Keep the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        """Carry the actions out."""
        observation, rewards, ends, cuts, infos = self.env.step(self._actions)
        by_row = self._split(infos.get("final_info", infos))
        for row in np.flatnonzero(ends | cuts):
            by_row[row]["terminal_observation"] = infos["final_obs"][row]
            by_row[row]["TimeLimit.truncated"] = bool(cuts[row])
        return observation, rewards.astype(np.float32), ends | cuts, by_row

    def close(self) -> None:
        """Free the processes and the memory of the rows."""
        self.env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute, once for every row."""
        return [getattr(self.env, attr_name)] * len(self._rows(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Raise: rows have no attributes of their own."""
        raise UsageError(f"cannot set {attr_name!r}: rows of a population have no own attributes")

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        """Return `action_masks` of every row; rows have no other methods."""
        if method_name != "action_masks":
            raise UsageError(f"rows of a population only have action_masks(), not {method_name!r}")
        masks = self.env.action_masks()
        return [masks[row] for row in self._rows(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Return False for every row: single rows have no wrappers."""
        return [False] * len(self._rows(indices))

    def _rows(self, indices: int | Sequence[int] | None) -> Sequence[int]:
        rows: Sequence[int] = list(self._get_indices(indices))
        return rows

    def _split(self, infos: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the infos row by row, without masks, which `action_masks` returns."""
        return [{name: infos[name][row] for name in _SHOWN} for row in range(self.num_envs)]
