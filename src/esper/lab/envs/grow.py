"""Gymnasium environments: `GrowEnv` grows one network, `GrowVectorEnv` a population of them."""

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
    """One growing network, with the task and the reward of a recipe.

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
        """Look up the task; `reset` reads the data and builds the network."""
        if render_mode is not None:
            raise UsageError(f"render_mode {render_mode!r} is not supported; leave it out")
        self.rows = GrowRows(1, recipe, settings)
        self.observation_space = self.rows.spaces.observation
        self.action_space = self.rows.spaces.action
        self.render_mode = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start a new episode.

        Args:
            seed: start a new sequence of episodes with this seed; by default the next episode
                of the current sequence, at first that of the recipe's seed.
            options: ignored.
        """
        super().reset(seed=seed)
        if seed is not None:
            self.rows.reseed(seed)
        self.rows.begin()
        return self.rows.observe()[0], self._info()

    def step(
        self, action: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Carry out an action and train one epoch."""
        rewards = self.rows.step(np.asarray(action)[None])
        ends, cuts = self.rows.ends()
        seen = self.rows.observe()[0]
        return seen, float(rewards[0]), bool(ends[0]), bool(cuts[0]), self._info()

    def action_masks(self) -> Bools:
        """Return bool [choices of all heads]: the choices of every head that are legal now."""
        mask: Bools = self.rows.action_mask()[0]
        return mask

    def masks(self) -> Masks:
        """Return the masks of the only row."""
        return self.rows.masks

    def close(self) -> None:
        """Free the network."""
        self.rows.close()

    def _info(self) -> dict[str, Any]:
        return {
            name: value[0] if value[0:1].ndim > 1 or value.dtype == object else value[0].item()
            for name, value in self.rows.infos().items()
        }


# ---- `GrowVectorEnv`: a whole population as one vector environment


Step = tuple[NDArray[np.float32], NDArray[np.float64], Bools, Bools, dict[str, Any]]


class GrowVectorEnv(VectorEnv):
    """Rows of growing networks, with the tasks and the reward of a recipe.

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
        """Look up the tasks; `reset` reads the data and builds the rows."""
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
            seed: as in `GrowEnv.reset`; of several seeds only the first is used.
            options: `reset_mask`, which must be true for every row: rows start together.
        """
        if seed is not None:
            first = seed if isinstance(seed, int) else seed[0]
            super().reset(seed=first)
            self.rows.reseed(first)
        mask = (options or {}).get("reset_mask")
        if mask is not None and not np.all(mask):
            raise UsageError("all rows start together; reset them when every episode has ended")
        self.rows.begin()
        return self.rows.observe(), self._infos()

    def step(self, actions: NDArray[np.int64]) -> Step:
        """Carry out one action per row and train one epoch."""
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
        """Return bool [R, choices of all heads]: the choices of every head that are legal now."""
        return self.rows.action_mask()

    def masks(self) -> Masks:
        """Return the full masks: slots by op, and blueprints by slot."""
        return self.rows.masks

    def close_extras(self, **kwargs: Any) -> None:
        """Free the processes and the memory of the rows."""
        self.rows.close()

    def _infos(self) -> dict[str, Any]:
        told = self.rows.infos()
        return told | {f"_{name}": np.ones(self.num_envs, dtype=np.bool_) for name in told}


def _objects(rows: NDArray[np.float32]) -> NDArray[Any]:
    """Return rows as an array of arrays, the form Gymnasium uses for final observations."""
    found = np.empty(len(rows), dtype=object)
    found[:] = list(rows)
    return found


# ---- Legal actions as one number: every op with every choice of the heads that it uses


_OP, _SLOT, _BLUEPRINT = (HEAD_NAMES.index(head) for head in ("op", "slot", "blueprint"))

SHAPES = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
"""The heads that set the details of an op."""

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
                # It would set the target that the seed has already.
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
        """Return bool [R, A]: exactly the legal actions."""
        masks = masks.to("cpu")
        op, slot, blueprint = (self.table[:, head] for head in (_OP, _SLOT, _BLUEPRINT))
        placed = masks.slot_by_op[:, op, slot] | (op == int(LifecycleOp.WAIT))
        plants = op == int(LifecycleOp.GERMINATE)
        return placed & (masks.blueprint_by_slot[:, slot, blueprint] | ~plants)


def _choices(head: str, op: LifecycleOp, free: set[str], sizes: Mapping[str, int]) -> Sequence[int]:
    """Return the choices of a head under an op: all of them if it is free, else its placeholder."""
    if head == "op":
        return [int(op)]
    if head not in free:
        return [int(PLACEHOLDERS[head])]
    choices = range(sizes[head])
    return [choice for choice in choices if choice != NOOP] if head == "blueprint" else choices


# ---- Wrappers that turn the factored action into one number whose mask is exact


class _NumberedActions:
    """Base of both wrappers: takes actions by number, and adds the mask to every info."""

    env: Any
    actions: CompoundActions

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a new episode, in every row."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, info | {"action_mask": self.action_masks().astype(np.int8)}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Carry out the action with this number, or one number per row [R]."""
        chosen = self.actions.decode(torch.as_tensor(np.asarray(action))).numpy()
        observation, reward, ends, cuts, info = self.env.step(chosen)
        mask = self.action_masks().astype(np.int8)
        return observation, reward, ends, cuts, info | {"action_mask": mask}

    def action_masks(self) -> Bools:
        """Return bool [actions], with rows [R, actions]: exactly the actions that are legal now."""
        env = self.env.unwrapped
        legal: Bools = self.actions.legal(env.masks()).numpy()
        return legal[0] if isinstance(env, GrowEnv) else legal


class LegalActions(_NumberedActions, gymnasium.Wrapper):
    """A `GrowEnv` whose action is one number.

    Args:
        env: the environment, as `gymnasium.make` returns it.
        pinned: heads that keep their placeholder, as in `CompoundActions`.
    """

    def __init__(self, env: Any, pinned: Sequence[str] = ()) -> None:
        """Number the actions."""
        super().__init__(env)
        self.actions = CompoundActions(env.unwrapped.rows.spaces.sizes, pinned)
        self.action_space = spaces.Discrete(len(self.actions))


class LegalVectorActions(_NumberedActions, VectorWrapper):
    """A `GrowVectorEnv` whose actions are one number per row.

    Args:
        env: the environment, as `gymnasium.make_vec` returns it.
        pinned: heads that keep their placeholder, as in `CompoundActions`.
    """

    def __init__(self, env: Any, pinned: Sequence[str] = ()) -> None:
        """Number the actions."""
        super().__init__(env)
        self.actions = CompoundActions(env.unwrapped.rows.spaces.sizes, pinned)
        self.single_action_space = spaces.Discrete(len(self.actions))
        self.action_space = batch_space(self.single_action_space, env.num_envs)
