"""The best return a problem allows, by backward induction, and a plan that earns it.

One seed at a time lives and everything is deterministic, so what can still be earned depends on
little: the step, what the one seed is and how far it has come, and when a scaffold ended. The
amplitude never pays, so a blend that is not the fastest one to 1 earns nothing extra and is left
out, as are seeds that another one of the same step beats at no disadvantage. The tests compare
this with every legal action of tiny problems, and play the plan in the problem itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.problems.base import Problem
from esper.leyline.actions import HEAD_NAMES, PLACEHOLDERS, LifecycleOp
from esper.leyline.stages import ALPHA_TARGETS, TEMPO_EPOCHS, SeedStage

_TEMPO = TEMPO_EPOCHS.index(min(TEMPO_EPOCHS))
_TICKS = min(TEMPO_EPOCHS)
_NEVER = -1


class Seed(NamedTuple):
    """What a seed is, as far as it matters for the return."""

    slot: int
    blueprint: int
    worth: float
    """What it pays when it is fossilized."""
    is_scaffold: bool
    """Whether its end opens the way for others."""


class Place(NamedTuple):
    """Where a row stands before a decision."""

    stage: SeedStage
    passed: int = 0
    """Epochs of TRAINING, ticks of the ramp, or ticks of the cooldown, as far as they matter."""
    age: int = 0
    """Epochs lived, as far as they matter."""
    seed: Seed | None = None
    scaffolded: int = _NEVER
    """Step at which the first scaffold ended."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best return and one way to it."""

    value: float
    """Sum of the rewards of an episode."""
    plan: tuple[dict[str, int], ...]
    """The action of every step, by head."""

    def action(self, step: int, rows: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return the same action of the plan for every row."""
        return {
            head: torch.full((rows,), index, dtype=torch.int64, device=device)
            for head, index in self.plan[step].items()
        }


class _Choice(NamedTuple):
    op: LifecycleOp
    paid: float
    then: Place
    seed: Seed | None = None


def find_optimum(problem: Problem) -> Optimum:
    """Return the highest return that any sequence of legal actions can reach in a problem."""

    @cache
    def candidates(step: int, scaffolded: int) -> tuple[Seed, ...]:
        return tuple(_candidates(problem, step, scaffolded))

    @cache
    def best(step: int, place: Place) -> tuple[float, _Choice | None]:
        if step == problem.steps:
            return 0.0, None
        options = [
            (choice.paid + best(step + 1, choice.then)[0], choice)
            for choice in _choices(problem, step, place, candidates)
        ]
        # The first of equals wins, and WAIT comes first: nothing is done without need.
        return max(options, key=lambda option: option[0])

    place, plan = Place(SeedStage.DORMANT), []
    value = best(0, place)[0]
    for step in range(problem.steps):
        choice = best(step, place)[1]
        assert choice is not None, "only the end has no choice"
        plan.append(_action(choice))
        place = choice.then
    return Optimum(value, tuple(plan))


def _action(choice: _Choice) -> dict[str, int]:
    action = {head: int(PLACEHOLDERS[head]) for head in HEAD_NAMES}
    action["op"] = int(choice.op)
    if choice.seed is not None:
        action["slot"] = choice.seed.slot
    if choice.op is LifecycleOp.GERMINATE and choice.seed is not None:
        action["blueprint"] = choice.seed.blueprint
        action["tempo"] = _TEMPO
        action["alpha_target"] = ALPHA_TARGETS.index(1.0)
    return action


def _choices(
    problem: Problem, step: int, place: Place, candidates: Callable[[int, int], tuple[Seed, ...]]
) -> Iterator[_Choice]:
    """Yield every choice that is not beaten by another one of them."""
    yield _Choice(LifecycleOp.WAIT, 0.0, _tick(problem, place, place.stage))
    seed, stage = place.seed, place.stage
    if stage is SeedStage.DORMANT:
        for seed in candidates(step, place.scaffolded):
            start = Place(SeedStage.GERMINATED, 0, 0, seed, place.scaffolded)
            yield _Choice(
                LifecycleOp.GERMINATE, -problem.fee, _tick(problem, start, start.stage), seed
            )
        return
    if seed is None or stage is SeedStage.FOSSILIZED:
        return
    gates, config = problem.lifecycle.gates, problem.lifecycle
    advanced = None
    if stage is SeedStage.GERMINATED:
        advanced = place._replace(stage=SeedStage.TRAINING, passed=0)
    elif stage is SeedStage.TRAINING and place.passed >= gates.min_training_epochs:
        advanced = place._replace(stage=SeedStage.BLENDING, passed=0)
    elif stage is SeedStage.BLENDING and place.passed >= _TICKS:
        advanced = place._replace(stage=SeedStage.HOLDING, passed=0)
    if advanced is not None and config.effective_rules.advance_allowed:
        after = _tick(problem, advanced, advanced.stage)
        yield _Choice(LifecycleOp.ADVANCE, 0.0, after, seed)
    if stage is SeedStage.HOLDING:
        # Nothing can follow: a fossil stays, and one seed is all there may be.
        yield _Choice(
            LifecycleOp.FOSSILIZE,
            seed.worth,
            Place(SeedStage.FOSSILIZED, scaffolded=place.scaffolded),
            seed,
        )
    moving = stage is SeedStage.BLENDING and place.passed < _TICKS
    if place.age >= config.rules.min_prune_age and not moving:
        ends = seed.is_scaffold and place.age >= problem.scaffold_life
        scaffolded = place.scaffolded
        if ends and scaffolded == _NEVER:
            scaffolded = step
        pruned = Place(SeedStage.EMBARGOED, 0, scaffolded=scaffolded)
        yield _Choice(LifecycleOp.PRUNE, 0.0, pruned, seed)


def _candidates(problem: Problem, step: int, scaffolded: int) -> Iterator[Seed]:
    """Yield the seed that pays best of those that prepare others, and of those that do not."""
    pairs = [(b, s) for b in problem.blueprints for s in range(problem.num_slots)]
    blueprint, slot = torch.tensor(pairs, device=problem.device).unbind(1)
    price = problem.price(
        blueprint, slot, torch.full_like(slot, step), torch.full_like(slot, scaffolded)
    )
    pays = problem.payoff(price).tolist()
    for is_scaffold in (False, True):
        group = [
            Seed(pair[1], pair[0], worth, is_scaffold)
            for pair, worth in zip(pairs, pays, strict=True)
            if (pair[0] == problem.scaffold) == is_scaffold
        ]
        if group:
            yield max(group, key=lambda seed: seed.worth)


def _tick(problem: Problem, place: Place, stage: SeedStage) -> Place:
    """Return the place after the tick and the epoch that follow an operation."""
    config = problem.lifecycle
    if stage is SeedStage.EMBARGOED:
        passed = place.passed + 1
        over = passed >= config.embargo_ticks
        return place._replace(stage=SeedStage.RESETTING if over else stage, passed=passed)
    if stage is SeedStage.RESETTING:
        return Place(SeedStage.DORMANT, scaffolded=place.scaffolded)
    if place.seed is None:
        return place
    passed = place.passed
    training, blending, holding = config.forwards
    if training and stage is SeedStage.GERMINATED:
        stage, passed = SeedStage.TRAINING, 0
    if blending and stage is SeedStage.TRAINING and passed >= config.gates.min_training_epochs:
        stage, passed = SeedStage.BLENDING, 0
    if stage is SeedStage.BLENDING:
        passed = min(passed + 1, _TICKS)
        if holding and passed >= _TICKS:
            stage, passed = SeedStage.HOLDING, 0
    elif stage is SeedStage.TRAINING:
        passed = min(passed + 1, config.gates.min_training_epochs)
    most = max(config.rules.min_prune_age, problem.scaffold_life)
    return place._replace(stage=stage, passed=passed, age=min(place.age + 1, most))
