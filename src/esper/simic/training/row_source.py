"""Makes the rows of a round: populations on tasks and families, or an environment of the caller.

The trainer asks a `RowSource` for the plan and the environment of every round. Twins and
evaluations get their populations from the same `TaskRows`, and so share its data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import blueprint_kinds
from esper.lab.population.population import Population
from esper.lab.population.ray_population import AnyPopulation, RayCluster, RayPopulation
from esper.lab.population.worker_pool import WorkerPool, lease_pool
from esper.lab.tasks.dataset import TaskData
from esper.lab.tasks.family import FAMILIES, FamilyMember, FamilySplit, get_family
from esper.lab.tasks.task import DataCache, Task, get_task
from esper.leyline.actions import HEAD_NAMES, Actions
from esper.leyline.records import Plain
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import BUILTIN_BLUEPRINTS, BUILTIN_KINDS, BlueprintKind, SlotConfig
from esper.simic.training.config import StageConfig, TrainConfig
from esper.utils.process import choose_device
from esper.utils.randomness import derive_seed

# ---- The plan of a round, the stage of the curriculum, and the policy's random draws


_SEED_BITS = 31
"""Environment seeds are short enough to be typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan(Plain):
    """Tasks and seeds of the rows of a round."""

    round: int
    """From 0."""
    tasks: tuple[str, ...]
    """Name of every row's task."""
    env_seeds: tuple[int, ...]
    """Seed of every row's environment; rows that share one share their twin."""
    slot_names: Mapping[str, tuple[str, ...]]
    """Names of the slots of every task, in action order."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.env_seeds)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> RoundPlan:
        """Rebuild what `to_mapping` returned."""
        return cls(
            round=int(data["round"]),
            tasks=tuple(data["tasks"]),
            env_seeds=tuple(data["env_seeds"]),
            slot_names={task: tuple(names) for task, names in data["slot_names"].items()},
        )


def draw_env_seeds(
    run_seed: int, round_number: int, counts: Sequence[int], *, rows_per_seed: int, pool: int
) -> tuple[int, ...]:
    """Return the environment seed of every row.

    Args:
        run_seed: seed of the run.
        round_number: the round, from 0.
        counts: number of rows of every task, in order; rows of different tasks share no seed.
        rows_per_seed: number of rows of a task that share one seed.
        pool: number of seeds to draw from; with 0 every round has new ones.
    """
    seeds: list[int] = []
    for task, count in enumerate(counts):
        groups = -(-count // rows_per_seed)
        drawn = [_draw(run_seed, round_number, task, group, pool) for group in range(groups)]
        seeds += [drawn[row // rows_per_seed] for row in range(count)]
    return tuple(seeds)


def _draw(run_seed: int, round_number: int, task: int, group: int, pool: int) -> int:
    number = derive_seed(run_seed, round_number, task, group, "environment")
    if pool:
        number = derive_seed(run_seed, number % pool, "environment pool")
    return number >> (63 - _SEED_BITS)


class Curriculum:
    """Follows the stages of a run; the last stage does not end.

    Args:
        stages: the stages of the run, at least one.
    """

    def __init__(self, stages: Sequence[StageConfig]) -> None:
        """Start with the first stage."""
        self._stages = tuple(stages)
        self.stage = 0
        """Stage of the next round, from 0."""
        self._rounds_in_stage = 0

    def known_rounds(self, left: int) -> int:
        """Return how many rounds, the next one included, will certainly belong to this stage.

        Args:
            left: number of rounds left, at least one.
        """
        stage = self._stages[self.stage]
        if stage.paid_off:
            return 1
        if stage.rounds:
            return max(1, min(left, stage.rounds - self._rounds_in_stage))
        return left

    def add_round(self, paid_off: float) -> None:
        """Count a finished round, and move on to the next stage if this one is over.

        Args:
            paid_off: running share of episodes that paid off, after the round.
        """
        self._rounds_in_stage += 1
        stage = self._stages[self.stage]
        is_over = 0 < stage.rounds <= self._rounds_in_stage
        is_over = is_over or 0 < stage.paid_off <= paid_off
        if is_over and self.stage + 1 < len(self._stages):
            self.stage += 1
            self._rounds_in_stage = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the current stage as plain data."""
        return {"stage": self.stage, "rounds_in_stage": self._rounds_in_stage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; entries of others in the mapping are ignored."""
        # A changed curriculum may have fewer stages.
        self.stage = min(int(state["stage"]), len(self._stages) - 1)
        self._rounds_in_stage = int(state["rounds_in_stage"])


_NUM_HEADS = len(HEAD_NAMES)
_BITS = 24
"""Bits of a draw: as many as float32 holds exactly, so that none is rounded up to 1."""

# Constants of SplitMix64 (Steele, Lea and Flood 2014).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def draw_uniforms(rows: int, *keys: int | str, device: torch.device | str = "cpu") -> Tensor:
    """Return float32 [rows, heads] from [0, 1); row r depends on the keys and on r alone."""
    seed = derive_seed(*keys)
    place = torch.arange(rows * _NUM_HEADS, dtype=torch.int64, device=device)
    # Hashed twice, so that neighbouring counters and neighbouring seeds are independent.
    word = _mix(_mix(place * _signed(_GOLDEN) + seed) + _signed(_GOLDEN))
    uniforms = _shift(word, 64 - _BITS).to(torch.float32) / float(2**_BITS)
    return uniforms.view(rows, _NUM_HEADS)


def _mix(word: Tensor) -> Tensor:
    """Return a hash of every 64-bit word; products are meant to overflow."""
    for bits, factor in _MIX:
        word = (word ^ _shift(word, bits)) * _signed(factor)
    return word ^ _shift(word, _LAST_SHIFT)


def _shift(word: Tensor, bits: int) -> Tensor:
    """Return the logical right shift, which int64 does not have."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


class Environment(Protocol):
    """Rows of growing networks: `esper.Population`, or a problem with a known optimum."""

    num_slots: int
    """Most slots of any row."""
    device: torch.device
    """Device of the signals."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    def reset(self, row_seeds: Sequence[int] | None = None) -> Signals:
        """Build every row anew, from these seeds if given, and train one epoch."""

    def step(self, actions: Actions) -> Signals:
        """Carry out one action per row and train one epoch."""

    def masks(self) -> Masks:
        """Return the masks of legal actions."""

    def panics(self) -> Tensor:
        """Return int64 [R]: a `Panic`, why the governor rolled a row back in the last epoch."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state of every row as plain data and tensors."""

    def restore(self, saved: dict[str, Any]) -> Signals:
        """Go back to a snapshot."""

    def close(self) -> None:
        """Free processes and memory."""


EVALUATION_SEEDS = 1 << 31
"""First environment seed of evaluations; training uses smaller ones."""


class RowSource(Protocol):
    """Plans and makes the rows of rounds."""

    device: torch.device
    """Device of the signals."""
    blueprint_names: tuple[str, ...]
    """Names of the blueprints, by id."""
    blueprint_kinds: tuple[BlueprintKind, ...]
    """Their kinds."""
    num_slots: int
    """Most slots of any row in any round."""

    def plan(self, round_number: int, stage: int) -> RoundPlan:
        """Return the plan of a round."""

    def environment(self, round_number: int, stage: int) -> Environment:
        """Return an environment for a round; that of the round before may be closed."""

    def close(self) -> None:
        """Free processes and memory."""


class GivenRows:
    """The same environment in every round, such as a problem with a known optimum."""

    def __init__(self, environment: Environment, config: TrainConfig) -> None:
        """Use this environment."""
        self._environment, self._config = environment, config
        self.device = environment.device
        self.num_slots = environment.num_slots
        self.blueprint_names = BUILTIN_BLUEPRINTS
        self.blueprint_kinds = BUILTIN_KINDS

    def plan(self, round_number: int, stage: int) -> RoundPlan:
        """Return new environment seeds for the same rows."""
        config, rows = self._config, self._environment.rows
        name = type(self._environment).__name__
        return RoundPlan(
            round=round_number,
            tasks=(name,) * rows,
            env_seeds=_draw_seeds(config, round_number, [rows]),
            slot_names={name: SlotConfig.of(self.num_slots).slot_ids},
        )

    def environment(self, round_number: int, stage: int) -> Environment:
        """Return the environment."""
        return self._environment

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()


@dataclass(frozen=True, slots=True)
class TaskShare:
    """Rows of one task."""

    task: Task
    label: str
    """Name of the task, or of the member of a family."""
    rows: int


class TaskRows:
    """Populations on the tasks and families of a configuration.

    Rounds use members of a family's *train* split, evaluations those of its *select* split. A
    round draws a few architectures, and as many conditions for each as it has environment seeds.
    Rows of one architecture are neighbours and can run as one stack; rows that share a seed share
    the member.

    Args:
        config: settings of the run.
        cluster: Ray cluster that holds the rows; by default this process does.
    """

    def __init__(self, config: TrainConfig, cluster: RayCluster | None = None) -> None:
        """Look up the tasks; data is read and rows are built later."""
        self._config = config
        self.cluster = cluster
        self._population: AnyPopulation | None = None
        self._pool: WorkerPool | None = None
        self._labels: tuple[tuple[str, int], ...] = ()
        names = [name for stage in config.stages for name in stage.tasks]
        self.num_slots = max(_slots_of(name) for name in names)
        self.device = choose_device(config.device)
        self._data_cache = DataCache(config.data, self.device)
        self.blueprint_names = config.population.blueprints
        self.blueprint_kinds = blueprint_kinds(self.blueprint_names)

    def groups(self, round_number: int, stage: int) -> list[TaskShare]:
        """Return the tasks of a round and their rows; members of families are drawn."""
        config = self._config
        # A task is one part of a round; a family is one part per architecture.
        parts: list[tuple[str, tuple[FamilyMember, ...]]] = []
        for index, name in enumerate(config.stages[stage].tasks):
            seed = derive_seed(config.seed, round_number, index, "members")
            seeds = -(-config.rows // config.rows_per_seed)
            parts += self._draw(name, seed, "train", conditions=seeds)
        # Rows are dealt out evenly; the first parts get one more.
        parts = parts[: config.rows]
        share, more = divmod(config.rows, len(parts))
        groups: list[TaskShare] = []
        for index, (name, members) in enumerate(parts):
            rows = share + (index < more)
            groups += self._deal(name, members, rows, config.rows_per_seed)
        return groups

    def read_data(self) -> str:
        """Read the data of the first round, and return its fingerprint.

        So missing data is noticed first, and changed data when a run is resumed.
        """
        splits = [self._load(group).splits for group in self.groups(0, 0)]
        # Tasks share splits.
        distinct = {id(one): one for one in splits}.values()
        return "-".join(dict.fromkeys(one.fingerprint() for one in distinct))

    def plan(self, round_number: int, stage: int) -> RoundPlan:
        """Return the plan of a round."""
        groups = self.groups(round_number, stage)
        seeds = _draw_seeds(self._config, round_number, [group.rows for group in groups])
        return _plan_of(groups, round_number, seeds)

    def environment(self, round_number: int, stage: int) -> AnyPopulation:
        """Return the population, with the tasks of a round."""
        groups = self.groups(round_number, stage)
        labels = tuple((group.label, group.rows) for group in groups)
        if self._population is None:
            self._population = self.make(groups)
        elif labels != self._labels:
            # Reused: captured steps and loaded data serve every task of the same architecture.
            tasks, rows = [group.task for group in groups], [group.rows for group in groups]
            self._population.assign(tasks, rows, [self._load(group) for group in groups])
            self._data_cache.forget_all_but(tasks)
        self._labels = labels
        return self._population

    def evaluation(self, numbers: Sequence[int]) -> tuple[RoundPlan, AnyPopulation]:
        """Return a new population on seeds that training never uses, and its plan.

        Every task of the last stage has one row per number. A family has a different *select*
        member per number, as far as there are enough.
        """
        groups: list[TaskShare] = []
        count, tasks = len(numbers), self._config.stages[-1].tasks
        for index, name in enumerate(tasks):
            seed = derive_seed(numbers[0], index, "evaluation members")
            parts = self._draw(name, seed, "select", conditions=count)[:count]
            share, more = divmod(count, len(parts))
            for number, (_, members) in enumerate(parts):
                groups += self._deal(name, members, share + (number < more), 1)
        seeds = [EVALUATION_SEEDS + number for number in numbers]
        plan = _plan_of(groups, 0, tuple(seeds * len(tasks)))
        return plan, self.make(groups, plan.env_seeds)

    def make(
        self, groups: Sequence[TaskShare], row_seeds: Sequence[int] | None = None
    ) -> AnyPopulation:
        """Return a new population of these rows."""
        config, data = self._config, [self._load(group) for group in groups]
        tasks, rows = [group.task for group in groups], [group.rows for group in groups]
        settings: dict[str, Any] = {
            "seed": config.seed,
            "device": str(self.device),
            "strategy": config.strategy,
            "data": data,
            "config": config.population,
            "row_seeds": row_seeds,
        }
        if self.cluster is not None:
            return RayPopulation(self.cluster, tasks, rows, data_path=config.data, **settings)
        population = Population(tasks, rows, **settings)
        if population.strategy == "workers" and self._pool is None:
            # Keep the worker processes from one population to the next.
            self._pool = lease_pool()
        return population

    def close(self) -> None:
        """Close the population in use and end its processes."""
        if self._population is not None:
            self._population.close()
        self._population = None
        if self._pool is not None:
            self._pool.release()
        self._pool = None

    def _load(self, group: TaskShare) -> TaskData:
        return self._data_cache.load(group.task)

    def _draw(
        self, name: str, seed: int, split: FamilySplit, conditions: int
    ) -> list[tuple[str, tuple[FamilyMember, ...]]]:
        """Return the parts of a task or family in a round; the part of a task has no members."""
        if name not in FAMILIES:
            return [(name, ())]
        drawn = get_family(name).draw(
            seed,
            split,
            architectures=self._config.architectures_per_round,
            conditions=conditions,
        )
        return [(name, members) for members in drawn]

    def _deal(
        self, name: str, members: Sequence[FamilyMember], rows: int, rows_per_seed: int
    ) -> list[TaskShare]:
        """Return the rows of a part, dealt out to its members in turn."""
        if not members:
            return [TaskShare(get_task(name, horizon=self._config.epochs), name, rows)]
        dealt: dict[FamilyMember, int] = {}
        for start, member in zip(range(0, rows, rows_per_seed), cycle(members), strict=False):
            dealt[member] = dealt.get(member, 0) + min(rows_per_seed, rows - start)
        # An episode is at most as long as a member's horizon.
        return [
            TaskShare(
                member.task(horizon=min(member.horizon, self._config.epochs)), member.label, count
            )
            for member, count in dealt.items()
        ]


def _draw_seeds(config: TrainConfig, round_number: int, counts: list[int]) -> tuple[int, ...]:
    each, pool = config.rows_per_seed, config.seed_pool
    return draw_env_seeds(config.seed, round_number, counts, rows_per_seed=each, pool=pool)


def _plan_of(groups: Sequence[TaskShare], round_number: int, seeds: tuple[int, ...]) -> RoundPlan:
    return RoundPlan(
        round=round_number,
        tasks=tuple(group.label for group in groups for _ in range(group.rows)),
        env_seeds=seeds,
        slot_names={group.label: tuple(group.task.slot_paths) for group in groups},
    )


def _slots_of(name: str) -> int:
    """Return the most slots of a task or a family; raise for an unknown name."""
    return get_family(name).max_slots if name in FAMILIES else len(get_task(name).slot_paths)
