"""What a training run tells while it runs, and what it has come to over its finished rounds."""

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
"""What was just done: an epoch of the waiting twins, a step of all rows, or the round's update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One finished round: its episodes, the update that followed, and what both cost."""

    round: int
    """From 0."""
    env_steps: int
    """Decisions of all rows since the start of the run."""
    outcome: RoundOutcome
    """The episodes."""
    update: UpdateReport
    """The learner's own report."""
    paid_off: float
    """Running share of episodes that paid off, after this round."""
    score_rolling: float | None
    """Mean final score of the last ten rounds."""
    merit_rolling: float | None
    """Mean gain over the twin (return, where there is no twin) of the last ten rounds."""
    is_best: bool
    """Whether no earlier policy did better where policies were judged; see `Tally.judge`."""
    stage: int
    """Stage of the curriculum that the round belonged to, from 0."""
    timings: Mapping[str, float]
    """Seconds by phase: twins, population, policy, reward, update, evaluation; volatile."""
    evaluation: Evaluation | None = None
    """What greedy episodes after the update brought, where they were played."""

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
        """Share of WAIT among the decisions in which something else was legal."""
        return self.outcome.wait_share_free

    @property
    def explained_variance(self) -> float | None:
        """How much the critic foresaw of what it is to foresee, the potential left out."""
        return self.update.explained_variance

    @property
    def potential_share(self) -> float | None:
        """How much of the returns' variance the reward's potential explains; None without one."""
        return self.update.potential_share

    @property
    def approx_kl(self) -> float | None:
        """KL from the round's policy, after the update."""
        return self.update.approx_kl

    @property
    def conditional_entropies(self) -> dict[str, float | None]:
        """Normalised entropy of every head over its free causal steps, after the update."""
        return conditional_entropies(self.update)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where training stands; the state may be saved at each of these."""

    phase: Phase
    round: int
    """Round in progress, or just finished, from 0."""
    rounds: int
    """Rounds planned."""
    step: int
    """Steps of the phase done in this round."""
    steps: int
    """Steps of the phase in a round."""
    env_steps: int
    """Decisions of all rows so far."""
    active: int
    """Rows whose episode still runs."""
    seconds: float
    """Time the step took; volatile."""
    score_mean: float | None = None
    """Mean validation score of the running rows."""
    gain_mean: float | None = None
    """Mean score minus the twin's of the running rows."""
    op_counts: Mapping[str, int] = field(default_factory=dict)
    """What was decided in this step, by op."""
    report: RoundReport | None = None
    """The round, when it has just been finished."""

    @property
    def done_share(self) -> float:
        """How much of the run is done, from 0 to 1; what an ETA is made of."""
        if self.report is not None:
            return min(1.0, (self.round + 1) / max(1, self.rounds))
        inside = 0.0
        if self.phase == "rollout" and self.steps:
            inside = self.step / self.steps
        return min(1.0, (self.round + inside) / max(1, self.rounds))


def conditional_entropies(update: Any) -> dict[str, float | None]:
    """Return the conditional entropy of every head in the last optimisation epoch."""
    if not update.heads:
        return {}
    last = max(head["ordinal"] for head in update.heads)
    return {
        head["head"]: head.get("entropy_conditional")
        for head in update.heads
        if head["ordinal"] == last
    }


PAID_OFF_MOMENTUM = 0.9  # Share of a task's old average that a round keeps.
SKILLED_PATIENCE = 128  # Patience where the policy succeeds on other tasks: it could, if it paid.
ROLLING_ROUNDS = 10
"""Rounds over which scores and merits are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStanding:
    """How far a task is settled."""

    paid_off: float = 0.0
    """Running share of its episodes that paid."""
    doubt: float = 0.0
    """From 0 to 1, how much of what it takes to believe that waiting is right was seen."""

    @property
    def belief(self) -> float:
        """From 0 to 1, how far waiting counts as right: not at all up to half of the evidence."""
        return max(0.0, 2.0 * self.doubt - 1.0)


class Tally:
    """Adds up finished rounds.

    Args:
        patience: acting episodes of a task, in rounds that did worse than waiting, after which
            waiting counts as right there.
        blueprint_names: names of the blueprints, in action order.
    """

    def __init__(self, patience: int, blueprint_names: Sequence[str]) -> None:
        """Start without a round."""
        self._patience, self._blueprint_names = patience, tuple(blueprint_names)
        self.env_steps = 0
        """Decisions of all rows."""
        self.paid_off = 0.0
        """Running share of episodes that paid, over all tasks."""
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

        What an exploring policy gains says little of its likeliest actions, and an average over
        rounds belongs to no policy. So policies are judged by greedy episodes on seeds set aside
        for that; of equals, and while none was judged, the newest is the best.

        Args:
            merit: mean return of these episodes; None where the policy was not judged.
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
        """Restore what `state_dict` returned; other entries are left alone."""
        self.env_steps, self.paid_off = int(state["env_steps"]), float(state["paid_off"])
        standings = state["task_standings"].items()
        self._tasks = {name: TaskStanding(**one) for name, one in standings}
        self._merits, self._scores = list(state["merits"]), list(state["scores"])
        self._best = -math.inf if state["best"] is None else float(state["best"])
        self.fates = {name: dict(counts) for name, counts in state["fates"].items()}

    def settled(self, tasks: Sequence[str]) -> Tensor:
        """Return float32 [R]: how far the tasks of rows are settled, as a share of payers.

        It is the share of episodes that pay off, or as much as the belief that waiting is right
        stands for: what curiosity ends by, either way.
        """
        new = TaskStanding()
        known = {name: self._tasks.get(name, new) for name in set(tasks)}
        rates = {
            name: max(one.paid_off, PAID_OFF_TARGET * one.belief) for name, one in known.items()
        }
        return torch.tensor([rates[name] for name in tasks])

    def _follow_payers(self, outcome: RoundOutcome) -> None:
        paid, keep = outcome.paid_off, PAID_OFF_MOMENTUM
        # The first round has no share before it to be averaged with.
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
        """Return how much an episode that acted and lost says for waiting on a task.

        A policy that fails everywhere may only be unskilled; one that succeeds elsewhere knows how
        to grow, and where it still fails there is nothing to be had.
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


# ---- A finished round in one line, for logs and terminals, and how its figures are written


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
    """Return what the reward's potential explains, where there is one."""
    return "" if potential_share is None else f" (potential {number(potential_share)})"


def entropies_line(entropies: Mapping[str, float | None]) -> str:
    """Return the heads' entropies where they had a choice, those that matter most first."""
    order = [*_HEADS_FIRST, *(head for head in entropies if head not in _HEADS_FIRST)]
    told = [f"{head} {number(entropies.get(head))}" for head in order if head in entropies]
    return " ".join(told) or "–"


def signed(value: float | None) -> str:
    """Return a difference; a dash where nothing was measured, here and below."""
    return f"{value:+.3f}" if value is not None and math.isfinite(value) else "–"


def number(value: float | None) -> str:
    """Return a number in two digits, however small."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.1e}" if value and abs(value) < 1e-3 else f"{value:.2g}"


def share(value: float | None) -> str:
    """Return a share in percent."""
    return f"{100 * value:.0f} %" if value is not None and math.isfinite(value) else "–"
