"""RoundOutcome: figures of the episodes of one round, computed from their traces.

They are tensors over rows on the CPU: returns, gains, lengths, decisions, and the fate of every
seed. Germinations, fossilizations and prunes are derived from the stages of the slots, so that a
removal by the governor, or at the end of a fade, counts like any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from esper.kasmina.signals import Panic
from esper.leyline.actions import LifecycleOp
from esper.leyline.rules import is_in
from esper.leyline.stages import COOLDOWN_STAGES, SeedStage

EARLY_SHARE = 0.6
"""Seeds that germinate in this share of an episode are early: they can still be fossilized."""

_STABILITY_WINDOW = 20


@dataclass(frozen=True, kw_only=True)
class SeedEvents:
    """When seeds germinated, were fossilized or pruned, bool [rows, steps, slots], by decision."""

    germinated: Tensor
    fossilized: Tensor
    pruned: Tensor
    blueprint: Tensor
    """int64 [rows, steps, slots], the seed's blueprint where one of the three is True, else -1."""

    @property
    def germination_step(self) -> Tensor:
        """int64 [rows, slots], the step of a slot's last germination, -1 without one."""
        steps = torch.arange(self.germinated.shape[1]).view(1, -1, 1)
        return torch.where(self.germinated, steps, -1).amax(1)


def find_seed_events(stage: Tensor, blueprint: Tensor, active: Tensor) -> SeedEvents:
    """Find when seeds germinated, were fossilized or pruned.

    Args:
        stage: int64 [rows, steps + 1, slots], before the first decision and after each.
        blueprint: int64, the same shape.
        active: bool [rows, steps], the episode was still running.
    """
    before, after = stage[:, :-1], stage[:, 1:]
    running = active.unsqueeze(-1)
    germinated = running & (before < 0) & (after >= 0)
    fossil = int(SeedStage.FOSSILIZED)
    fossilized = running & (after == fossil) & (before != fossil)
    # A seed that is pruned at once is already embargoed at the end of the step.
    removed = running & is_in(after, COOLDOWN_STAGES) & ~is_in(before, COOLDOWN_STAGES)
    # A slot keeps its blueprint during the cooldown; before germination it may have none.
    kind = torch.where(blueprint[:, 1:] >= 0, blueprint[:, 1:], blueprint[:, :-1])
    happened = germinated | fossilized | removed
    return SeedEvents(
        germinated=germinated,
        fossilized=fossilized,
        pruned=removed,
        blueprint=torch.where(happened, kind, -1),
    )


