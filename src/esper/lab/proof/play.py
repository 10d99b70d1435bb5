"""Plays cells, which are arms on members with seeds, as rows of as few populations as possible.

A row depends on its member, its arm and its seed alone, so cells can be played together in any
combination and order. Rows of a `ShuffledArm` also depend on those of other members, so all cells
of such an arm are a bundle, which is always played as a whole. One population plays one chunk after
another and keeps its worker processes, its data and its captured steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import copied_names
from esper.kasmina.costs import HostMultiples, host_multiple
from esper.kasmina.hosts import BuiltInSeed
from esper.kasmina.row_group import keep_rows
from esper.lab.population.engine import PopulationConfig, Strategy
from esper.lab.population.population import Population
from esper.lab.population.ray_population import AnyPopulation, RayCluster, RayPopulation
from esper.lab.proof.arm import (
    Arm,
    ControllerArm,
    RowControllers,
    ScheduleArm,
    ShuffledArm,
    find_donors,
    group_of,
    seed_of,
)
from esper.lab.proof.results import CellResult, ResultFile, ablation_flops, training_flops
from esper.lab.proof.statistics import error_rate
from esper.lab.tasks.dataset import TaskData
from esper.lab.tasks.member import GROWTH_LIMIT, AnyMember
from esper.lab.tasks.splits import Split
from esper.lab.tasks.task import Task
from esper.leyline.actions import LifecycleOp
from esper.leyline.config import option
from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import AlphaAlgorithm, SeedStage
from esper.simic.training.config import LIFE
from esper.simic.training.episodes import live_episodes
from esper.tamiyo.controllers.schedule import Schedule, ScheduleController, parse_schedule
from esper.utils.process import choose_device, grouped

_DECIMALS = 4
"""Of the scores in curves."""

ENDS: tuple[Split, ...] = ("val", "test")
"""Splits on which finished networks are evaluated."""

Ends = tuple[Tensor, Tensor]
"""Scores and losses of all rows."""


@dataclass(frozen=True, kw_only=True)
class PlayConfig(HostMultiples):
    """How cells are played: limits, the same for all of them, and device."""

    param_limit: float = host_multiple("parameters", GROWTH_LIMIT)
    flop_limit: float = host_multiple("operations per sample", GROWTH_LIMIT)
    horizon: int = option(0, "Epochs of every run; 0 is the member's own.", minimum=0)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Where rows run.")
    strategy: Strategy = option("auto", "How rows run.")
    rows: int = option(
        0, "Most rows at once; 0 is 1,024 on a CUDA device and 64 on a CPU.", minimum=0
    )
    data: str | None = option(None, "File or folder of the data; the usual places if empty.")
    keep: Literal["last", "best"] = option(
        "last",
        "Which network of a row is scored: that of its last epoch, or of the epoch with its best "
        "validation score.",
    )
    population: PopulationConfig = option(
        PopulationConfig(lifecycle=LIFE), "How rows live; by default as in our recipes."
    )


@dataclass(frozen=True)
class Cell:
    """An arm on a member, with some seeds."""

    purpose: str
    arm: Arm
    member: AnyMember
    seeds: tuple[int, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """Key of its result."""
        return self.purpose, self.arm.name, self.member.label


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the whole work."""

    done: float
    """Epochs trained, summed over rows."""
    total: float
    seconds: float
    """Since the start."""
    text: str

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left; None at the beginning."""
        return self.seconds * (self.total - self.done) / self.done if self.done else None


Show = Callable[[Progress], None]


class _Clock:
    """Counts the epochs of rows and shows the progress."""

    def __init__(self, total: float, show: Show) -> None:
        self.text = ""
        self._total, self._show = total, show
        self._done, self._started = 0.0, time.monotonic()

    def tick(self, rows: int, epoch: int) -> None:
        """Count an epoch of some rows."""
        self._done += rows
        spent = time.monotonic() - self._started
        self._show(Progress(self._done, self._total, spent, f"{self.text}, epoch {epoch}"))


@dataclass(frozen=True, slots=True)
class Stage:
    """Cells that are played together."""

    population: AnyPopulation
    cells: list[tuple[Cell, int]]
    """In the order of the rows, each with the index of its task."""

    @property
    def seeds(self) -> list[int]:
        """Seed of every row."""
        return [seed for cell, _ in self.cells for seed in cell.seeds]

    def context(self, seed: int) -> ControllerContext:
        """Return what controllers of the rows are built with."""
        return ControllerContext(
            slot_names=SlotConfig.of(self.population.num_slots).slot_ids,
            blueprint_names=self.population.known_blueprints(),
            copies=copied_names(),
            seed=seed,
        )


class Player:
    """Plays cells, chunk by chunk.

    Args:
        config: limits, device and the lifecycle of rows.
        show: called with the progress after every epoch.
        is_stopped: called after every epoch; if it returns True, the chunk is dropped.
        cluster: Ray cluster that holds the rows; by default this process does.
    """

    def __init__(
        self,
        config: PlayConfig,
        show: Show = lambda progress: None,
        is_stopped: Callable[[], bool] = lambda: False,
        cluster: RayCluster | None = None,
    ) -> None:
        """Prepare; `play` reads data and builds rows."""
        self.cluster = cluster
        self.config = config
        self._show, self._is_stopped = show, is_stopped
        self._population: AnyPopulation | None = None

    def play(self, cells: Sequence[Cell]) -> Iterator[list[CellResult]]:
        """Yield the results of one chunk after another; end early if stopped."""
        if not cells:
            return
        chunks = make_chunks(cells, self._rows)
        total = float(sum(len(c.seeds) * self.horizon_of(c) for c in cells))
        clock = _Clock(total, self._show)
        try:
            for number, chunk in enumerate(chunks, start=1):
                rows = sum(len(cell.seeds) for cell in chunk)
                clock.text = f"part {number} of {len(chunks)}, {rows} networks"
                results = self._play_chunk(chunk, clock)
                if results is None:
                    return
                yield results
        finally:
            self.close()

    def play_missing(self, cells: Sequence[Cell], results: ResultFile) -> bool:
        """Play cells without a result and store theirs; return whether all have one now."""
        missing = [
            cell
            for bundle in _bundles(cells)
            if any(each.key not in results for each in bundle)
            for cell in bundle
        ]
        for found in self.play(missing):
            results.add(found)
        return all(cell.key in results for cell in cells)

    def horizon_of(self, cell: Cell) -> int:
        """Return the epochs of a cell's rows."""
        return self.config.horizon or cell.member.task().config.horizon

    @property
    def device(self) -> torch.device:
        """Where rows run; looked up late, so that results can be read on a machine without it."""
        return choose_device(self.config.device)

    @property
    def _rows(self) -> int:
        return self.config.rows or (1024 if self.device.type == "cuda" else 64)

    def _task(self, cell: Cell) -> Task:
        task = cell.arm.task(cell.member)
        config = task.config.replace(
            horizon=self.horizon_of(cell),
            param_limit=self.config.param_limit,
            flop_limit=self.config.flop_limit,
        )
        return type(task)(config)

    def prepare(self, cells: Sequence[Cell]) -> Stage:
        """Build the rows of some cells."""
        tasks, placed = self._by_task(cells)
        return Stage(self._assign(tasks, placed), placed)

    def close(self) -> None:
        """Free the rows."""
        if self._population is not None:
            self._population.close()
        self._population = None

    def _play_chunk(self, chunk: Sequence[Cell], clock: _Clock) -> list[CellResult] | None:
        """Play cells together and return their results; None if stopped."""
        stage = self.prepare(chunk)
        population, cells = stage.population, stage.cells
        tally = _Tally(population, keeps_best=self.config.keep == "best")
        moments = live_episodes(population, _make_controllers(stage), stage.seeds)
        for epoch, moment in enumerate(moments, start=1):
            lived = tally.note(moment.signals.to("cpu"), is_start=moment.actions is None)
            if tally.keeps_best:
                population.keep_networks(tally.improved)
            clock.tick(lived, epoch)
            if self._is_stopped():
                return None
        if tally.keeps_best:
            population.bring_back()
        # Networks differ by few points, so the whole validation split is scored here, not only
        # the subset that is scored after every epoch.
        ends = {split: population.results_on(split) for split in ENDS}
        found, start = [], 0
        for cell, index in cells:
            rows = slice(start, start + len(cell.seeds))
            condition = population.conditions[index]
            found.append(tally.result(cell, condition.task, condition.data, ends, rows))
            start = rows.stop
        return found

    def _assign(self, tasks: list[Task], cells: Sequence[tuple[Cell, int]]) -> AnyPopulation:
        """Return the population with rows for these cells; the first call makes it."""
        task_of_row = [index for cell, index in cells for _ in cell.seeds]
        counts = [task_of_row.count(index) for index in range(len(tasks))]
        if self._population is not None:
            self._population.assign(tasks, counts)
            return self._population
        settings: dict[str, Any] = {
            "device": str(self.device),
            "strategy": self.config.strategy,
            "config": self.config.population,
        }
        if self.cluster is None:
            self._population = Population(tasks, counts, data=self.config.data, **settings)
        else:
            self._population = RayPopulation(
                self.cluster, tasks, counts, data_path=self.config.data, **settings
            )
        return self._population

    def _by_task(self, cells: Sequence[Cell]) -> tuple[list[Task], list[tuple[Cell, int]]]:
        """Return the tasks, and the cells with the index of their task, sorted by it."""
        tasks: list[Task] = []
        places: dict[str, int] = {}
        found = []
        for cell in cells:
            task = self._task(cell)
            key = repr((task.name, task.config))
            if key not in places:
                places[key] = len(tasks)
                tasks.append(task)
            found.append((cell, places[key]))
        return tasks, sorted(found, key=lambda pair: pair[1])


