"""What every population has, here or in a cluster: its roster, and what follows from it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from esper.kasmina.blueprints.registry import blueprint_kinds, drawn_names
from esper.leyline.blueprints import BlueprintKind
from esper.leyline.rules import Masks, RuleView, build_masks
from esper.population.conditions import Condition, Roster
from esper.population.engine import PopulationConfig
from esper.tasks.splits import Split
from esper.tasks.task import Task


class PopulationRows(ABC):
    """Rows of evolving networks, wherever they live."""

    config: PopulationConfig
    """Settings shared by all rows."""
    roster: Roster
    """Which rows there are, and what each trains under."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.roster.rows

    @property
    def tasks(self) -> list[Task]:
        """The tasks that rows belong to, in their order."""
        return [condition.task for condition in self.conditions]

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The tasks with their data."""
        return self.roster.conditions

    @property
    def task_of_row(self) -> tuple[int, ...]:
        """Which of the tasks each row belongs to."""
        return self.roster.task_of_row

    @staticmethod
    def known_blueprints() -> tuple[str, ...]:
        """Return the name of every blueprint at the index that is its id; copies grow nowhere."""
        return drawn_names()

    @staticmethod
    def known_kinds() -> tuple[BlueprintKind, ...]:
        """Return the kind of every blueprint at the index that is its id."""
        return blueprint_kinds(drawn_names())

    @abstractmethod
    def view(self) -> RuleView:
        """Return what legality depends on, for all rows."""

    def masks(self) -> Masks:
        """Return what is legal now."""
        return build_masks(self.view(), self.config.lifecycle.effective_rules)

    @abstractmethod
    def results_on(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return float64 [R], twice: scores in points and losses on a whole split."""

    def test_scores(self) -> Tensor:
        """Return float64 [R]: every row's score on the untouched test split, in points."""
        return self.results_on("test")[0]
