"""Progress and round reports of a training run, and its totals over finished rounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.simic.agent.losses import PAID_OFF_TARGET
from esper.simic.training.outcome import RoundOutcome

if TYPE_CHECKING:
    from esper.simic.agent.report import UpdateReport
    from esper.simic.training.evaluation import Evaluation


Phase = Literal["twins", "rollout", "update"]
"""The last step: an epoch of the twins, a step of all rows, or the round's update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One finished round: its episodes, its update, and their times."""

    round: int
    """From 0."""
    env_steps: int
    """Decisions of all rows since the start of the run."""
    outcome: RoundOutcome
    """The episodes."""
    update: UpdateReport
    """The report of the update."""
    paid_off: float
    """Running share of episodes that paid off, after this round."""
    score_rolling: float | None
    """Mean final score of the last ten rounds."""
    merit_rolling: float | None
    """Mean gain over the twin (return, where there is no twin) of the last ten rounds."""
    is_best: bool
    """Whether this is the best policy so far; see `Tally.judge`."""
    stage: int
    """Stage of the curriculum, from 0."""
    timings: Mapping[str, float]
    """Seconds by phase: twins, population, policy, reward, update, evaluation; volatile."""
    evaluation: Evaluation | None = None
    """Greedy evaluation after the update; None if there was none."""

    @property
    def seconds(self) -> float:
        """Time of the whole round."""
        return sum(self.timings.values())

    @property
    def return_mean(self) -> float:
        """Mean raw return of the episodes."""
        return self.outcome.return_mean

    @property
    def gain_mean(self) -> float | None:
        """Mean final score minus the twin's, in points; None without twins."""
        return self.outcome.gain_mean

    @property
    def fossilization_rate(self) -> float | None:
        """Share of the seeds germinated early that were fossilized; None without such seeds."""
        return self.outcome.fossilization_rate

    @property
    def wait_share_free(self) -> float | None:
        """Share of WAIT among the decisions with another legal op."""
        return self.outcome.wait_share_free

    @property
    def explained_variance(self) -> float | None:
        """Explained variance of the critic, without the potential."""
        return self.update.explained_variance

    @property
    def potential_share(self) -> float | None:
        """Share of the returns' variance that the potential explains; None without one."""
        return self.update.potential_share

    @property
    def approx_kl(self) -> float | None:
        """KL between the policy of the round and the updated one."""
        return self.update.approx_kl

    @property
    def conditional_entropies(self) -> dict[str, float | None]:
        """Normalised entropy of every head over its free causal steps, after the update."""
        return conditional_entropies(self.update)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress after one step of training; the state may be saved at each of these."""

    phase: Phase
    round: int
    """Round in progress, or just finished, from 0."""
    rounds: int
    """Number of rounds."""
    step: int
    """Steps of the phase done in this round."""
    steps: int
    """Steps of the phase in a round."""
    env_steps: int
    """Decisions of all rows so far."""
    active: int
    """Rows whose episode still runs."""
    seconds: float
    """Duration of the step; volatile."""
    score_mean: float | None = None
    """Mean validation score of the running rows."""
    gain_mean: float | None = None
    """Mean score minus the twin's of the running rows."""
    op_counts: Mapping[str, int] = field(default_factory=dict)
    """Number of decisions of this step, by op."""
    report: RoundReport | None = None
    """The report of the round, if this step finished it."""

    @property
    def done_share(self) -> float:
        """Share of the run that is done, from 0 to 1, for an ETA."""
        of_round = 0.0
        if self.report is not None:
            of_round = 1.0
        elif self.phase == "rollout" and self.steps:
            of_round = self.step / self.steps
        return min(1.0, (self.round + of_round) / max(1, self.rounds))


def conditional_entropies(update: Any) -> dict[str, float | None]:
    """Return the conditional entropy of every head after the last pass."""
    if not update.heads:
        return {}
    last = max(head["ordinal"] for head in update.heads)
    return {
        head["head"]: head.get("entropy_conditional")
        for head in update.heads
        if head["ordinal"] == last
    }


