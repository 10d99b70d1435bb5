"""GrowthRun: the whole growing of one network, epoch by epoch, with or without its twin.

The twin is the same network with the same initial weights and the same batches that only waits.
Until the controller first acts, the network is its own twin; then the twin is forked off and both
train on every batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.architecture import describe_host
from esper.growth.gardener import DEFAULT_CONTROLLER, Gardener, GardenerConfig
from esper.growth.grown import Grown
from esper.kasmina.contribution import values_in_points
from esper.kasmina.evaluation import BatchEvaluator, apply_objective, evaluate_contributions
from esper.kasmina.garden import Garden, GardenConfig
from esper.kasmina.optimizer import slot_groups
from esper.kasmina.placement import call_arguments, evaluating
from esper.kasmina.signals import RateTable
from esper.kasmina.trainee import SchedulerFactory, Trainee
from esper.leyline.config import Config, option
from esper.leyline.controller import Controller
from esper.leyline.errors import EsperError, UsageError
from esper.leyline.randomness import drawing
from esper.leyline.records import EpochRecord, RunSummary, seed_records
from esper.tasks.objective import Objective
from esper.tasks.training import TrainingConfig, build_optimizer, epoch_rates, rate_factor

Batches = Iterable[tuple[Any, Any]]
"""(inputs, targets) batches, iterated anew each epoch; `set_epoch(n)` is called where it exists."""

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Takes all parameters of a network that has not grown yet; those of seeds join by themselves."""


@dataclass(frozen=True, kw_only=True)
class GrowthConfig(Config):
    """How one network is grown."""

    epochs: int = option(60, "Epochs of the whole run.", minimum=1)
    seed: int = option(0, "Seed of the whole run.", minimum=0)
    twin: bool = option(False, "Also train the network that only waits, for comparison.")
    training: TrainingConfig = option(TrainingConfig, "How the network is trained.")
    garden: GardenConfig = option(GardenConfig, "The life of seeds and the limits of growth.")
    gardener: GardenerConfig = option(GardenerConfig, "How the network is measured.")


