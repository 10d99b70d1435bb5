"""The sequential strategy: one `Garden` after another, the reference for all others."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.kasmina.budget import Portion
from esper.kasmina.contribution import participating, plan_ablations, values_in_points
from esper.kasmina.engine import EpochResult, RowWeights, read_weights, take_samples, write_weights
from esper.kasmina.evaluation import BatchEvaluator
from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import GardenConfig
from esper.kasmina.optimizer import CarriedOptimizer, slot_groups
from esper.kasmina.slots.placement import Placed, SlotNames, place_slots, with_kin
from esper.kasmina.state import SlotState
from esper.kasmina.training import Trainee, build_optimizer
from esper.lab.population.engine import Condition, PopulationConfig, SlotSpec
from esper.lab.population.train_step import RowTraining
from esper.lab.tasks.dataset import TaskData
from esper.lab.tasks.splits import Split
from esper.lab.tasks.task import Task
from esper.leyline.slots import USUAL_AXES
from esper.utils.process import Pending
from esper.utils.randomness import drawing


class SequentialEngine:
    """Trains rows one after another, each an ordinary garden with an ordinary optimizer."""

    def __init__(
        self,
        hosts: Sequence[nn.Module],
        slots: tuple[SlotSpec, ...],
        conditions: Sequence[Condition],
        keys: Sequence[int],
        *,
        config: GardenConfig,
        use_bf16: bool = False,
    ) -> None:
        """Wrap every host in a garden."""
        self.slots = slots
        self.is_stacked = False
        self._conditions = list(conditions)
        self._device = conditions[0].data.device
        self._keys = list(keys)
        self._use_bf16 = use_bf16
        self._dtype = next(hosts[0].parameters()).dtype
        self._trainees: list[Trainee] = []
        for host, key, condition in zip(hosts, keys, conditions, strict=True):
            self._trainees.append(self._make_trainee(host, condition, config.replace(seed=key)))
        self.host_params = self._trainees[0].garden.count_host_parameters()
        self.row_seconds = [0.0] * len(self._keys)
        """CPU seconds of each row's last training and evaluation."""
        self._at_rest = [False] * len(self._keys)
        self._judges: dict[int, tuple[Condition, BatchEvaluator]] = {}

    def _make_trainee(self, host: nn.Module, condition: Condition, config: GardenConfig) -> Trainee:
        """Return a row that has not trained yet."""
        task, data = condition.task, condition.data
        example = data.batch("val", data.subset[:2])[0]
        example = example.to(self._dtype) if example.is_floating_point() else example
        # All hosts have the same architecture: slots found in the first hold for the others.
        places: SlotNames | Placed = {slot.name: slot.path for slot in self.slots}
        if self._trainees:
            places = self._trainees[0].garden.placed
        axes = {slot.name: USUAL_AXES[slot.topology] for slot in self.slots}
        garden = Garden(host.to(data.device), places, example, axes=axes, config=config)
        return Trainee(
            garden,
            CarriedOptimizer(garden, build_optimizer(task.config, slot_groups(garden))),
            task.objective,
            max_grad_norm=task.config.max_grad_norm,
            precision=self._precision,
        )

    @property
    def _gardens(self) -> list[Garden]:
        return [trainee.garden for trainee in self._trainees]

    def sync(self, state: SlotState) -> Tensor:
        """Build, free and update seeds to match the state; return their sizes, int64 [R, S]."""
        gardens = enumerate(self._gardens)
        return torch.cat([garden.sync(state.select([row])) for row, garden in gardens])

    def train(self, portions: Sequence[Portion]) -> Pending[EpochResult]:
        """Train one epoch of every row that does not rest, one row after another."""
        losses = []
        training = RowTraining.of(
            [condition.task.config for condition in self._conditions],
            [portion.epoch for portion in portions],
            [condition.horizon for condition in self._conditions],
            [garden.state.learned[0].tolist() for garden in self._gardens],
        )
        self._at_rest = [not learns for learns in training.learns]
        with one_thread(self._device):
            for row, portion in enumerate(portions):
                started = time.thread_time()
                self._prepare_row(row, training)
                losses.append(math.nan if self._at_rest[row] else self._train_row(row, portion))
                self.row_seconds[row] = time.thread_time() - started
        sample, sampled = take_samples(self._gardens)
        result = EpochResult(torch.tensor(losses, dtype=torch.float64), sample, sampled)
        return lambda: result

    def measure(self, plans: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Evaluate every configuration of every row."""
        results = []
        with one_thread(self._device):
            for row, (garden, plan) in enumerate(zip(self._gardens, plans, strict=True)):
                started = time.thread_time()
                if len(plan):
                    results.append(self._judge(row).measure(garden, plan))
                self.row_seconds[row] += time.thread_time() - started
        if not results:
            return torch.zeros((0, len(self._conditions[0].data.subset))), None
        correct = [right for _, right in results if right is not None]
        return torch.cat([loss for loss, _ in results]), torch.cat(correct) if correct else None

    def score(self, split: Split) -> Tensor:
        """Return float64 [R, 2]: score in points and loss of every row on a whole split."""
        everything = torch.ones((1, len(self.slots)), dtype=torch.bool)
        scores = []
        with one_thread(self._device):
            for garden, condition in zip(self._gardens, self._conditions, strict=True):
                samples = _FixedSamples(condition.data, split, self._dtype)
                judge = BatchEvaluator(samples, condition.task.objective, precision=self._precision)
                loss, correct = judge.measure(garden, everything)
                points = values_in_points(loss, correct).mean()
                scores.append(torch.stack([points, loss.double().mean()]).cpu())
        return torch.stack(scores)

    def usual_plans(self) -> list[Tensor]:
        """Return the configurations to evaluate after an epoch; none for a row that rests."""
        return [
            plan_ablations(participating(garden.state)[0].tolist())[: 0 if is_at_rest else None]
            for garden, is_at_rest in zip(self._gardens, self._at_rest, strict=True)
        ]

    def read(self, row: int) -> RowWeights:
        """Return copies of the whole state of a row."""
        return read_weights(self._trainees[row].garden, self._trainees[row].optimizer)

    def read_at_rest(self, rows: Sequence[int], seeds: Tensor) -> list[RowWeights]:
        """Return copies of some rows without optimizer state, with these `seeds`, bool [R, S]."""
        return [self.read(row).at_rest(seeds[row].tolist()) for row in rows]

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace a row; `state` [1, S] is the state of its slots."""
        trainee = self._trainees[row]
        write_weights(trainee.garden, trainee.optimizer, weights, state)

    def adopt(
        self, row: int, key: int, condition: Condition, weights: RowWeights, state: SlotState
    ) -> None:
        """Replace a row by another network with its weights, state and condition."""
        self._keys[row], self._conditions[row] = key, condition
        self._trainees[row].garden.seedbed.run_seed = key
        self.write(row, weights, state)

    def close(self) -> None:
        """There is nothing to free."""

    def _judge(self, row: int) -> BatchEvaluator:
        """Return the evaluator of a row; rows with the same data share one."""
        condition = self._conditions[row]
        if id(condition) not in self._judges:
            samples = _FixedSamples(condition.data, "val", self._dtype)
            judge = BatchEvaluator(samples, condition.task.objective, precision=self._precision)
            self._judges[id(condition)] = condition, judge
        return self._judges[id(condition)][1]

    def _prepare_row(self, row: int, training: RowTraining) -> None:
        """Set the learning rates of a row for this epoch."""
        trainee = self._trainees[row]
        trainee.set_rates(float(training.rates[row]), training.seed_rates[row].tolist())
        trainee.max_grad_norm = float(training.clips[row])
        for group in trainee.optimizer.param_groups:
            group["weight_decay"] = float(training.decays[row])
            if "betas" in group:
                group["betas"] = (float(training.momenta[row]), group["betas"][1])
            else:
                group["momentum"] = float(training.momenta[row])

    def _train_row(self, row: int, portion: Portion) -> float:
        trainee, key, condition = self._trainees[row], self._keys[row], self._conditions[row]
        data, size = condition.data, condition.task.config.batch_size
        order = data.order_from(key, portion.first, portion.samples)
        crops = data.crops(key, portion.epoch, portion.samples)
        trainee.start_epoch()
        for number, start in enumerate(range(0, len(order), size)):
            part = slice(start, start + size)
            x, y = data.batch("train", order[part], None if crops is None else crops[part])
            # A module that draws random numbers draws them from its row's own stream, named as
            # for a network that grows alone.
            with drawing(data.device, key, portion.epoch, number, "train"):
                trainee.train_batch(x.to(self._dtype) if x.is_floating_point() else x, y)
        loss = trainee.finish_epoch()
        assert loss is not None, "a task has at least one batch"
        return loss

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._use_bf16)