PAID_OFF_MOMENTUM = 0.9  # Share of a task's old average that a round keeps.
SKILLED_PATIENCE = (
    128  # Patience if the policy succeeds on other tasks, so that it is not at fault.
)
ROLLING_ROUNDS = 10
"""Rounds over which scores and merits are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStanding:
    """Success of growing on a task so far."""

    paid_off: float = 0.0
    """Running share of its episodes that paid off."""
    doubt: float = 0.0
    """From 0 to 1, evidence that waiting is right."""

    @property
    def belief(self) -> float:
        """From 0 to 1, belief that waiting is right: 0 up to half of the evidence."""
        return max(0.0, 2.0 * self.doubt - 1.0)


class Tally:
    """Totals and running averages over finished rounds.

    Args:
        patience: episodes of a task that acted, in rounds that did worse than waiting, after which
            waiting counts as right.
        blueprint_names: names of the blueprints, in action order.
    """

    def __init__(self, patience: int, blueprint_names: Sequence[str]) -> None:
        """Start without a round."""
        self._patience, self._blueprint_names = patience, tuple(blueprint_names)
        self.env_steps = 0
        """Decisions of all rows."""
        self.paid_off = 0.0
        """Running share of episodes that paid off, over all tasks."""
        self._tasks: dict[str, TaskStanding] = {}
        self.fates: dict[str, dict[str, int]] = {}
        """Seeds germinated, fossilized and pruned, by blueprint."""
        self._merits: list[float] = []
        self._scores: list[float] = []
        self._best = -math.inf

    @property
    def score_rolling(self) -> float | None:
        """Mean final score of the last ten rounds; None before the first."""
        return _mean(self._scores) if self._scores else None

    @property
    def merit_rolling(self) -> float | None:
        """Mean gain (return, where there is no twin) of these rounds; None before the first."""
        return _mean(self._merits) if self._merits else None

    def add(self, outcome: RoundOutcome) -> None:
        """Count a finished round."""
        self.env_steps += outcome.env_steps
        self._follow_payers(outcome)
        self._count_fates(outcome)
        gain = outcome.gain_mean
        _push(self._scores, outcome.score_mean)
        _push(self._merits, outcome.return_mean if gain is None else gain)

    def judge(self, merit: float | None) -> bool:
        """Return whether the newest policy is the best so far.

        The gain of an exploring policy says little about its greedy actions, and an average over
        rounds mixes several policies. So policies are judged by greedy episodes on held-out seeds.
        Of equal policies, and before any evaluation, the newest is the best.

        Args:
            merit: mean return of these episodes; None if the policy was not evaluated.
        """
        if merit is None:
            return math.isinf(self._best)
        is_best = merit >= self._best
        self._best = max(merit, self._best)
        return is_best

    def state_dict(self) -> dict[str, Any]:
        """Return all counts as plain data."""
        return {
            "env_steps": self.env_steps,
            "paid_off": self.paid_off,
            "task_standings": {name: dataclasses.asdict(one) for name, one in self._tasks.items()},
            "merits": list(self._merits),
            "scores": list(self._scores),
            "best": None if math.isinf(self._best) else self._best,
            "fates": {name: dict(counts) for name, counts in self.fates.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; entries of others in the mapping are ignored."""
        self.env_steps, self.paid_off = int(state["env_steps"]), float(state["paid_off"])
        standings = state["task_standings"].items()
        self._tasks = {name: TaskStanding(**one) for name, one in standings}
        self._merits, self._scores = list(state["merits"]), list(state["scores"])
        self._best = -math.inf if state["best"] is None else float(state["best"])
        self.fates = {name: dict(counts) for name, counts in state["fates"].items()}

    def settled(self, tasks: Sequence[str]) -> Tensor:
        """Return float32 [R]: how far exploration has succeeded on the tasks of rows.

        It is the share of episodes that pay off, or the belief that waiting is right times
        `PAID_OFF_TARGET`, whichever is larger. Both end the exploration of a task.
        """
        new = TaskStanding()
        known = {name: self._tasks.get(name, new) for name in set(tasks)}
        rates = {
            name: max(one.paid_off, PAID_OFF_TARGET * one.belief) for name, one in known.items()
        }
        return torch.tensor([rates[name] for name in tasks])

    def _follow_payers(self, outcome: RoundOutcome) -> None:
        paid, keep = outcome.paid_off, PAID_OFF_MOMENTUM
        # The first round has no average before it.
        kept = keep if outcome.round else 0.0
        self.paid_off = kept * self.paid_off + (1.0 - kept) * float(paid.double().mean())
        acts = (outcome.decisions["effective_op"] != int(LifecycleOp.WAIT)) & outcome.active
        acted = acts.any(1)
        before = dict(self._tasks)
        for name in dict.fromkeys(outcome.tasks):
            own = torch.tensor([task == name for task in outcome.tasks])
            old = before.get(name)
            share = float(paid[own].double().mean())
            paid_off = share if old is None else keep * old.paid_off + (1.0 - keep) * share
            doubt = 0.0 if old is None else old.doubt
            tried = own & acted
            if bool(tried.any()):
                if float(outcome.returns[tried].mean()) > 0:
                    doubt /= 2.0
                else:
                    doubt = min(
                        1.0, doubt + int(tried.sum()) * self._weight_of_failure(name, before)
                    )
            self._tasks[name] = TaskStanding(paid_off=paid_off, doubt=doubt)

    def _weight_of_failure(self, name: str, standings: Mapping[str, TaskStanding]) -> float:
        """Return the evidence for waiting of one episode that acted and lost.

        A policy that fails everywhere may lack skill. If it succeeds on other tasks it knows how to
        grow, and its failure on this task is stronger evidence.
        """
        others = [one.paid_off for other, one in standings.items() if other != name]
        skill = min(1.0, max(others, default=0.0) / PAID_OFF_TARGET)
        return (1.0 - skill) / self._patience + skill / SKILLED_PATIENCE

    def _count_fates(self, outcome: RoundOutcome) -> None:
        for name, counts in outcome.blueprint_fates(self._blueprint_names).items():
            known = self.fates.setdefault(name, dict.fromkeys(counts, 0))
            for fate, count in counts.items():
                known[fate] += count