class GrowthRun:
    """Everything about growing one network; iterate `epochs()` to carry it out."""

    def __init__(
        self,
        model: nn.Module,
        *,
        slots: Sequence[str] | Mapping[str, str],
        train: Batches,
        val: Batches,
        objective: Objective,
        optimizer: OptimizerFactory | None = None,
        config: GrowthConfig,
        controller: str | Controller = DEFAULT_CONTROLLER,
        test: Batches | None = None,
        scheduler: SchedulerFactory | None = None,
        name: str = "model",
        device: torch.device | str | None = None,
    ) -> None:
        """Wrap the model; nothing is trained yet.

        Without an optimizer it is the one of `config.training`, and its learning rates are those of
        `config.training` too, unless a scheduler sets them.
        """
        self.config = config
        self.name = name
        self.controller_name = (
            controller if isinstance(controller, str) else type(controller).__name__
        )
        self.device = _device_of(model) if device is None else torch.device(device)
        model = model.to(self.device)
        for which, batches in (("train", train), ("val", val), ("test", test)):
            if isinstance(batches, Iterator):
                raise UsageError(f"{which} can be read only once; give a list or a DataLoader")
        self._train = train
        self._val = BatchEvaluator(_Moved(val, self.device), objective)
        self._test = None if test is None else BatchEvaluator(_Moved(test, self.device), objective)
        self.example_input, targets = _first_batch(val, self.device)
        with _explaining(f"the model cannot take a validation batch {_shapes(self.example_input)}"):
            garden = Garden(
                model, slots, self.example_input, config=config.garden.replace(seed=config.seed)
            )
        _try_objective(garden, objective, self.example_input, targets)
        self.parameters_before = garden.count_parameters()
        self._make_optimizer = optimizer
        self._sets_rates = optimizer is None and scheduler is None
        self.gardener = Gardener(
            garden,
            controller,
            config.epochs,
            seed=config.seed,
            config=config.gardener,
            rates=_rates_to_come(config) if self._sets_rates else None,
        )
        self.modules = describe_host(garden, self.example_input)
        self.gardener.optimizer(lambda _: self._optimizer_of(garden))
        assert self.gardener.carried is not None
        self.trainee = Trainee(
            garden,
            self.gardener.carried,
            objective,
            max_grad_norm=config.training.max_grad_norm,
            scheduler=scheduler,
        )
        self.twin: Trainee | None = None
        self._seconds = 0.0

    @property
    def garden(self) -> Garden:
        """The network being grown."""
        return self.trainee.garden

    @property
    def history(self) -> list[EpochRecord]:
        """What happened so far."""
        return self.gardener.history

    @property
    def seconds(self) -> float:
        """Time spent in epochs so far, before a resume too."""
        return self._seconds

    def epochs(self) -> Iterator[EpochRecord]:
        """Train, measure and decide, one epoch at a time, until the horizon."""
        while self.gardener.epoch < self.config.epochs:
            start = time.monotonic()
            train_loss = self._train_epoch(self.gardener.epoch + 1)
            twin_score = None if self.twin is None else _score(self._val, self.twin.garden)
            is_own_twin = self.config.twin and self.twin is None
            record = self.gardener.step(
                self._val,
                train_loss=train_loss,
                twin_score=twin_score,
                is_own_twin=is_own_twin,
                before_action=self._fork_twin if is_own_twin else None,
            )
            self._seconds += time.monotonic() - start
            yield record

    def finish(self) -> Grown:
        """Measure every seed once more and touch the test split for the first and only time."""
        contributions = evaluate_contributions(self.garden, self._val)
        test = twin_test = None
        if self._test is not None:
            test = _score(self._test, self.garden)
            if self.config.twin:
                twin_test = test if self.twin is None else _score(self._test, self.twin.garden)
        last = self.history[-1]
        summary = RunSummary(
            task=self.name,
            controller=self.controller_name,
            seed=self.config.seed,
            epochs=self.gardener.epoch,
            parameters_before=self.parameters_before,
            parameters_after=self.garden.count_parameters(),
            flops_before=self.garden.host_flops,
            flops_after=self.garden.count_flops(),
            val_score=last.val_score,
            test_score=test,
            twin_val_score=last.twin_score,
            twin_test_score=twin_test,
            seeds=seed_records(self.history),
            seconds=self._seconds,
        )
        self.garden.eval()
        return Grown(
            model=self.garden,
            history=list(self.history),
            summary=summary,
            contributions=contributions,
            twin=None if self.twin is None else self.twin.garden.model,
            config=self.config,
            modules=self.modules,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue exactly from here."""
        trainee = self.trainee
        scheduler = None if trainee.scheduler is None else trainee.scheduler.state_dict()
        return {
            "gardener": self.gardener.state_dict(),
            "scheduler": scheduler,
            "twin": None if self.twin is None else self.twin.state_dict(),
            "seconds": self._seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, in a run made the same way."""
        self.twin = None
        if state["twin"] is not None:
            # Forked while this run is still un-grown: the twin never grows.
            self.twin = self.trainee.fork(self._optimizer_of)
            self.twin.load_state_dict(state["twin"])
        self.gardener.load_state_dict(state["gardener"])
        if self.trainee.scheduler is not None and state["scheduler"] is not None:
            self.trainee.scheduler.load_state_dict(state["scheduler"])
        self._seconds = float(state["seconds"])

    def _train_epoch(self, epoch: int) -> float | None:
        set_epoch = getattr(self._train, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        for one in (self.trainee, self.twin):
            if one is not None:
                one.start_epoch()
                if self._sets_rates:
                    one.set_rates(*self._rates(epoch, one.garden))
        number = -1
        for number, (inputs, targets) in enumerate(_Moved(self._train, self.device)):
            for one in (self.trainee, self.twin):
                if one is not None:
                    # What a module draws (dropout) depends on nothing but its place in the run:
                    # a twin draws the same, and so does a run that was resumed.
                    with drawing(self.device, self.config.seed, epoch, number, "train"):
                        one.train_batch(inputs, targets)
        if number < 0:
            raise UsageError("the training set is empty; give it at least one batch")
        if self.twin is not None:
            self.twin.finish_epoch()
        return self.trainee.finish_epoch()

    def _optimizer_of(self, garden: Garden) -> Optimizer:
        if self._make_optimizer is None:
            return build_optimizer(self.config.training, slot_groups(garden))
        return self._make_optimizer(list(garden.parameters()))

    def _rates(self, epoch: int, garden: Garden) -> tuple[float, list[float]]:
        learned = garden.state.learned[0].tolist()
        return epoch_rates(self.config.training, epoch, self.config.epochs, learned)

    def _fork_twin(self) -> None:
        self.twin = self.trainee.fork(self._optimizer_of)


def _rates_to_come(config: GrowthConfig) -> RateTable:
    """Return the host's learning rates in all epochs of a run."""
    epochs = range(1, config.epochs + 1)
    factors = [rate_factor(config.training, epoch, config.epochs) for epoch in epochs]
    return RateTable(torch.tensor([factors]), torch.tensor([config.training.learning_rate]))


class _Moved:
    """Batches on a device."""

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self._batches = batches
        self._device = device

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self._batches:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
                raise UsageError(
                    f"batches must be (inputs, targets) pairs, got a {type(batch).__name__}{size}"
                )
            inputs, targets = batch
            yield _move(inputs, self._device), _move(targets, self._device)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _move(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_move(item, device) for item in value)
    return value


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _first_batch(batches: Batches, device: torch.device) -> tuple[Any, Any]:
    for batch in _Moved(batches, device):
        return batch
    raise UsageError("the validation set is empty; give it at least one batch")


def _try_objective(garden: Garden, objective: Objective, inputs: Any, targets: Any) -> None:
    """Find out before an epoch is spent that the loss does not suit the model or the data."""
    args, kwargs = call_arguments(inputs)
    with evaluating(garden), torch.no_grad():
        outputs = garden(*args, **kwargs)
        what = f"outputs {_shapes(outputs)} and targets {_shapes(targets)}"
        with _explaining(f"the loss cannot be taken of {what}"):
            apply_objective(objective, outputs, targets)


@contextmanager
def _explaining(problem: str) -> Iterator[None]:
    """Turn what somebody's own model or loss raises into one line that says where."""
    try:
        yield
    except (EsperError, Warning):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"{problem}: {type(error).__name__}: {reason}") from error


def _shapes(value: Any) -> str:
    """Return the shapes in a batch, as its owner would write them."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shapes(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_shapes, value)) + ")"
    return type(value).__name__


def _score(evaluator: BatchEvaluator, garden: Garden) -> float:
    everything_on = torch.ones((1, len(garden.slot_names)), dtype=torch.bool)
    loss, correct = evaluator.measure(garden, everything_on)
    return float(values_in_points(loss, correct).mean())
