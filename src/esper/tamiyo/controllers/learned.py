"""The learned policy as a controller: greedy or sampling, with a memory for every row."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import CheckpointError, UsageError
from esper.leyline.manifest import MANIFEST_FILE
from esper.leyline.randomness import generator
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.explanation import Explanation, explain_step
from esper.tamiyo.controllers.policy_file import Policy, find_policy, load_policy
from esper.tamiyo.controllers.registry import register_controller
from esper.tamiyo.networks.decision import PolicyStep
from esper.tamiyo.networks.layers import Hidden, clear_rows


@dataclass(frozen=True, slots=True)
class _Decision:
    """What the last decision was made of, for `explain`."""

    raw: Tensor
    observation: Tensor
    blueprints: Tensor
    hidden: Hidden
    step: PolicyStep


@register_controller("learned")
class LearnedController:
    """Acts by a trained network, without the floors it explored with.

    A draw depends on the seed, the row and the step alone, so a row acts the same whatever the
    number of rows, and a restored controller goes on with the draws it would have made. A row
    that was rolled back forgets what it remembered: that past did not happen. A travelling policy
    is laid out for the host, whatever its slots and blueprints; of the documents' layout one is
    refused that does not fit.

    Args:
        policy: the network with its frozen observation statistics and its blueprints.
        context: the slots, blueprints and seed to work with.
        greedy: take the likeliest action instead of drawing one.
        explore: keep the floors, as in a rollout.

    Raises:
        UsageError: The host has more slots than the policy serves, or blueprints it does not know.
    """

    def __init__(
        self,
        policy: Policy,
        context: ControllerContext,
        *,
        greedy: bool = False,
        explore: bool = False,
    ) -> None:
        """Bring policy and host together; nothing is remembered yet."""
        self.policy = policy.fitted(context)
        self.greedy, self.explore = greedy, explore
        self._context = context
        self._ids = _blueprint_ids(self.policy, context)
        self._step = 0
        self._hidden: Hidden | None = None
        self._last: _Decision | None = None

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> LearnedController:
        """Return the controller that draws by the policy saved in a folder."""
        return cls(_load("learned", argument), context)

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Start at the first step with empty memories, on this device."""
        self.policy.network.to(device)
        self.policy.normalizer.to(device)
        self._hidden = self.policy.network.initial_hidden(rows)
        self._step = 0
        self._last = None

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return the policy's action for every row."""
        if self._hidden is None or self._hidden[0].shape[1] != signals.rows:
            known = 0 if self._hidden is None else self._hidden[0].shape[1]
            raise UsageError(
                f"the policy was reset for {known} rows but is shown {signals.rows}; "
                f"call reset({signals.rows}, device) first"
            )
        device = self._hidden[0].device
        with torch.no_grad():
            raw, blueprints = self.policy.layout.observe(self._own_signals(signals), device)
            observation = self.policy.normalizer.normalize(raw)
        before = clear_rows(self._hidden, signals.rolled_back.to(device))
        step = self.policy.network.get_action(
            observation,
            self._own_masks(masks, device),
            blueprint_indices=blueprints,
            hidden=before,
            deterministic=self.greedy,
            explore=self.explore,
            uniforms=None if self.greedy else self._draws(signals.rows).to(device),
        )
        self._last = _Decision(raw, observation, blueprints, before, step)
        self._hidden = step.hidden
        self._step += 1
        return self._host_actions(step, masks.op.device)

    def explain(self, row: int = 0) -> Explanation:
        """Return why the last decision of a row came out as it did."""
        last = self._last
        if last is None:
            raise UsageError("there is no decision to explain yet; call act() first")
        if not 0 <= row < len(last.raw):
            raise UsageError(f"row must be 0 to {len(last.raw) - 1}, got {row}")
        return explain_step(
            self.policy.network,
            last.step.row(row),
            raw=last.raw[row],
            observation=last.observation[row],
            blueprints=last.blueprints[row],
            hidden=(last.hidden[0][:, row : row + 1], last.hidden[1][:, row : row + 1]),
            slot_names=self._context.slot_names,
            blueprint_names=self.policy.blueprint_names,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the memory of every row."""
        if self._hidden is None:
            return {"step": self._step, "state": None, "cell": None}
        state, cell = self._hidden
        return {"step": self._step, "state": state.clone(), "cell": cell.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the given step with the given memories."""
        self._step = int(state["step"])
        self._last = None
        if state["state"] is None:
            self._hidden = None
            return
        device = self.policy.network.floors.device
        self._hidden = (state["state"].to(device).clone(), state["cell"].to(device).clone())

    def _draws(self, rows: int) -> Tensor:
        """Return one number per row and head, float64 [rows, 8]."""
        seed, step = self._context.seed, self._step
        return torch.stack(
            [
                torch.rand(
                    len(HEAD_NAMES),
                    generator=generator(seed, row, step, "policy"),
                    dtype=torch.float64,
                )
                for row in range(rows)
            ]
        )

    # The host and the policy may number blueprints differently; names are what they agree on.

    def _own_signals(self, signals: Signals) -> Signals:
        if self._ids is None:
            return signals
        ids = self._ids.to(signals.blueprint.device)
        known = ids[signals.blueprint.clamp(min=0)]
        return replace(signals, blueprint=torch.where(signals.blueprint < 0, -1, known))

    def _own_masks(self, masks: Masks, device: torch.device) -> Masks:
        if self._ids is not None:
            fits = masks.blueprint_by_slot
            own = fits.new_zeros(*fits.shape[:-1], len(self.policy.blueprint_names))
            own[..., self._ids.to(fits.device)] = fits
            masks = replace(masks, blueprint_by_slot=own)
        return masks.to(device)

    def _host_actions(self, step: PolicyStep, device: torch.device) -> dict[str, Tensor]:
        actions = {head: values.clone().to(device) for head, values in step.items()}
        if self._ids is not None:
            # What is chosen fits a slot of the host, so it is one of the host's.
            back = torch.zeros(len(self.policy.blueprint_names), dtype=torch.int64)
            back[self._ids] = torch.arange(len(self._ids))
            actions["blueprint"] = back.to(device)[actions["blueprint"]]
        return actions


@register_controller("greedy")
class GreedyController(LearnedController):
    """The learned controller that always takes the likeliest action; built from its name."""

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> GreedyController:
        """Return the controller that acts greedily by the policy saved in a folder."""
        return cls(_load("greedy", argument), context, greedy=True)


def _load(name: str, argument: str | None) -> Policy:
    if not argument:
        raise UsageError(f"controller {name!r} needs the folder of a policy, as in {name}:FOLDER")
    folder = find_policy(argument)
    try:
        return load_policy(folder)
    except CheckpointError as error:
        # A folder that holds a state is at fault itself; any other was the wrong thing to name.
        if os.path.exists(folder / MANIFEST_FILE):
            raise
        raise UsageError(str(error)) from error


def _blueprint_ids(policy: Policy, context: ControllerContext) -> Tensor | None:
    """Return the policy's id of every blueprint of the host, None where they are the same."""
    own = policy.blueprint_names
    ids = [own.index(name) for name in context.blueprint_names]
    return None if ids == list(range(len(ids))) else torch.tensor(ids)
