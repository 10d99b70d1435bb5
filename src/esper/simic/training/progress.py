"""What a training run tells while it runs.

There is a `Progress` after every step and a `RoundReport` after every round. Whoever shows or
records training reads these; nothing else is shared between the loop and its views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from esper.simic.agent.report import UpdateReport
    from esper.simic.training.evaluation import Evaluation
    from esper.simic.training.outcome import RoundOutcome

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
    success: float
    """Running share of episodes that paid, after this round."""
    score_rolling: float
    """Mean final score of the last ten rounds."""
    merit_rolling: float
    """Mean gain over the twin (return, where there is no twin) of the last ten rounds."""
    is_best: bool
    """Whether no earlier round had a higher `merit_rolling`."""
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
    def score_mean(self) -> float:
        """Mean final validation score."""
        return self.outcome.score_mean

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
        """How much of the returns the critic foresaw."""
        return self.update.explained_variance

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
