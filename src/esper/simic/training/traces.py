"""Records the decisions and states of a round while its episodes are played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import CheckpointError, UsageError
from esper.leyline.records import copy_fields
from esper.leyline.signals import Signals
from esper.simic.agent.report import ClampCounter
from esper.simic.rewards.contract import RewardStep, Transition
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.row_source import RoundPlan
from esper.tamiyo.networks.decision import PolicyStep


class Trace:
    """Named tensors [rows, steps, ...], filled step by step.

    The first `put` of a name in a round fixes its shape and type; missing steps are zero.

    Args:
        rows: number of rows.
        steps: most steps of a round.
    """

    def __init__(self, rows: int, steps: int) -> None:
        """Start empty."""
        self.rows, self.steps = rows, steps
        self.length = 0
        self._kept: dict[str, Tensor] = {}

    def start(self) -> None:
        """Start a new round; tensors are reused."""
        self.length = 0
        for tensor in self._kept.values():
            tensor.zero_()

    def put(self, step: int, values: Mapping[str, Tensor]) -> None:
        """Write the values of a step, one tensor [rows, ...] per name."""
        if not 0 <= step < self.steps:
            raise UsageError(f"a trace of {self.steps} steps has no step {step}")
        for name, value in values.items():
            kept = self._kept.get(name)
            if kept is None or (self.length == 0 and kept.shape[2:] != value.shape[1:]):
                kept = value.new_zeros((self.rows, self.steps, *value.shape[1:]))
                self._kept[name] = kept
            kept[:, step] = value
        self.length = max(self.length, step + 1)

    def read(self) -> dict[str, Tensor]:
        """Return copies on the CPU, [rows, length, ...], of all steps so far."""
        return {name: kept[:, : self.length].cpu().clone() for name, kept in self._kept.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far."""
        return {"length": self.length, "kept": self.read()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Restore what `state_dict` returned, on this device."""
        self._kept = {}
        self.length = int(state["length"])
        if self.length > self.steps:
            raise CheckpointError(
                f"the saved round has {self.length} steps, this one has at most {self.steps}"
            )
        for name, saved in state["kept"].items():
            if len(saved) != self.rows:
                raise CheckpointError(
                    f"the saved round has {len(saved)} rows, this one has {self.rows}"
                )
            shape = (self.rows, self.steps, *saved.shape[2:])
            kept = torch.zeros(shape, dtype=saved.dtype, device=device)
            kept[:, : self.length] = saved.to(device)
            self._kept[name] = kept


KEPT_STATES = (
    "val_score",
    "params",
    "host_params",
    "flops",
    "host_flops",
    "max_epochs",
    "rolled_back",
    "stage",
    "blueprint",
    "contribution",
)
"""Signals that are kept of every row; recorded rows keep all signals."""


class RoundTraces:
    """The traces of one round, filled step by step.

    Args:
        rows: number of rows.
        steps: most decisions of an episode.
        recorded_rows: rows of which every signal and decision is kept.
        device: device of the tensors.
    """

    def __init__(
        self, rows: int, steps: int, recorded_rows: Sequence[int], device: torch.device | str
    ) -> None:
        """Start empty."""
        self.recorded_rows = tuple(recorded_rows)
        self._device = device
        self._decisions = Trace(rows, steps)
        self._states = Trace(rows, steps + 1)
        self._detailed_decisions = Trace(len(self.recorded_rows), steps)
        self._detailed_states = Trace(len(self.recorded_rows), steps + 1)
        self._chosen = torch.tensor(self.recorded_rows, dtype=torch.int64, device=device)
        self._term_names: tuple[str, ...] = ()
        self._detail_names: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Number of decisions of this round so far."""
        return self._decisions.length

    def start(self) -> None:
        """Start a new round; tensors are reused."""
        for trace in self._all():
            trace.start()

    def keep_decision(
        self,
        transition: Transition,
        decided: PolicyStep,
        paid: RewardStep,
        *,
        free: Tensor,
        potential: Tensor,
        value_scale: Tensor,
    ) -> None:
        """Record a decision of all rows and its reward.

        Args:
            transition: the transition that followed.
            decided: the decision.
            paid: its reward.
            free: bool [R], more than one op was legal.
            potential: float32 [R], the reward's potential before the decision.
            value_scale: float32 [R], factor from the critic's output to raw rewards.
        """
        number = self.length
        self._follow_names(paid)
        kept = decision_columns(transition, decided.op, paid, free=free)
        if paid.details:
            kept["details"] = torch.stack([each.float() for each in paid.details.values()], dim=1)
        self._decisions.put(number, kept)
        if not self.recorded_rows:
            return
        rows = self._chosen
        self._detailed_decisions.put(
            number,
            {
                "actions": decided.actions[rows],
                "valid": decided.masks[rows].sum(-1),
                "choice_log_probs": decided.choice_log_probs[rows],
                "log_probs": decided.log_probs[rows],
                "value": decided.value[rows] * value_scale[rows],
                "q_taken": value_scale[rows]
                * decided.op_values[rows].gather(1, decided.op[rows, None]).squeeze(1),
                "potential": potential[rows],
            },
        )

    def _follow_names(self, paid: RewardStep) -> None:
        """Keep the names of the reward's terms and details; they may not change in a round."""
        names = tuple(paid.terms), tuple(paid.details)
        if self.length and names != (self._term_names, self._detail_names):
            was = (*self._term_names, *self._detail_names)
            changed = sorted({*was} ^ {*names[0], *names[1]}) or ["their order"]
            raise UsageError(
                "a reward must pay the same terms and details in every step of a round, 0 where "
                f"there is nothing to pay; these came or went: {', '.join(changed)}"
            )
        self._term_names, self._detail_names = names

    def keep_state(self, signals: Signals, twin_scores: Tensor, panics: Tensor) -> None:
        """Record the state before the first decision, or after the last one.

        Args:
            signals: signals of all rows.
            twin_scores: float32 [R], scores of the twins at the same epoch.
            panics: int64 [R], a `Panic`, why the governor rolled a row back.
        """
        number = self.length
        kept = {**state_columns(signals, twin_scores), "panic": panics}
        self._states.put(number, kept)
        if self.recorded_rows:
            every = signals.select(self._chosen).state_dict()
            every["twin_score"] = twin_scores[self._chosen]
            self._detailed_states.put(number, every)

    def outcome(self, plan: RoundPlan, clamps: ClampCounter) -> RoundOutcome:
        """Return the outcome of the round with this plan."""
        return copy_fields(
            RoundOutcome,
            plan,
            decisions=self._decisions.read(),
            states=self._states.read(),
            term_names=self._term_names,
            detail_names=self._detail_names,
            recorded_rows=self.recorded_rows,
            recorded_decisions=self._detailed_decisions.read(),
            recorded_states=self._detailed_states.read(),
            obs_clamp_share=clamps.share,
            obs_clamp_features=clamps.worst(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything recorded so far."""
        return {
            "traces": [trace.state_dict() for trace in self._all()],
            "term_names": list(self._term_names),
            "detail_names": list(self._detail_names),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; entries of others in the mapping are ignored."""
        for trace, saved in zip(self._all(), state["traces"], strict=True):
            trace.load_state_dict(saved, self._device)
        self._term_names = tuple(state["term_names"])
        self._detail_names = tuple(state["detail_names"])

    def _all(self) -> tuple[Trace, ...]:
        return (self._decisions, self._states, self._detailed_decisions, self._detailed_states)


def decision_columns(
    transition: Transition, op: Tensor, paid: RewardStep, *, free: Tensor
) -> dict[str, Tensor]:
    """Return the recorded columns of a decision, each [R, ...]."""
    return {
        "op": op,
        "effective_op": transition.effective_op,
        "took_effect": transition.after.last_success,
        "free": free,
        "active": transition.active,
        "reward": paid.total,
        "terms": torch.stack(list(paid.terms.values()), dim=1),
    }


def state_columns(signals: Signals, twin_scores: Tensor) -> dict[str, Tensor]:
    """Return the recorded columns of a state, each [R, ...]."""
    kept = {name: getattr(signals, name) for name in KEPT_STATES}
    return {**kept, "twin_score": twin_scores}
