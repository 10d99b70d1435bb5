"""Problems whose optimum is known: synthetic populations with the real interface.

Nothing is trained in them. Seeds live by the real lifecycle, signals and masks are the real ones,
and what a seed is worth is looked up in a price list that is drawn from the problem's seed. So a
step is cheap, the best possible return can be computed exactly, and a learner can be asked how
much of it it reaches.
"""

from __future__ import annotations

from collections.abc import Callable

from esper.leyline.errors import unknown_name
from esper.testing.problems.base import Problem, ProblemReward
from esper.testing.problems.graded import GradedProblem
from esper.testing.problems.optimum import Optimum, find_optimum
from esper.testing.problems.scaffold import ScaffoldProblem
from esper.testing.problems.trap import TrapProblem

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
