"""TwinCurves: what every row would have scored, epoch by epoch, had it only waited.

A twin is the same network with the same initial weights and data order; it depends on the task and
the environment seed alone. Rows that share both share their twin. Twins are trained by a population
that only waits, for several rounds together where that fills the device, and kept for as long as
their rounds are ahead. A few small networks do not fill a device at all: twins of the next rounds
can be trained beside the rows of this one, an epoch in every step (`begin_ahead`, `advance`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.simic.training.config import TrainConfig
from esper.simic.training.episodes import TwinRegression
from esper.simic.training.evaluation import live_episodes
from esper.simic.training.row_source import RoundPlan, RowGroup, TaskRows
from esper.tamiyo.controllers import WaitController

_REMEMBERED = 64
"""Most twins of a task, the newest, that the mean of its twins is taken over."""

_POOL_MARGIN = 4096
"""Most curves kept beyond those of the rounds ahead; a pool of seeds comes back to them."""


class TwinCurves:
    """Scores of waiting twins, by task and environment seed.

    Args:
        row_source: makes the populations.
        config: the run.
    """

    def __init__(self, row_source: TaskRows, config: TrainConfig) -> None:
        """Start without any curve."""
        self._row_source, self._config = row_source, config
        self._curves: dict[str, Tensor] = {}
        self._by_task: dict[str, list[list[float]]] = {}
        self._ahead: Generator[tuple[int, int], None, None] | None = None
        """Twins of rounds ahead that are being trained."""

    @property
    def rounds_ahead(self) -> int:
        """Rounds whose twins are trained together."""
        config = self._config
        if config.twin_rounds:
            return config.twin_rounds
        # On a CPU rows run one after another, and training them early only delays the first round.
        on_cuda = self._row_source.device.type == "cuda"
        return min(config.rows_per_seed, config.rows) if on_cuda else 1

    @property
    def fit_beside_rows(self) -> bool:
        """Whether twins can be trained beside rows in hardly more time: on a device."""
        return self._row_source.device.type == "cuda" and self._row_source.cluster is None

    def begin_ahead(self, plans: Sequence[RoundPlan], stage: int = 0) -> None:
        """Let `advance` train what `prepare` will be asked for next; no plan is nothing to do."""
        self.stop_ahead()
        if any(key not in self._curves for plan in plans[:1] for key in _keys(plan)):
            self._ahead = self._train(plans, stage)

    def advance(self) -> None:
        """Train one more epoch of the twins ahead, as long as there is one."""
        if self._ahead is not None:
            next(self._ahead, None)

    def stop_ahead(self) -> None:
        """Give up the twins ahead that are not trained to the end."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def prepare(self, plans: Sequence[RoundPlan], stage: int = 0) -> Iterator[tuple[int, int]]:
        """Train the twins that these rounds need and that are not known; yield after each epoch.

        Yields:
            (epochs done, epochs to do). Nothing is kept of twins that were not trained to the end.
        """
        if self._ahead is not None:
            yield from self._ahead
            self._ahead = None
        missing = [key for key in _keys(plans[0]) if key not in self._curves]
        self._forget({key: None for plan in plans for key in _keys(plan)})
        if missing:
            yield from self._train(plans, stage)

    def _train(
        self, plans: Sequence[RoundPlan], stage: int
    ) -> Generator[tuple[int, int], None, None]:
        """Train the twins of these rounds that are not known; yield after each epoch."""
        needed = {key: None for plan in plans for key in _keys(plan)}
        wanted = [key for key in needed if key not in self._curves]
        population, order = self._make(wanted, plans, stage)
        try:
            scores, ends = [], torch.ones(1, dtype=torch.int64)
            for moment in live_episodes(population, WaitController()):
                scores.append(moment.signals.val_score.cpu())
                ends = moment.signals.max_epochs.cpu()
                yield len(scores), int(ends.max())
        finally:
            population.close()
        curves = _hold(torch.stack(scores, dim=1), ends, self._config.epochs)
        self._curves |= {key: curves[row].clone() for row, key in enumerate(order)}
        for row, key in enumerate(order):
            known = self._by_task.setdefault(key.rpartition("#")[0], [])
            known.append(curves[row].tolist())
            del known[:-_REMEMBERED]

    def scores(self, plan: RoundPlan) -> Tensor:
        """Return float32 [rows, epochs]: the twin's score of every row after each epoch."""
        try:
            return torch.stack([self._curves[_key(*row)] for row in _rows(plan)])
        except KeyError as error:
            raise UsageError(f"the twin {error} is not trained yet; call prepare() first") from None

    def regression(self, plan: RoundPlan) -> TwinRegression:
        """Return how rows of a round that grow are compared with all twins of their tasks."""
        own_share = self._config.reward.twin.own_share
        known = {name: torch.tensor(self._by_task[name]) for name in set(plan.tasks)}
        return TwinRegression.fit(own_share, known, plan.tasks)

    def state_dict(self) -> dict[str, Any]:
        """Return all curves."""
        by_task = {name: torch.tensor(known) for name, known in self._by_task.items()}
        return {"curves": dict(self._curves), "by_task": by_task}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Know these curves, and no others."""
        self.stop_ahead()
        self._curves = dict(state["curves"])
        self._by_task = {name: known.tolist() for name, known in state["by_task"].items()}

    def _make(
        self, wanted: Sequence[str], plans: Sequence[RoundPlan], stage: int
    ) -> tuple[Any, list[str]]:
        """Return a population of these twins, and which of them each row is."""
        found: dict[str, tuple[RowGroup, list[int]]] = {}
        for plan in plans:
            groups = {group.label: group for group in self._row_source.groups(plan.round, stage)}
            for label, seed in dict.fromkeys(_rows(plan)):
                if _key(label, seed) in wanted:
                    _, seeds = found.setdefault(label, (groups[label], []))
                    if seed not in seeds:
                        seeds.append(seed)
        parts = [RowGroup(group.task, label, len(seeds)) for label, (group, seeds) in found.items()]
        seeds = [seed for _, own in found.values() for seed in own]
        order = [_key(label, seed) for label, (_, own) in found.items() for seed in own]
        return self._row_source.make(parts, seeds), order

    def _forget(self, needed: dict[str, None]) -> None:
        """Drop curves that no round ahead needs; those of a pool may come back."""
        kept = _POOL_MARGIN if self._config.seed_pool else 0
        others = [key for key in self._curves if key not in needed]
        for key in others[: max(0, len(others) - kept)]:
            del self._curves[key]


def _hold(curves: Tensor, ends: Tensor, epochs: int) -> Tensor:
    """Return [N, epochs]: curves up to their rows' horizons, and their last score from there on."""
    places = torch.arange(epochs).minimum(ends.unsqueeze(1) - 1)
    return curves.gather(1, places)


def _rows(plan: RoundPlan) -> list[tuple[str, int]]:
    return list(zip(plan.tasks, plan.env_seeds, strict=True))


def _keys(plan: RoundPlan) -> list[str]:
    return [_key(label, seed) for label, seed in dict.fromkeys(_rows(plan))]


def _key(label: str, seed: int) -> str:
    return f"{label}#{seed}"