def _make_controllers(stage: Stage) -> RowControllers:
    """Return the controllers of all rows; one carries out all schedules."""
    groups: dict[tuple[str, ...], list[tuple[Cell, range]]] = {}
    start = 0
    for cell, _ in stage.cells:
        rows = range(start, start + len(cell.seeds))
        groups.setdefault(group_of(cell.arm, cell.member), []).append((cell, rows))
        start = rows.stop
    parts: list[tuple[Controller, list[int]]] = []
    for members in groups.values():
        cells = [cell for cell, _ in members]
        first = cells[0]
        context = stage.context(seed_of(first.arm, first.member))
        if isinstance(first.arm, ControllerArm):
            controller: Controller = first.arm.controller(context)
        elif isinstance(first.arm, ShuffledArm):
            controller = first.arm.controller(context, _donor_rows(cells))
        else:
            schedules = parse_schedules(cells, context)
            controller = ScheduleController(schedules, context, is_quiet=True)
        parts.append((controller, [row for _, own in members for row in own]))
    return RowControllers(parts)


def parse_schedules(cells: Sequence[Cell], context: ControllerContext) -> list[Schedule]:
    """Return the schedule of every row; rows of arms without one only wait."""
    found: list[Schedule] = []
    for cell in cells:
        plain = cell.arm.schedule(cell.member) if isinstance(cell.arm, ScheduleArm) else ()
        where = f"arm {cell.arm.name!r} on {cell.member.label!r}"
        found += [parse_schedule(plain, context, where=where)] * len(cell.seeds)
    return found


