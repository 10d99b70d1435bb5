"""Problems whose optimum is known: synthetic populations with the real interface.

Nothing is trained in them. Seeds live by the real lifecycle, signals and masks are the real ones,
and what a seed is worth is looked up in a price list that is drawn from the problem's seed. So a
step is cheap, the best possible return can be computed exactly, and a learner can be asked how
much of it it reaches.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.problems.base import Problem, ProblemReward
from benchmarks.problems.graded import GradedProblem
from benchmarks.problems.optimum import Optimum, find_optimum
from benchmarks.problems.scaffold import ScaffoldProblem
from benchmarks.problems.trap import TrapProblem
from esper.leyline.errors import unknown_name

PROBLEMS: dict[str, Callable[..., Problem]] = {
    "graded": GradedProblem,
    "trap": TrapProblem,
    "scaffold": ScaffoldProblem,
}
"""Every problem by its name; all take rows, a seed and a device."""


def make_problem(name: str, rows: int = 64, *, seed: int = 0, device: str = "cpu") -> Problem:
    """Return a problem by name, as it is meant to be solved."""
    if name not in PROBLEMS:
        raise unknown_name("problem", name, PROBLEMS)
    return PROBLEMS[name](rows, seed=seed, device=device)


__all__ = [
    "PROBLEMS",
    "GradedProblem",
    "Optimum",
    "Problem",
    "ProblemReward",
    "ScaffoldProblem",
    "TrapProblem",
    "find_optimum",
    "make_problem",
]
