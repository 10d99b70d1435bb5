"""The rollout: all rows play one episode side by side, one step at a time.

    rollout.start(plan, twins)
    while not rollout.is_done:
        rollout.step()
    outcome = rollout.finish()

A step observes, normalises with frozen statistics, acts, lets the environment live an epoch,
rewards it, and fills the buffer and the traces. A row ends at its horizon or when the governor
rolls it back; from then on it waits in its place, and nothing of it is recorded or learned from.
Between two steps everything can be saved and restored exactly. `Trainer` makes rounds of it.
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
"""What the time of a step is spent on."""


class Rollout:
    """One round of episodes on an environment, resumable between any two steps.

    Args:
        environment: the rows; another with as many may take its place between rounds.
        policy: who decides; its observation statistics are only read.
        reward: what a step pays.
        buffer: what the learner reads; it has as many rows, and steps enough for an episode.
        seed: seed of the run; draws are keyed by it, the round, the row and the step.
        horizon: what reaching the horizon is.
        recorded_rows: rows of which every detail is kept.
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
        """Set memory aside; nothing is played yet."""
        self.policy = policy
        self.buffer = buffer
        self.seed, self.horizon = seed, horizon
        self.rows, self.steps = buffer.rows, buffer.steps
        self.device = environment.device
        self._episodes = Episodes(environment, reward)
        self._policy_seconds = 0.0
        self._traces = RoundTraces(self.rows, self.steps, recorded_rows, self.device)
        self._clamps = ClampCounter(policy.layout, self.device)
        self._act = rollout_step(policy.network, self.rows)
        self._wait = placeholder_actions(self.rows, self.device)
        self._value_scale = torch.ones(self.rows, device=self.device)
        self._hidden: Hidden = policy.network.initial_hidden(self.rows)
        self._free = torch.zeros(self.rows, dtype=torch.bool, device=self.device)
        self._potential = torch.zeros(self.rows, device=self.device)
        self.is_done = True
        """Whether every episode has ended."""
        self.decided = 0
        """Decisions of all rows in this round."""

    @property
    def environment(self) -> Environment:
        """The rows."""
        return self._episodes.environment

    @environment.setter
    def environment(self, environment: Environment) -> None:
        self._episodes.environment = environment

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the round by what they were spent on, the keys of `PHASES`."""
        spent = self._episodes.live_seconds, self._policy_seconds, self._episodes.reward_seconds
        return dict(zip(PHASES, spent, strict=True))

    @property
    def step_count(self) -> int:
        """Steps played in this round."""
        return self._traces.length

    @property
    def active(self) -> Tensor:
        """Bool [R], rows whose episode still runs."""
        return self._episodes.active

    @property
    def gains(self) -> Tensor:
        """float32 [R], score minus the twin's now, NaN without twins."""
        return self.signals.val_score - self._episodes.twin_scores

    @property
    def signals(self) -> Signals:
        """What is seen now."""
        return self._episodes.signals

    @property
    def plan(self) -> RoundPlan:
        """What is being played."""
        return self._episodes.plan

    # ---------------------------------------------------------------------------------- a round

    def start(
        self,
        plan: RoundPlan,
        twins: Tensor | None = None,
        *,
        regression: TwinRegression | None = None,
        value_scale: Tensor | None = None,
    ) -> None:
        """Build every row afresh and live its first epoch.

        Args:
            plan: the rows.
            twins: float32 [rows, epochs], the waiting twin's score after each epoch; None where
                no twin runs.
            regression: what rows that grow are compared with; their own twins alone by default.
            value_scale: float32 [R], what brings the critic's numbers onto the scale of raw
                rewards, for whoever reads the decisions; 1 by default.
        """
        self._refuse_misfit()
        one = torch.ones(self.rows, device=self.device)
        self._value_scale = one if value_scale is None else value_scale.to(one)
        self._act.refresh()
        self.buffer.start()
        self._traces.start()
        self._clamps.start()
        self._policy_seconds = 0.0
        self._episodes.start(plan, twins, regression)
        self._hidden = self.policy.network.initial_hidden(self.rows)
        self._potential = torch.zeros(self.rows, device=self.device)
        self.is_done = False
        self.decided = 0
        self._keep_state()

    def step(self) -> Tensor:
        """Let every row decide and live one epoch; return what was decided, int64 [R]."""
        if self.is_done:
            raise UsageError("every episode has ended; call finish(), then start() a new round")
        started = time.perf_counter()
        with torch.no_grad():
            decided = self._decide(self.signals)
        acted = time.perf_counter()
        transition, paid = self._episodes.step(dict(decided.items()))
        rewarded = time.perf_counter()
        with torch.no_grad():
            self._take_over(transition, decided, paid)
        self._policy_seconds += acted - started + time.perf_counter() - rewarded
        return decided.op

    def finish(self) -> RoundOutcome:
        """Return what the episodes were like."""
        if not self.is_done:
            raise UsageError("some episodes still run; call step() until is_done")
        return self._traces.outcome(self.plan, self._clamps)

    def close(self) -> None:
        """Free what the environment holds."""
        self.environment.close()

    # ------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return everything about the round in progress as plain data and tensors."""
        state, cell = self._hidden
        return {
            **self._episodes.state_dict(),
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
        """Go on with the round that `state_dict` was taken of."""
        self._episodes.load_state_dict(state)
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
        self._episodes.live_seconds, self._policy_seconds, self._episodes.reward_seconds = spent
        self._act.refresh()

    # --------------------------------------------------------------------------------- internals

    def _refuse_misfit(self) -> None:
        """Raise unless environment and policy fit; the environment may change between rounds."""
        served, slots = self.policy.network.config.num_slots, self.environment.num_slots
        if slots > served:
            raise UsageError(
                f"the policy serves {served} slots and the rows have {slots}; "
                f"set policy.num_slots to {slots} or more"
            )
        if self.environment.rows != self.rows:
            raise UsageError(
                f"the rollout is for {self.rows} rows, the environment has {self.environment.rows}"
            )

    def _decide(self, signals: Signals) -> PolicyStep:
        """Return the policy's decision, and put what it was made of into the buffer."""
        raw, state, blueprints = self._observe(signals)
        table = self.policy.network.table
        legal = table.row_masks(self.environment.masks().to(self.device), (self.rows,))
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
            active=self.active,
            potential=self._potential,
        )
        self._clamps.count(raw, state, self.active)
        return decided

    def _observe(self, signals: Signals) -> tuple[Tensor, Tensor, Tensor]:
        raw, blueprints = self.policy.layout.observe(signals, self.device)
        return raw, self.policy.normalizer.normalize(raw), blueprints

    def _forward(self, state: Tensor, legal: Tensor, blueprints: Tensor) -> PolicyStep:
        uniforms = draw_uniforms(
            self.rows, self.seed, self.plan.round, self.step_count, "policy", device=self.device
        )
        return self._act(state, legal, blueprints, self._hidden, uniforms=uniforms)

    def _keep_state(self) -> None:
        panics = self.environment.panics().to(self.device)
        self._traces.keep_state(self.signals, self._episodes.twin_scores, panics)

    def _take_over(self, transition: Transition, decided: PolicyStep, paid: RewardStep) -> None:
        """Put what came of a decision into the buffer and the traces, and see who goes on."""
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
        # One copy to the host: how many decided, and how many go on.
        decided_now, going_on = torch.stack([transition.active.sum(), self.active.sum()]).tolist()
        self.decided += decided_now
        self.is_done = going_on == 0
        # The buffer holds whole episodes; one that does not end within it is a mistake.
        if not self.is_done and self.step_count == self.steps:
            raise UsageError(
                f"a row has not reached its horizon after {self.steps} decisions; "
                "give the environment a horizon of episode_length + 1 epochs"
            )

    def _bootstrap(self, truncated: Tensor) -> None:
        """Value the state after the cut with the carried memory."""
        if not bool(truncated.any()):
            return
        _, state, blueprints = self._observe(self.signals)
        table = self.policy.network.table
        legal = table.row_masks(self.environment.masks().to(self.device), (self.rows,))
        values = self._forward(state, legal, blueprints).value
        rows = truncated.nonzero().squeeze(1)
        self.buffer.set_bootstrap(rows, values[rows], self._potential[rows])
