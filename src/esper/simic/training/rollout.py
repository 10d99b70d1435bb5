"""The rollout: all rows play one episode side by side, one step at a time.

    rollout.start(plan, twins)
    while not rollout.is_done:
        rollout.step()
    outcome = rollout.finish()

A step observes, normalises with frozen statistics, acts, trains an epoch, computes rewards, and
fills the buffer and the traces. An episode ends at its horizon or when the governor rolls the row
back; from then on the row waits, and nothing of it is recorded or learned from. Between two steps
everything can be saved and restored exactly. `Trainer` runs one rollout per round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import placeholder_actions
from esper.leyline.errors import UsageError
from esper.leyline.signals import Signals
from esper.simic.agent.report import ClampCounter
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.rewards.contract import Reward, RewardStep, Transition
from esper.simic.training.config import Horizon
from esper.simic.training.episodes import Episodes, TwinRegression
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.row_source import Environment, RoundPlan, draw_uniforms
from esper.simic.training.traces import RoundTraces
from esper.tamiyo.controllers.policy_file import Policy
from esper.tamiyo.networks.decision import OP_ROW, PolicyStep
from esper.tamiyo.networks.layers import Hidden
from esper.tamiyo.networks.policy_step import rollout_step

PHASES = ("population", "policy", "reward")
"""The parts that a step's time is divided into."""


