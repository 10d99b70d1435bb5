"""`RayPopulation`: a population whose rows are in the actors of a Ray cluster.

It has the interface of `Population` and gives the same numbers. Every actor has some rows of every
task, so that all have about the same work. All requests since the last reset are kept. If an actor
is lost, its replacement builds the rows from their seeds or from the last snapshot and replays the
same actions, while other actors keep their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.lab.population.engine import PopulationConfig, Strategy
from esper.lab.population.population import Population, Tasks
from esper.lab.population.ray_actor import ACTIONS, Lived, RowsWanted, pack
from esper.lab.population.ray_cluster import ActorLostError, ActorWork, ClusterError, RayCluster
from esper.lab.population.task_group import PopulationRows, join_rows, take_rows
from esper.lab.tasks.dataset import TaskData
from esper.lab.tasks.splits import Split
from esper.leyline.actions import HEAD_NAMES, Actions, decode_actions
from esper.leyline.errors import UsageError, warn
from esper.leyline.rules import RuleView
from esper.leyline.signals import Signals

_MOST_LOSSES = 3
"""Losses of one actor in one request after which the run fails: its rows cause them."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A request to all actors: a method, and its arguments for each."""

    method: str
    arguments: Sequence[tuple[Any, ...]]


class RayPopulation(PopulationRows):
    """Rows of growing networks in a cluster.

    Args:
        cluster: the cluster that holds the rows.
        task: a task, or several; rows are shared out among them.
        rows: number of rows, or one number per task.
        seed: seed of the run.
        device: device of the signals.
        strategy: how the rows of an actor run; 'auto' and 'workers' mean sequential on a CPU, where
            every core has an actor, and stacked on a GPU.
        data_path: path of the data files on every node; the usual places if None.
        data: the data itself on this machine, one per task; read from `data_path` if None.
        config: settings shared by all rows.
        row_seeds: seeds of the rows instead of 0, 1, 2, ...
    """

    def __init__(
        self,
        cluster: RayCluster,
        task: Tasks,
        rows: int | Sequence[int],
        seed: int = 0,
        device: str = "auto",
        strategy: Strategy = "auto",
        *,
        data_path: str | None = None,
        data: Sequence[TaskData] | None = None,
        config: PopulationConfig | None = None,
        row_seeds: Sequence[int] | None = None,
    ) -> None:
        """Share rows out among tasks and actors; networks are built by `reset`."""
        self._cluster = cluster
        self._number = cluster.next_number()
        self._data_path = data_path
        # It has no rows; it is used for their roster, tasks and data.
        self._roll = Population(
            task,
            rows,
            seed=seed,
            device=device,
            strategy="sequential",
            data=data_path if data is None else data,
            config=config,
            row_seeds=row_seeds,
        )
        self.config, self.device = self._roll.config, self._roll.device
        self.roster, self.num_slots = self._roll.roster, self._roll.num_slots
        """Most slots of any row."""
        cluster.start(self.device.type)
        self.strategy: Strategy = strategy
        if strategy in ("auto", "workers"):
            self.strategy = "sequential" if self.device.type == "cpu" else "stacked"
        self.reason = f"in {cluster.actors} actors of a cluster"
        self._open: dict[int, int] = {}
        """By actor: the generation that holds this population."""
        self._asked: list[_Request] = []
        """Requests since the rows were built."""
        self._last: tuple[Signals, Tensor, RuleView] | None = None
        self._share_out()

    def assign(
        self,
        tasks: Tasks,
        rows: int | Sequence[int] | None = None,
        data: Sequence[TaskData] | None = None,
    ) -> None:
        """Change the tasks of the rows at the next reset, as `Population.assign` does."""
        self._roll.assign(tasks, rows, data)
        self.roster, self.num_slots = self._roll.roster, self._roll.num_slots
        self._forget_rows()
        self._share_out()

    def reset(self, row_seeds: Sequence[int] | None = None) -> Signals:
        """Build every row, then train and validate the first epoch."""
        if row_seeds is not None:
            self._roll.row_seeds = self._roll.checked_seeds(row_seeds)
        self._forget_rows()
        seeds = self._roll.row_seeds
        return self._live("reset", [([seeds[row] for row in part],) for part in self._parts])

    def step(self, actions: Actions) -> Signals:
        """Carry out one action per row, then train and measure one epoch."""
        self._seen()
        chosen = {head: value.cpu() for head, value in actions.items()}
        if len(decode_actions(chosen).op) != self.rows:
            raise UsageError(f"{self.rows} rows need as many actions, got {len(chosen['op'])}")
        table = torch.stack([chosen[head] for head in HEAD_NAMES], dim=1)
        return self._live("step", [(pack({ACTIONS: table[part]}),) for part in self._parts])

    def signals(self) -> Signals:
        """Return the current signals."""
        return self._seen()[0]

    def panics(self) -> Tensor:
        """Return int64 [R], a `Panic`: why the governor rolled a row back in the last epoch."""
        return self._seen()[1]

    def view(self) -> RuleView:
        """Return the inputs of the legality rules, for all rows."""
        return self._seen()[2]

    def results_on(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return scores in points and losses on a whole split, each float64 [R]."""
        self._seen()
        found = self._ask(_Request("results_on", [(split,)] * len(self._parts)))
        scores, losses = (torch.cat([each[i] for each in found])[self._order] for i in (0, 1))
        return scores, losses

    def keep_networks(self, which: Tensor) -> None:
        """Keep copies of the networks of rows, bool [R], in place of those kept before."""
        self._seen()
        chosen = which.tolist()
        self._tell("keep_networks", [([chosen[row] for row in part],) for part in self._parts])

    def bring_back(self) -> None:
        """Replace every network by its kept copy, to score it."""
        self._seen()
        self._tell("bring_back", [()] * len(self._parts))

    def snapshot(self) -> dict[str, Any]:
        """Return the state of every row, as `Population.snapshot` does."""
        self._seen()
        found = self._ask(_Request("snapshot", [()] * len(self._parts)))
        by_row = {
            row: kept
            for part, answer in zip(self._parts, found, strict=True)
            for row, kept in zip(part, answer, strict=True)
        }
        return {
            "made": self._roll.made(),
            "seed": self._roll.seed,
            "row_seeds": list(self._roll.row_seeds),
            "rows": [
                join_rows([by_row[row] for row in rows])
                for rows in self.roster.architectures.values()
            ],
        }

    def restore(self, saved: dict[str, Any]) -> Signals:
        """Restore a snapshot of a population with the same settings, in a cluster or not."""
        self._roll.refuse_foreign(saved)
        self._roll.seed = saved["seed"]
        self._roll.row_seeds = self._roll.checked_seeds(saved["row_seeds"])
        by_row: dict[int, dict[str, Any]] = {}
        for rows, kept in zip(self.roster.architectures.values(), saved["rows"], strict=True):
            by_row |= {row: take_rows(kept, at, at + 1) for at, row in enumerate(rows)}
        self._forget_rows()
        seed, seeds = self._roll.seed, self._roll.row_seeds
        return self._live(
            "restore",
            [
                (seed, [seeds[row] for row in part], [by_row[row] for row in part])
                for part in self._parts
            ],
        )

    def close(self) -> None:
        """Remove the rows from the actors."""
        # An actor without these rows has nothing to remove; a cluster that has ended has no actors.
        for actor in range(min(len(self._parts), self._cluster.actors)):
            self._cluster.ask(actor, "close", self._number)
        self._open = {}
        self._forget_rows()

    # ------------------------------------------------------------------------------------ internals

    def _share_out(self) -> None:
        """Deal the rows out to the actors."""
        counts = [self.task_of_row.count(index) for index in range(len(self.tasks))]
        self._parts = deal_rows(counts, self._cluster.actors)
        dealt = [row for part in self._parts for row in part]
        self._order = sorted(range(len(dealt)), key=dealt.__getitem__)
        """Index of each row in the concatenated answers."""
        self._open = {}

    def _live(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Signals:
        """Request an epoch of all rows, and store the signals."""
        request = _Request(method, arguments)
        try:
            answers: list[Lived] = self._ask(request)
        except BaseException:
            # Some actors may have carried it out and others not.
            self._forget_rows()
            raise
        self._asked.append(request)
        for text in dict.fromkeys(text for lived in answers for text in lived.warnings):
            warn(text)
        for actor, lived in enumerate(answers):
            work = self._cluster.work[actor]
            work.rows = len(self._parts[actor])
            work.epochs += work.rows
            work.seconds += lived.seconds
            work.processor_seconds += lived.processor_seconds
        self._last = Lived.unpack(answers, self._order, self.device)
        return self._last[0]

    def _tell(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Make a request that changes what actors hold, so that it is replayed too."""
        request = _Request(method, arguments)
        self._ask(request)
        self._asked.append(request)

    def _ask(self, request: _Request) -> list[Any]:
        """Return the answers of all actors with rows; rows of a lost actor are replayed."""
        answers: dict[int, Any] = {}
        losses = [0] * len(self._parts)
        while len(answers) < len(self._parts):
            missing = [actor for actor in range(len(self._parts)) if actor not in answers]
            asked = {actor: self._submit(actor, request) for actor in missing}
            for actor, refs in asked.items():
                generation = self._cluster.generation(actor)
                try:
                    for ref in refs:
                        answers[actor] = self._cluster.answer(actor, ref)
                    self._open[actor] = generation
                except ActorLostError as error:
                    answers.pop(actor, None)
                    losses[actor] += 1
                    if losses[actor] > _MOST_LOSSES:
                        raise ClusterError(
                            f"{error} for the {losses[actor]}th time while its rows did the same "
                            "epoch; look for what ends it in Ray's log files"
                        ) from None
        return [answers[actor] for actor in range(len(self._parts))]

    def _submit(self, actor: int, request: _Request) -> list[Any]:
        """Send a request to an actor, preceded by all earlier ones if it lacks the rows."""
        if self._open.get(actor) == self._cluster.generation(actor):
            return [self._call(actor, request)]
        return [
            self._cluster.ask(actor, "open", self._number, self._wanted(actor)),
            *(self._call(actor, each) for each in (*self._asked, request)),
        ]

    def _call(self, actor: int, request: _Request) -> Any:
        return self._cluster.ask(actor, request.method, self._number, *request.arguments[actor])

    def _wanted(self, actor: int) -> RowsWanted:
        """Return the description of an actor's rows."""
        owners = [self.task_of_row[row] for row in self._parts[actor]]
        own = sorted(set(owners))
        conditions = [self.conditions[index] for index in own]
        return RowsWanted(
            tasks=[(type(each.task), each.task.config) for each in conditions],
            rows=[owners.count(index) for index in own],
            num_slots=self.num_slots,
            seed=self._roll.seed,
            strategy=self.strategy,
            data=self._data_path,
            fingerprints={
                each.task.splits_key: self._cluster.fingerprint(each) for each in conditions
            },
            blueprints=self.known_blueprints(),
            config=self.config,
        )

    def _forget_rows(self) -> None:
        self._asked = []
        self._last = None

    def _seen(self) -> tuple[Signals, Tensor, RuleView]:
        """Return signals, panics and legality inputs of the last epoch."""
        if self._last is None:
            raise UsageError("the population has no rows yet; call reset() first")
        return self._last


def deal_rows(counts: Sequence[int], actors: int) -> list[list[int]]:
    """Return the rows of every actor that has any, in ascending order.

    Args:
        counts: number of rows of every task, in order.
        actors: number of actors; each gets about the same number of rows of every task.
    """
    parts: list[list[int]] = [[] for _ in range(actors)]
    start = 0
    for count in counts:
        share, more = divmod(count, actors)
        # The remainder goes to actors with the fewest rows so far.
        lightest = sorted(range(actors), key=lambda actor: len(parts[actor]))[:more]
        for actor, part in enumerate(parts):
            stop = start + share + (actor in lightest)
            part += range(start, stop)
            start = stop
    return [part for part in parts if part]


# - Dealing rows to the actors of a Ray cluster; an actor is one device with its populations


AnyPopulation = Population | RayPopulation
"""Rows in this process or in a cluster."""

__all__ = ["ActorWork", "AnyPopulation", "ClusterError", "RayCluster", "RayPopulation"]