def _donor_rows(cells: Sequence[Cell]) -> list[int]:
    """Return for every row of a shuffled arm the row of its donor with the same seed."""
    seeds = cells[0].seeds
    assert all(cell.seeds == seeds for cell in cells), "donors have the same seeds"
    donors = find_donors([cell.member for cell in cells])
    first = {cell.member.label: number * len(seeds) for number, cell in enumerate(cells)}
    return [
        first[donors[cell.member.label]] + place for cell in cells for place in range(len(seeds))
    ]


def _bundles(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Return the cells that must be played together: all of a shuffled arm, or one alone."""

    def key(number: int, cell: Cell) -> Hashable:
        return (cell.purpose, cell.arm.name) if isinstance(cell.arm, ShuffledArm) else number

    return list(grouped((key(*pair), pair[1]) for pair in enumerate(cells)).values())


def make_chunks(cells: Sequence[Cell], rows: int) -> list[list[Cell]]:
    """Group cells into chunks of at most so many rows; a larger bundle is a chunk of its own."""
    chunks: list[list[Cell]] = []
    room = 0
    for bundle in _bundles(cells):
        size = sum(len(cell.seeds) for cell in bundle)
        if room < size:
            chunks.append([])
            room = max(rows, size)
        chunks[-1] += bundle
        room -= size
    return chunks


class _Tally:
    """Counts operations and events of rows while they train, and finds their best epochs."""

    def __init__(self, population: AnyPopulation, *, keeps_best: bool = False) -> None:
        rows = population.rows
        self.keeps_best = keeps_best
        self.improved = torch.ones(rows, dtype=torch.bool)
        """Bool [R], rows whose last epoch has the best validation score so far."""
        self._best = torch.full((rows,), -torch.inf)
        samples = [len(condition.data.subset) for condition in population.conditions]
        self._validated = torch.tensor([samples[index] for index in population.task_of_row])
        self._epoch = torch.zeros(rows, dtype=torch.int64)
        self._training = torch.zeros(rows, dtype=torch.float64)
        self._ablations = torch.zeros(rows, dtype=torch.float64)
        self._germinated = torch.zeros(rows, dtype=torch.int64)
        self._pruned = torch.zeros(rows, dtype=torch.int64)
        self._rolled_back = torch.zeros(rows, dtype=torch.bool)
        self._curves: list[list[float]] = [[] for _ in range(rows)]
        self._germinated_at: list[list[int]] = [[] for _ in range(rows)]
        self._signals: Signals | None = None
        """Those of the epoch that is scored, for each row."""
        self._blueprints = population.known_blueprints()

    def note(self, signals: Signals, *, is_start: bool) -> int:
        """Count an epoch; return the number of rows that trained. No action precedes the first."""
        # A row past its horizon is idle and costs nothing.
        lived = signals.epoch > self._epoch
        self._epoch = signals.epoch
        trained = training_flops(signals, self._training)
        self._training = torch.where(lived, trained, self._training)
        self._ablations += ablation_flops(signals, self._validated) * lived
        if not is_start:
            done = signals.last_success & lived
            germinated = done & (signals.last_op == int(LifecycleOp.GERMINATE))
            self._germinated += germinated
            for row in germinated.nonzero().flatten().tolist():
                self._germinated_at[row].append(int(signals.epoch[row]))
            self._pruned += done & (signals.last_op == int(LifecycleOp.PRUNE))
        self._rolled_back |= signals.rolled_back
        scores = signals.val_score.tolist()
        for row in lived.nonzero().flatten().tolist():
            self._curves[row].append(round(scores[row], _DECIMALS))
        self._note_best(signals, lived)
        return int(lived.sum())

    def _note_best(self, signals: Signals, lived: Tensor) -> None:
        """Remember the signals of the epochs whose networks are scored."""
        if self._signals is None or not self.keeps_best:
            self._signals = signals
            self._best = signals.val_score.nan_to_num(nan=-torch.inf)
            return
        self.improved = lived & (signals.val_score > self._best)
        self._best = torch.where(self.improved, signals.val_score, self._best)
        self._signals = keep_rows(~self.improved, self._signals, signals)

    def result(
        self, cell: Cell, task: Task, data: TaskData, ends: Mapping[Split, Ends], rows: slice
    ) -> CellResult:
        """Return the result of a cell; `ends` are scores and losses of all rows by split."""
        signals = self._signals
        assert signals is not None, "an episode has at least one epoch"
        own = cell.member.task()
        scores = {split: ends[split][0][rows] for split in ENDS}
        errors = {split: ends[split][1][rows].tolist() for split in ENDS}
        if task.config.objective == "classification":
            errors = {s: error_rate(scores[s].numpy(), data.size(s)).tolist() for s in ENDS}
        names = tuple(task.slot_paths)
        return CellResult(
            purpose=cell.purpose,
            arm=cell.arm.name,
            member=cell.member.label,
            seeds=list(cell.seeds),
            val_errors=errors["val"],
            test_errors=errors["test"],
            val_scores=scores["val"].tolist(),
            test_scores=scores["test"].tolist(),
            parameters=signals.params[rows].tolist(),
            flops=signals.flops[rows].tolist(),
            host_parameters=own.host_parameters,
            host_flops=own.host_flops,
            training_flops=self._training[rows].tolist(),
            ablation_flops=self._ablations[rows].tolist(),
            germinated=self._germinated[rows].tolist(),
            fossilized=(signals.stage[rows] == int(SeedStage.FOSSILIZED)).sum(1).tolist(),
            pruned=self._pruned[rows].tolist(),
            rolled_back=self._rolled_back[rows].tolist(),
            scored_epochs=signals.epoch[rows].tolist(),
            curves=self._curves[rows],
            germinated_at=self._germinated_at[rows],
            grown=[
                grown_seeds(signals, row, names, self._blueprints)
                for row in range(rows.start, rows.stop)
            ],
        )


def grown_seeds(
    signals: Signals, row: int, slot_names: Sequence[str], blueprints: Sequence[str]
) -> list[dict[str, object]]:
    """Return the seeds that are blended into a row's network, as plain data."""
    found = []
    for slot, name in enumerate(slot_names):
        if float(signals.alpha[row, slot]) <= 0:
            continue
        seed = BuiltInSeed(
            slot=name,
            blueprint=blueprints[int(signals.blueprint[row, slot])],
            channels=int(signals.slot_channels[row, slot]),
            algorithm=AlphaAlgorithm(int(signals.algorithm[row, slot])).name,
            copies=int(signals.copies[row, slot]),
        )
        found.append(seed.to_mapping())
    return found