def panic_names(codes: Tensor) -> list[str | None]:
    """Return the names of `Panic` codes [N]; None for rows that were not rolled back."""
    return [None if code == Panic.NONE else Panic(code).name.lower() for code in codes.tolist()]


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """The episodes of one round."""

    round: int
    tasks: Sequence[str]
    """Task of every row."""
    env_seeds: Sequence[int]
    """Environment seed of every row."""
    slot_names: Mapping[str, Sequence[str]]
    """Names of the slots of every task."""
    decisions: Mapping[str, Tensor]
    """[rows, steps, ...]: actions, effective_op, free, active, reward, terms, ... of every
    decision."""
    states: Mapping[str, Tensor]
    """[rows, steps + 1, ...]: val_score, twin_score, stage, blueprint, params, ... before the first
    decision and after each."""
    term_names: Sequence[str]
    """Names of the columns of `decisions["terms"]`."""
    detail_names: Sequence[str] = ()
    """Names of the columns of `decisions["details"]`."""
    recorded_rows: Sequence[int] = ()
    """Rows whose every step is stored."""
    recorded_decisions: Mapping[str, Tensor] = field(default_factory=dict)
    """[recorded rows, steps, ...], more columns of these rows."""
    recorded_states: Mapping[str, Tensor] = field(default_factory=dict)
    """[recorded rows, steps + 1, ...], every signal of these rows."""
    obs_clamp_share: float = 0.0
    """Share of the observation's entries that were clamped."""
    obs_clamp_features: Mapping[str, float] = field(default_factory=dict)
    """The features that were clamped most often, with their shares."""
    reward_units: Tensor = field(default_factory=lambda: torch.ones(()))
    """[rows], the learner's divisors of rewards; 1 without a learner."""

    # ------------------------------------------------------------------------------- by episode

    @property
    def rows(self) -> int:
        """Number of episodes."""
        return len(self.tasks)

    @property
    def active(self) -> Tensor:
        """Bool [rows, steps]."""
        return self.decisions["active"]

    @cached_property
    def lengths(self) -> Tensor:
        """int64 [rows], decisions of every episode."""
        return self.active.sum(1)

    @property
    def env_steps(self) -> int:
        """Decisions of all episodes."""
        return int(self.lengths.sum())

    @cached_property
    def returns(self) -> Tensor:
        """float64 [rows], sums of raw rewards."""
        return self.decisions["reward"].double().sum(1)

    @property
    def rewards_in_units(self) -> Tensor:
        """[rows, steps], rewards in the learner's units."""
        return self.decisions["reward"] / self.reward_units.reshape(-1, 1)

    @cached_property
    def normalized_returns(self) -> Tensor:
        """float64 [rows], the returns in the learner's units."""
        return self.returns / self.reward_units

    @cached_property
    def final_scores(self) -> Tensor:
        """float64 [rows]."""
        return self.at_end("val_score").double()

    @cached_property
    def twin_scores(self) -> Tensor:
        """float64 [rows], the twin's final score, NaN without one."""
        return self.at_end("twin_score").double()

    @property
    def gains(self) -> Tensor:
        """float64 [rows], final score minus the twin's."""
        return self.final_scores - self.twin_scores

    @property
    def paid_off(self) -> Tensor:
        """Bool [rows], the return is above 0, that of waiting, and the score above the twin's."""
        return (self.returns > 0) & ~(self.gains <= 0)

    @property
    def rolled_back(self) -> Tensor:
        """Bool [rows], the governor ended the episode."""
        return self.at_end("rolled_back")

    @property
    def rollback_reasons(self) -> list[str | None]:
        """Why the governor ended each episode; None if it did not, or if it was not recorded."""
        return panic_names(self.at_end("panic")) if "panic" in self.states else [None] * self.rows

    @property
    def parameters(self) -> Tensor:
        """int64 [rows], trainable parameters at the end."""
        return self.at_end("params")

    @property
    def host_parameters(self) -> Tensor:
        """int64 [rows]."""
        return self.at_end("host_params")

    @property
    def flops(self) -> Tensor:
        """int64 [rows], FLOPs of one sample's forward pass at the end."""
        return self.at_end("flops")

    @property
    def host_flops(self) -> Tensor:
        """int64 [rows], those of the host; 0 for an imagined host."""
        return self.at_end("host_flops")

    @property
    def added_flops(self) -> Tensor:
        """float64 [rows], added FLOPs over the host's; 0 for an imagined host."""
        return (self.flops - self.host_flops).double() / self.host_flops.clamp(min=1).double()

    @cached_property
    def stability(self) -> Tensor:
        """float64 [rows], 1 / (1 + variance of the last twenty rewards)."""
        step = torch.arange(self.active.shape[1])
        ends = self.lengths.unsqueeze(1)
        recent = (step < ends) & (step >= ends - _STABILITY_WINDOW)
        count = recent.sum(1).clamp(min=1)
        reward = self.decisions["reward"].double()
        mean = torch.where(recent, reward, 0.0).sum(1) / count
        spread = torch.where(recent, reward - mean.unsqueeze(1), 0.0).square().sum(1) / count
        return 1.0 / (1.0 + spread)

    @property
    def running_best(self) -> Tensor:
        """float64 [rows], best validation score of every episode."""
        scores = self.states["val_score"].double()
        lived = torch.arange(scores.shape[1]) <= self.lengths.unsqueeze(1)
        return torch.where(lived, scores, -math.inf).amax(1)

    def at_end(self, name: str) -> Tensor:
        """Return a state [rows, ...] at the end of every episode."""
        values = self.states[name]
        return values[torch.arange(len(values)), self.lengths]

    # ------------------------------------------------------------------------------------- seeds

    @cached_property
    def seeds(self) -> SeedEvents:
        """When seeds germinated, were fossilized or pruned."""
        return find_seed_events(self.states["stage"], self.states["blueprint"], self.active)

    @cached_property
    def early_seeds(self) -> Tensor:
        """int64 [rows, 2]: seeds germinated early, and those of them that were fossilized."""
        seeds = self.seeds
        step = torch.arange(self.active.shape[1]).view(1, -1, 1)
        # A share of the horizon, also where a rollback ended the episode before it.
        horizon = (self.at_end("max_epochs") - 1).view(-1, 1, 1)
        early = seeds.germinated & (step < EARLY_SHARE * horizon)
        # A fossil stays, so it is the last seed that germinated in its slot.
        last = seeds.germination_step
        kept = seeds.fossilized.any(1) & (last >= 0) & (last < EARLY_SHARE * horizon.squeeze(-1))
        return torch.stack([early.sum((1, 2)), kept.sum(1)], dim=1)

    @cached_property
    def contributing(self) -> Tensor:
        """int64 [rows], seeds whose contribution was positive when they were fossilized."""
        worth = self.states["contribution"][:, :-1]
        return (self.seeds.fossilized & (worth > 0)).sum((1, 2))

    def blueprint_fates(self, names: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return how many seeds of every blueprint germinated, were fossilized and were pruned."""
        seeds = self.seeds
        counts = {
            fate: torch.bincount(seeds.blueprint[where].clamp(min=0), minlength=len(names))
            for fate, where in (
                ("germinated", seeds.germinated),
                ("fossilized", seeds.fossilized),
                ("pruned", seeds.pruned),
            )
        }
        return {
            name: {fate: int(count[index]) for fate, count in counts.items()}
            for index, name in enumerate(names)
            if any(int(count[index]) for count in counts.values())
        }

    # --------------------------------------------------------------------------------- the round

    @property
    def return_mean(self) -> float:
        """Mean raw return."""
        return float(self.returns.mean())

    @property
    def return_std(self) -> float:
        """Standard deviation of the returns."""
        return float(self.returns.std(correction=0))

    @property
    def score_mean(self) -> float:
        """Mean final score."""
        return float(self.final_scores.mean())

    @property
    def gain_mean(self) -> float | None:
        """Mean gain over the twin, None without twins."""
        gain = float(self.gains.mean())
        return None if math.isnan(gain) else gain

    @property
    def fossilization_rate(self) -> float | None:
        """Share of the early seeds that were fossilized, None where there were none."""
        early, kept = self.early_seeds.sum(0).tolist()
        return kept / early if early else None

    @cached_property
    def free(self) -> Tensor:
        """Bool [rows, steps], decisions with more than one legal op."""
        return self.decisions["free"] & self.active

    @property
    def wait_share_free(self) -> float | None:
        """Share of WAIT among the free decisions."""
        return self._share_of_wait("op")

    @property
    def idle_share_free(self) -> float | None:
        """Share of the free decisions that had no effect."""
        return self._share_of_wait("effective_op")

    def _share_of_wait(self, name: str) -> float | None:
        count = int(self.free.sum())
        waits = self.free & (self.decisions[name] == int(LifecycleOp.WAIT))
        return int(waits.sum()) / count if count else None

    @cached_property
    def _op_counts(self) -> Tensor:
        """int64 [rows, ops]."""
        ops = torch.arange(len(LifecycleOp))
        return ((self.decisions["op"].unsqueeze(-1) == ops) & self.active.unsqueeze(-1)).sum(1)

    def op_counts(self) -> dict[str, int]:
        """Return how often every op was taken."""
        counts = self._op_counts.sum(0).tolist()
        return {op.name: counts[op] for op in LifecycleOp}

    def op_counts_by_row(self) -> list[dict[str, int]]:
        """Return how often every op was taken in each row."""
        return [{op.name: counts[op] for op in LifecycleOp} for counts in self._op_counts.tolist()]

    def reward_by_op(self) -> dict[str, dict[str, float]]:
        """Return the number of decisions and their mean raw reward, by op."""
        ops = self.decisions["op"][self.active]
        rewards = self.decisions["reward"][self.active].double()
        counts = torch.bincount(ops, minlength=len(LifecycleOp))
        sums = torch.zeros(len(LifecycleOp), dtype=torch.float64).index_add(0, ops, rewards)
        return {
            op.name: {"n": int(counts[op]), "mean": float(sums[op] / counts[op])}
            for op in LifecycleOp
            if int(counts[op])
        }

    def term_table(self) -> dict[str, dict[str, float]]:
        """Return every reward term's mean per decision, and its share of the absolute reward."""
        sums, count = self.decisions["terms"].double().sum((0, 1)), self.env_steps
        shares = self.term_shares()
        return {
            name: {"mean": float(total) / count, "share": shares[name]}
            for name, total in zip(self.term_names, sums, strict=True)
        }

    def term_sums(self) -> list[dict[str, float]]:
        """Return the sum of every reward term over each episode."""
        sums = self.decisions["terms"].double().sum(1).tolist()
        return [dict(zip(self.term_names, row, strict=True)) for row in sums]

    def term_shares(self) -> dict[str, float]:
        """Return every reward term's share of the sum of all absolute terms."""
        sizes = self.decisions["terms"].double().abs().sum((0, 1))
        whole = float(sizes.sum())
        return {
            name: float(size) / whole if whole else 0.0
            for name, size in zip(self.term_names, sizes, strict=True)
        }

    def detail(self, name: str) -> Tensor | None:
        """Return one detail of the reward [rows, steps]; None if the reward does not have it."""
        if name not in self.detail_names:
            return None
        return self.decisions["details"][..., list(self.detail_names).index(name)]
