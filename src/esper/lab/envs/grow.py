"""`GrowEnv`: one evolving network as an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from esper.lab.envs.rows import Bools, GrowRows, Recipe
from esper.leyline.actions import CAUSAL_HEADS, HEAD_NAMES, PLACEHOLDERS, LifecycleOp
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks
from esper.leyline.slots import NOOP


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


# ---- `GrowVectorEnv`: a whole population as one vector environment


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


# ---- Legal actions as one number: every op with every choice of the heads that it uses


_OP, _SLOT, _BLUEPRINT = (HEAD_NAMES.index(head) for head in ("op", "slot", "blueprint"))

SHAPES = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
"""The heads that say how an op is done."""

assert set(SHAPES) < set(HEAD_NAMES)


class CompoundActions:
    """A numbered table of whole actions.

    Args:
        sizes: number of choices of every head, in the order of `HEAD_NAMES`.
        pinned: heads that keep their placeholder; `SHAPES` or some of them.
    """

    def __init__(self, sizes: Sequence[int], pinned: Sequence[str] = ()) -> None:
        """Number the actions: WAIT is 0."""
        unknown = [head for head in pinned if head not in SHAPES]
        if unknown:
            raise UsageError(
                f"only {', '.join(SHAPES)} can be pinned, got {', '.join(map(repr, unknown))}"
            )
        by_head = dict(zip(HEAD_NAMES, sizes, strict=True))
        rows: list[tuple[int, ...]] = []
        for op, causal in CAUSAL_HEADS.items():
            free = set(causal) - set(pinned) - {"op"}
            if op == LifecycleOp.SET_ALPHA_TARGET and "alpha_target" in pinned:
                # It would aim for what the seed aims for already.
                continue
            rows += product(*(_choices(head, op, free, by_head) for head in HEAD_NAMES))
        self.table = torch.tensor(rows, dtype=torch.int64)
        """int64 [A, 8], one index per head."""

    def __len__(self) -> int:
        return len(self.table)

    def decode(self, chosen: Tensor) -> Tensor:
        """Return int64 [R, 8] of numbers [R]."""
        return self.table[chosen]

    def legal(self, masks: Masks) -> Tensor:
        """Return bool [R, A]: exactly the actions that would not be refused."""
        masks = masks.to("cpu")
        op, slot, blueprint = (self.table[:, head] for head in (_OP, _SLOT, _BLUEPRINT))
        placed = masks.slot_by_op[:, op, slot] | (op == int(LifecycleOp.WAIT))
        plants = op == int(LifecycleOp.GERMINATE)
        return placed & (masks.blueprint_by_slot[:, slot, blueprint] | ~plants)


def _choices(head: str, op: LifecycleOp, free: set[str], sizes: Mapping[str, int]) -> Sequence[int]:
    """Return what a head takes under an op: everything where it is free, else one choice."""
    if head == "op":
        return [int(op)]
    if head not in free:
        return [int(PLACEHOLDERS[head])]
    choices = range(sizes[head])
    return [choice for choice in choices if choice != NOOP] if head == "blueprint" else choices


# ---- Wrappers that turn the factored action into one number whose mask is exact


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