class _FixedSamples:
    """The validation samples, in batches of the engine's precision."""

    def __init__(self, data: TaskData, split: Split, dtype: torch.dtype) -> None:
        self._data, self._split, self._dtype = data, split, dtype

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data, split = self._data, self._split
        indices = data.subset if split == "val" else data.indices(split)
        for part in indices.split(256):
            x, y = data.batch(split, part)
            yield (x.to(self._dtype) if x.is_floating_point() else x), y


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Within the block, use one CPU thread, as worker processes do.

    The last bits of a sum depend on the number of threads, and a row must not depend on where it
    runs. Networks this small gain nothing from more threads.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_sequential(
    conditions: Sequence[Condition], keys: Sequence[int], config: PopulationConfig
) -> SequentialEngine:
    """Return the sequential engine for rows of one architecture."""
    hosts = build_hosts(conditions, keys, config)
    garden = GardenConfig(lifecycle=config.lifecycle, training_mode=config.training_mode)
    return SequentialEngine(
        hosts,
        find_slots(hosts[0], conditions[0].task, config),
        conditions,
        keys,
        config=garden,
        use_bf16=config.use_bf16,
    )


def build_hosts(
    conditions: Sequence[Condition], keys: Sequence[int], config: PopulationConfig
) -> list[nn.Module]:
    """Return a new host for every row, with weights from the row's random stream."""
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    return [
        condition.task.build_host(key).to(dtype)
        for condition, key in zip(conditions, keys, strict=True)
    ]


def find_slots(host: nn.Module, task: Task, config: PopulationConfig) -> tuple[SlotSpec, ...]:
    """Return the specification of every slot of a task's host."""
    example = task.example_input()
    if example.is_floating_point() and config.precision == "float64":
        example = example.double()
    placed = place_slots(host, task.slot_paths, example, USUAL_AXES[task.topology])
    if config.copies:
        placed = with_kin(placed, host, example)
    return tuple(
        SlotSpec(
            slot.name,
            slot.path,
            slot.topology,
            slot.shape,
            slot.shape[1] if slot.topology == "cnn" else slot.shape[-1],
            slot.symmetry,
            slot.kin,
        )
        for slot in placed.slots
    )