class Rollout:
    """One round of episodes on an environment, resumable between any two steps.

    Args:
        environment: the rows.
        policy: chooses the actions; its observation statistics are only read.
        reward: computes the reward of a step.
        buffer: filled for the learner; it has as many rows, and as many steps as an episode.
        seed: seed of the run; draws are keyed by it, the round, the row and the step.
        horizon: whether an episode terminates at its horizon or is truncated.
        recorded_rows: rows of which every signal and decision is kept.
    """

    def __init__(
        self,
        environment: Environment,
        policy: Policy,
        reward: Reward,
        buffer: TamiyoRolloutBuffer,
        *,
        seed: int,
        horizon: Horizon = "terminate",
        recorded_rows: Sequence[int] = (),
    ) -> None:
        """Allocate memory; `start` builds the rows."""
        self.policy = policy
        self.buffer = buffer
        self.seed, self.horizon = seed, horizon
        self.rows, self.steps = buffer.rows, buffer.steps
        self.device = environment.device
        self.episodes = Episodes(environment, reward)
        """The rows; between rounds they may get another environment."""
        self._policy_seconds = 0.0
        self._traces = RoundTraces(self.rows, self.steps, recorded_rows, self.device)
        self._clamps = ClampCounter(policy.layout, self.device)
        self._act = rollout_step(policy.network, self.rows)
        self._wait = placeholder_actions(self.rows, self.device)
        self._hidden: Hidden
        self._free: Tensor
        self.is_done = True
        """Whether every episode has ended."""
        self.decided = 0
        """Decisions of all rows in this round."""

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the round by part, the keys of `PHASES`."""
        spent = self.episodes.live_seconds, self._policy_seconds, self.episodes.reward_seconds
        return dict(zip(PHASES, spent, strict=True))

    @property
    def step_count(self) -> int:
        """Steps played in this round."""
        return self._traces.length

    # ---------------------------------------------------------------------------------- a round

    def start(
        self,
        plan: RoundPlan,
        twins: Tensor | None = None,
        *,
        regression: TwinRegression | None = None,
        value_scale: Tensor | None = None,
    ) -> None:
        """Build every row anew and train its first epoch.

        Args:
            plan: tasks and seeds of the rows.
            twins: scores of the twins, as in `Episodes.start`.
            regression: as in `Episodes.start`.
            value_scale: float32 [R], factor from the critic's output to raw rewards, for the
                recorded decisions; 1 by default.
        """
        self._refuse_misfit()
        one = torch.ones(self.rows, device=self.device)
        self._value_scale = one if value_scale is None else value_scale.to(one)
        self._act.refresh()
        self.buffer.start()
        self._traces.start()
        self._clamps.start()
        self._policy_seconds = 0.0
        self.episodes.start(plan, twins, regression)
        self._hidden = self.policy.network.initial_hidden(self.rows)
        self._potential = torch.zeros(self.rows, device=self.device)
        self.is_done = False
        self.decided = 0
        self._keep_state()

    def step(self) -> Tensor:
        """Choose actions, train one epoch in every row, and return the ops, int64 [R]."""
        if self.is_done:
            raise UsageError("every episode has ended; call finish(), then start() a new round")
        started = time.perf_counter()
        with torch.no_grad():
            decided = self._decide(self.episodes.signals)
        acted = time.perf_counter()
        transition, paid = self.episodes.step(dict(decided.items()))
        rewarded = time.perf_counter()
        with torch.no_grad():
            self._take_over(transition, decided, paid)
        self._policy_seconds += acted - started + time.perf_counter() - rewarded
        return decided.op

    def finish(self) -> RoundOutcome:
        """Return the outcome of the finished episodes."""
        if not self.is_done:
            raise UsageError("some episodes still run; call step() until is_done")
        return self._traces.outcome(self.episodes.plan, self._clamps)

    def close(self) -> None:
        """Close the environment."""
        self.episodes.environment.close()

    # ------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the round in progress as plain data and tensors."""
        state, cell = self._hidden
        return {
            **self.episodes.state_dict(),
            "value_scale": self._value_scale.cpu(),
            "buffer": self.buffer.state_dict(),
            "hidden": [state.cpu().clone(), cell.cpu().clone()],
            "potential": self._potential.cpu().clone(),
            "is_done": self.is_done,
            "decided": self.decided,
            "clamps": self._clamps.state_dict(),
            **self._traces.state_dict(),
            "timings": self.timings,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the round that `state_dict` was taken of."""
        self.episodes.load_state_dict(state)
        self._value_scale = state["value_scale"].to(self.device)
        self.buffer.load_state_dict(state["buffer"])
        hidden = [part.to(self.device) for part in state["hidden"]]
        self._hidden = (hidden[0], hidden[1])
        self._potential = state["potential"].to(self.device)
        self.is_done = bool(state["is_done"])
        self.decided = int(state["decided"])
        self._clamps.load_state_dict(state["clamps"])
        self._traces.load_state_dict(state)
        spent = [float(state["timings"][phase]) for phase in PHASES]
        self.episodes.live_seconds, self._policy_seconds, self.episodes.reward_seconds = spent
        self._act.refresh()

    # --------------------------------------------------------------------------------- internals

    def _refuse_misfit(self) -> None:
        """Raise unless environment and policy fit; the environment may change between rounds."""
        environment = self.episodes.environment
        served, slots = self.policy.network.config.num_slots, environment.num_slots
        if slots > served:
            raise UsageError(
                f"the policy serves {served} slots and the rows have {slots}; "
                f"set policy.num_slots to {slots} or more"
            )
        if environment.rows != self.rows:
            raise UsageError(
                f"the rollout is for {self.rows} rows, the environment has {environment.rows}"
            )

    def _decide(self, signals: Signals) -> PolicyStep:
        """Return the policy's decision, and write it and its inputs into the buffer."""
        raw, state, blueprints = self._observe(signals)
        table, active = self.policy.network.table, self.episodes.active
        legal = self._legal()
        ops = legal[:, OP_ROW, : table.sizes["op"]]
        self._free = ops.sum(1) > 1
        decided = self._forward(state, legal, blueprints)
        # The memory of a graph is overwritten by its next replay.
        decided = decided.clone() if self.device.type == "cuda" else decided
        self.buffer.add_decision(
            raw_state=raw,
            state=state,
            blueprint_indices=blueprints,
            hidden=self._hidden,
            step=decided,
            base_masks=table.select(legal, table.rows_of(self._wait["op"], self._wait["slot"])),
            available=(ops.unsqueeze(-1) & table.causal).any(1),
            free=self._free,
            active=active,
            potential=self._potential,
        )
        self._clamps.count(raw, state, active)
        return decided

    def _legal(self) -> Tensor:
        """Return the masks of every row, as the network's table lays them out."""
        masks = self.episodes.environment.masks().to(self.device)
        return self.policy.network.table.row_masks(masks, (self.rows,))

    def _observe(self, signals: Signals) -> tuple[Tensor, Tensor, Tensor]:
        raw, blueprints = self.policy.layout.observe(signals, self.device)
        return raw, self.policy.normalizer.normalize(raw), blueprints

    def _forward(self, state: Tensor, legal: Tensor, blueprints: Tensor) -> PolicyStep:
        uniforms = draw_uniforms(
            self.rows,
            *(self.seed, self.episodes.plan.round, self.step_count, "policy"),
            device=self.device,
        )
        return self._act(state, legal, blueprints, self._hidden, uniforms=uniforms)

    def _keep_state(self) -> None:
        episodes = self.episodes
        panics = episodes.environment.panics().to(self.device)
        self._traces.keep_state(episodes.signals, episodes.twin_scores, panics)

    def _take_over(self, transition: Transition, decided: PolicyStep, paid: RewardStep) -> None:
        """Write the outcome of a decision into buffer and traces, and update what still runs."""
        ended = transition.ended
        is_cut = self.horizon == "bootstrap"
        truncated = ended & ~transition.after.rolled_back if is_cut else torch.zeros_like(ended)
        self.buffer.add_outcome(
            reward=paid.total,
            effective_op=transition.effective_op,
            terminated=ended & ~truncated,
            truncated=truncated,
        )
        self._hidden = decided.hidden
        self._traces.keep_decision(
            transition,
            decided,
            paid,
            free=self._free,
            potential=self._potential,
            value_scale=self._value_scale,
        )
        if paid.potential is not None:
            self._potential = paid.potential.to(torch.float32)
        self._keep_state()
        if is_cut:
            self._bootstrap(truncated)
        # One copy to the host for both counts.
        decided_now, going_on = torch.stack(
            [transition.active.sum(), self.episodes.active.sum()]
        ).tolist()
        self.decided += decided_now
        self.is_done = going_on == 0
        # The buffer holds whole episodes, so each must end within it.
        if not self.is_done and self.step_count == self.steps:
            raise UsageError(
                f"a row has not reached its horizon after {self.steps} decisions; "
                "give the environment a horizon of episode_length + 1 epochs"
            )

    def _bootstrap(self, truncated: Tensor) -> None:
        """Write the critic's value of the state after a truncation into the buffer."""
        if not bool(truncated.any()):
            return
        _, state, blueprints = self._observe(self.episodes.signals)
        values = self._forward(state, self._legal(), blueprints).value
        rows = truncated.nonzero().squeeze(1)
        self.buffer.set_bootstrap(rows, values[rows], self._potential[rows])