def _push(recent: list[float], value: float) -> None:
    """Add a value to the last ten."""
    recent.append(value)
    del recent[:-ROLLING_ROUNDS]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


# ---- A finished round in one line, for logs and terminals


_HEADS_FIRST = ("op", "slot", "blueprint", "tempo")


def round_line(report: RoundReport) -> str:
    """Return a finished round in one line."""
    parts = [f"return {signed(report.return_mean)}"]
    if report.gain_mean is not None:
        parts.append(f"val gain {signed(report.gain_mean)}")
    if report.evaluation is not None:
        parts.append(f"greedy val gain {signed(report.evaluation.val_gain_mean)}")
    parts += [
        f"fossilized {share(report.fossilization_rate)}",
        f"EV {number(report.explained_variance)}{_beside(report.potential_share)}",
        f"KL {number(report.approx_kl)}",
        f"WAIT {share(report.wait_share_free)}",
        f"entropies {entropies_line(report.conditional_entropies)}",
    ]
    return "  ".join(parts)


def _beside(potential_share: float | None) -> str:
    """Return the potential's share of the variance in brackets; nothing without a potential."""
    return "" if potential_share is None else f" (potential {number(potential_share)})"


def entropies_line(entropies: Mapping[str, float | None]) -> str:
    """Return the conditional entropies of the heads, the most important heads first."""
    order = [*_HEADS_FIRST, *(head for head in entropies if head not in _HEADS_FIRST)]
    shown = [f"{head} {number(entropies.get(head))}" for head in order if head in entropies]
    return " ".join(shown) or "–"


def signed(value: float | None) -> str:
    """Format a difference; here and below a missing value is a dash."""
    return f"{value:+.3f}" if value is not None and math.isfinite(value) else "–"


def number(value: float | None) -> str:
    """Format a number with two digits."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.1e}" if value and abs(value) < 1e-3 else f"{value:.2g}"


def share(value: float | None) -> str:
    """Format a share as percent."""
    return f"{100 * value:.0f} %" if value is not None and math.isfinite(value) else "–"
