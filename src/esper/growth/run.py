"""GrowthLoop: grows one network epoch by epoch, with or without its twin.

The twin has the same initial weights and the same batches, but never grows. Until the controller
first acts, the network is its own twin; then the twin is forked, and both train on every batch. The
twin of a deepened network is the static one, with all blocks awake from the first step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from esper.growth.batches import (
    Batches,
    DeviceBatches,
    MakeOptimizer,
    Windows,
    check_data,
    count_steps,
    device_of,
    explaining,
    generators_of,
    is_empty,
    optimizer_maker,
    refuse_meta,
    warn_of_left_out,
    warn_of_moving_statistics,
)
from esper.growth.budget import RunBudget
from esper.growth.checkpoint import Rewarm
from esper.growth.config import rates_to_come
from esper.growth.criterion import find_criterion
from esper.growth.depth.blocks import wake_copies
from esper.growth.depth.gardener import DepthGardener
from esper.growth.gardener import Gardener
from esper.growth.grown import Deepened, Grown
from esper.growth.request import AUTO, GrowRequest
from esper.growth.schedules import check_schedule, scheduler_maker
from esper.growth.snapshots import KeptNetworks, Recipe, Snapshot
from esper.growth.static import StaticGardener, paired_difference
from esper.kasmina.contribution import values_in_points
from esper.kasmina.evaluation import (
    BatchEvaluator,
    empty_set,
    evaluate_contributions,
    moving_norms,
)
from esper.kasmina.garden import Garden
from esper.kasmina.optimizer import slot_groups
from esper.kasmina.recalibration import (
    SpreadSample,
    first_samples,
    fitting_evaluator,
    recalibrate,
)
from esper.kasmina.slots.placement import Placed, SlotNames, place_nothing
from esper.kasmina.slots.suggestion import refuse_unteachable, suggest_slots
from esper.kasmina.training import Trainee, build_optimizer, epoch_rates
from esper.kasmina.wrapping import refuse_unsuitable
from esper.leyline.errors import OwnCodeError, UsageError, warn
from esper.leyline.reasons import static_warning, why_not_grown
from esper.leyline.records import EpochRecord, RunSummary, seeds_at_end, stacks_at_end
from esper.utils.process import choose_device
from esper.utils.randomness import drawing, undisturbed


class GrowthLoop:
    """Grows one network; iterate `epochs()`, then call `finish()`."""

    def __init__(self, request: GrowRequest) -> None:
        """Wrap the model; nothing is trained yet."""
        config, model, train, axes = request.config, request.model, request.train, request.axes
        self.name, self.controller_name = request.name, request.controller_name
        self.device = device_of(model) if request.device is None else choose_device(request.device)
        refuse_meta(model)
        refuse_unsuitable(model)
        self._recipe = Recipe.of(request)
        model = model.to(self.device)
        self._calibration_batches = getattr(train, "calibration_batches", None)
        if config.decide_every:
            train = Windows(train, config.decide_every)
        batch = check_data(train, request.val, request.test)
        judged = find_criterion(model, request.loss, batch, self.device)
        config = config.replace(gardener=config.gardener.with_task_facts(**judged.facts))
        self.config = config
        criterion = judged.criterion
        self.example_input, _ = next(iter(judged.moved([batch], self.device)))
        places: SlotNames | Placed = request.slots
        if request.placed is not None:
            places, axes = request.placed, None
        elif config.deepen is not None:
            places = place_nothing(model, self.example_input)
        elif request.slots == AUTO:
            found = suggest_slots(model, self.example_input, axes=axes)
            places, axes = list(found), found.axes
        else:
            refuse_unteachable(model, request.slots, self.example_input)
        garden = Garden(
            model,
            places,
            self.example_input,
            axes=axes,
            config=config.garden.replace(seed=config.seed),
        )
        if request.planted is not None:
            garden.sync(request.planted)
        warn_of_moving_statistics(model)
        self._train = train
        # The twin leaves the random numbers alone from which the network's batches are drawn.
        self._generators = [*generators_of(request.train), *generators_of(request.val)]
        self._judged = judged
        self._val = judged.evaluator(request.val, self.device)
        self._test = None
        if request.test is not None:
            self._test = judged.evaluator(request.test, self.device, name="test")
        self._sets_rates = request.optimizer is None and request.scheduler is None
        self.depth: DepthGardener | None = None
        """The gardener, if the network is deepened."""
        if config.deepen is not None:
            self.depth = DepthGardener(
                garden,
                config.deepen,
                config.epochs,
                steps_per_epoch=count_steps(train),
                example=self.example_input,
                seed=config.seed,
                config=config.gardener,
            )
        kind = Gardener if garden.slot_names else StaticGardener
        self.gardener = self.depth or kind(
            garden,
            request.controller,
            config.epochs,
            seed=config.seed,
            config=config.gardener,
            rates=rates_to_come(config) if self._sets_rates else None,
        )
        # `esper.grow` warns at the end.
        self.gardener.warns_at_end = False
        self._optimizer_of: MakeOptimizer = lambda of: build_optimizer(
            config.training, slot_groups(of)
        )
        if request.optimizer is not None:
            self._optimizer_of = optimizer_maker(request.optimizer, model)
        self.gardener.optimizer(lambda _: self._optimizer_of(garden))
        assert self.gardener.carried is not None
        warn_of_left_out(self.gardener.carried.optimizer, model)
        self.parameters_before, self.flops_before = self.gardener.sizes()
        self.trainee = Trainee(
            garden,
            self.gardener.carried,
            criterion.per_sample,
            max_grad_norm=config.training.max_grad_norm,
            of_batch=criterion.of_batch,
            scheduler=scheduler_maker(request.scheduler, request.optimizer),
            scheduler_every=request.scheduler_every,
        )
        check_schedule(self.trainee.scheduler, request.scheduler_every, config.epochs, train)
        self._rewarm: Rewarm | None = None
        if config.rewarm:
            self._rewarm = Rewarm.of(config.rewarm, train, config.epochs)
            self._rewarm.warm(self.trainee.optimizer)
        self.twin: Trainee | None = None
        self.budget: RunBudget | None = None
        """How far network and twin are in a budget of compute; None without one."""
        if config.budget is not None:
            self.budget = RunBudget(config, self.gardener, train, request.val)
        self._kept = KeptNetworks(config.keep)
        if self.depth is not None and config.twin:
            self._fork_twin()
        self._recent: list[Any] = []
        """Inputs of training batches for BatchNorm statistics: from the last epoch, or from the
        training set's `calibration_batches()`."""
        self._twin_recent: list[Any] = []
        self._is_exhausted = False
        self._why_stopped = ""
        self._seconds = 0.0

    @property
    def garden(self) -> Garden:
        """The network being grown."""
        return self.trainee.garden

    @property
    def history(self) -> list[EpochRecord]:
        """The records of all epochs so far."""
        return self.gardener.history

    @property
    def best(self) -> Snapshot:
        """The network of the best validated epoch so far."""
        return self._kept.best

    @property
    def seconds(self) -> float:
        """Time spent in epochs, including those before a resume."""
        return self._seconds

    @property
    def is_done(self) -> bool:
        """Whether all epochs are trained, or the run has stopped early."""
        return self.gardener.epoch >= self.config.epochs or bool(self.stopped)

    @property
    def stopped(self) -> str:
        """Why the run ended before its last epoch; empty if it did not."""
        done, patience = self.gardener.epoch, self.config.patience
        if done >= self.config.epochs:
            return ""
        if self._is_exhausted:
            return "the training data ended"
        if patience and done - self.best.epoch >= patience:
            return f"no better validation score in {patience} epochs"
        return self._why_stopped

    def stop(self, why: str) -> None:
        """End the run after the epoch that was just measured."""
        self._why_stopped = why

    def epochs(self) -> Iterator[EpochRecord]:
        """Train, measure and decide, one epoch at a time, until the horizon."""
        while not self.is_done:
            start = time.monotonic()
            train_loss = self._train_epoch(self.gardener.epoch + 1)
            if self._is_exhausted:
                return
            self._recalibrate()
            twin_score = None
            if self.twin is not None:
                with undisturbed(self._generators):
                    twin_score = _score(self._val, self.twin.garden)
                self._kept.take_twin(self.twin.garden, twin_score, self.gardener.epoch + 1)
            is_own_twin = self.config.twin and self.twin is None
            record = self.gardener.step(
                self._val,
                train_loss=train_loss,
                samples=None if self.budget is None else self.budget.own.samples,
                twin_score=twin_score,
                is_own_twin=is_own_twin,
                on_measured=self._take_copy,
                before_action=self._fork_twin if is_own_twin else None,
            )
            self._seconds += time.monotonic() - start
            self.gardener.warn_early()
            yield record

    def finish(self) -> Grown:
        """Return the result: the network of the epoch that is kept, and its twin's.

        Seeds that were never blended in, or make no difference, are removed. Then every seed is
        measured once more, and the test split is used for the first and only time.
        """
        if self._rewarm is not None:
            self._rewarm.release()
        last = self.history[-1]
        twin = None if self.twin is None else self.twin.garden
        with self.gardener.as_of_epoch(self._kept.kept_epoch(last)):
            kept, twin_kept = self._kept.give_back(self.garden, twin, last)
        has_twin = self.config.twin
        self.garden.drop_inert()
        inputs = self._recent or self._read_recent(last.epoch)
        evaluator = fitting_evaluator(self._val, self.garden, inputs) if inputs else self._val
        contributions = evaluate_contributions(self.garden, evaluator)
        test = twin_test = None
        if self._test is not None:
            test = _score(self._test, self.garden)
            if has_twin:
                twin_test = test if self.twin is None else _score(self._test, self.twin.garden)
        val_gain = None
        if self.twin is not None:
            val_gain = paired_difference(self, self.garden, self.twin.garden)
        parameters, flops = self.gardener.sizes()
        depth = last.depth
        summary = RunSummary(
            task=self.name,
            controller=self.controller_name,
            seed=self.config.seed,
            epochs=self.gardener.epoch,
            parameters_before=self.parameters_before,
            parameters_after=parameters,
            flops_before=self.flops_before,
            flops_after=flops,
            val_score=kept.score,
            test_score=test,
            twin_val_score=twin_kept.score if has_twin else None,
            twin_test_score=twin_test,
            seeds=seeds_at_end(self.history, kept.epoch),
            seconds=self._seconds,
            kept_epoch=kept.epoch,
            twin_kept_epoch=twin_kept.epoch if has_twin else None,
            stopped=self.stopped,
            chance_loss=self.gardener.chance_loss,
            stacks=stacks_at_end(self.history, kept.epoch),
            training_flops=last.training_flops,
            static_flops=None if depth is None else depth.static_flops,
            compute_budget=None if self.budget is None else self.budget.flops,
        )
        self.garden.eval()
        left: dict[str, Any] = {
            "history": list(self.history),
            "summary": summary,
            "contributions": contributions,
            "twin": None if self.twin is None else self.twin.garden.model,
            "config": self.config,
            "example_input": self.example_input,
            "why": why_not_grown(self.history, kept.epoch, self.stopped, summary.chance_loss),
            "static_warning": static_warning(
                self.history,
                summary,
                None if val_gain is None else astuple(val_gain),
                astuple(contributions.all_off),
            ),
            "val_gain": val_gain,
            "recipe": self._recipe,
        }
        if self.depth is not None:
            self.depth.remove_sleeping()
            return Deepened(model=self.garden.model, garden=self.garden, **left)
        return Grown(model=self.garden, **left)

    def val_values(self, garden: Garden) -> Tensor:
        """Return the score of a network on every validation sample, in points."""
        return _values(self._val, garden)

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume exactly."""
        trainee = self.trainee
        scheduler = None if trainee.scheduler is None else trainee.scheduler.state_dict()
        return {
            "gardener": self.gardener.state_dict(),
            "scheduler": scheduler,
            "twin": None if self.twin is None else self.twin.state_dict(),
            "kept": self._kept.state_dict(),
            "stopped": {"why": self._why_stopped, "epochs": self.config.epochs},
            "seconds": self._seconds,
            "budget": None if self.budget is None else self.budget.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, in a run made the same way."""
        self.twin = None
        if state["twin"] is not None:
            # Forked before the garden grows back, because the twin never grows.
            self._fork_twin()
            assert self.twin is not None
            self.twin.load_state_dict(state["twin"])
        self.gardener.load_state_dict(state["gardener"])
        self._kept.load_state_dict(state["kept"])
        # A stopped run that is given another length goes on.
        is_as_long = int(state["stopped"]["epochs"]) == self.config.epochs
        self._why_stopped = str(state["stopped"]["why"]) if is_as_long else ""
        self._recent = []
        if self.trainee.scheduler is not None and state["scheduler"] is not None:
            self.trainee.scheduler.load_state_dict(state["scheduler"])
        self._seconds = float(state["seconds"])
        if self.budget is not None:
            self.budget.load_state_dict(state["budget"])

    def _train_epoch(self, epoch: int) -> float | None:
        networks = [one for one in (self.trainee, self.twin) if one is not None]
        for one in networks:
            one.start_epoch()
            if self._sets_rates:
                learned = one.garden.state.learned[0].tolist()
                rates = epoch_rates(self.config.training, epoch, self.config.epochs, learned)
                one.set_rates(*rates)
        sample = twin_sample = self._sample()
        if self.budget is None:
            self._announce(epoch)
            trained = self._train_on(self._train, epoch, networks, sample)
        else:
            trained = self._train_on(self.budget.own_share(), epoch, networks[:1], sample)
            for twin in networks[1:]:
                twin_sample = self._sample()
                share = self.budget.twin_share(epoch, twin.garden.count_flops())
                with undisturbed(self._generators):
                    self._train_on(share, epoch, [twin], twin_sample)
        if not trained:
            self._stop_early(epoch - 1)
            return None
        self._recent = self._read_calibration() if sample is None else sample.batches
        self._twin_recent = self._recent if twin_sample is None else twin_sample.batches
        if self.twin is not None:
            self.twin.finish_epoch()
        return self.trainee.finish_epoch()

    def _train_on(
        self,
        given: Batches,
        epoch: int,
        networks: Sequence[Trainee],
        sample: SpreadSample | None,
    ) -> int:
        """Train networks on an epoch's batches, of which `sample` keeps some; return how many."""
        number, batches = -1, self._moved(given)
        for number, (inputs, targets) in enumerate(batches):
            if is_empty((inputs, targets)):
                raise UsageError(f"epoch {epoch}: {batches.place} has no sample; leave it out")
            self._recent = []
            if sample is not None:
                sample.add(inputs)
            if self._rewarm is not None:
                self._rewarm.at(epoch, number)
            if self.depth is not None:
                self.depth.start_batch(inputs)
            for one in networks:
                # Random numbers (dropout) depend only on the place in the run, so a twin and a
                # resumed run draw the same.
                with (
                    drawing(self.device, self.config.seed, epoch, number, "train"),
                    explaining(lambda: f"epoch {epoch}: {batches.place} failed", OwnCodeError),
                ):
                    loss = one.train_batch(inputs, targets)
                if self.depth is not None and one is self.trainee:
                    self.depth.end_batch(loss)
        return number + 1

    def _moved(self, batches: Batches, name: str = "training") -> DeviceBatches:
        return self._judged.moved(batches, self.device, name, is_training=True)

    def _statistics_samples(self) -> int:
        """Return the most samples for BatchNorm statistics; 0 in a model without such layers."""
        return self.config.gardener.statistics_samples if moving_norms(self.garden) else 0

    def _sample(self) -> SpreadSample | None:
        """Return a collector of an epoch's batches for BatchNorm statistics; None without need."""
        most = 0 if self._calibration_batches else self._statistics_samples()
        return SpreadSample(most) if most else None

    def _read_calibration(self) -> list[Any]:
        """Return the inputs of the training set's `calibration_batches()`."""
        most = self._statistics_samples()
        if not most or self._calibration_batches is None:
            return []
        batches = self._moved(self._calibration_batches(), "calibration")
        return list(first_samples((inputs for inputs, _ in batches), most))

    def _read_recent(self, epoch: int) -> list[Any]:
        """Return what `_recent` was after an epoch that was trained before a resume."""
        if not self._statistics_samples():
            return []
        if self._calibration_batches:
            return self._read_calibration()
        sample = SpreadSample(self._statistics_samples())
        self._announce(epoch)
        batches = self._train if self.budget is None else self.budget.own.again()
        for inputs, _ in self._moved(batches):
            sample.add(inputs)
        return sample.batches

    def _recalibrate(self) -> None:
        """Recompute the BatchNorm statistics of network and twin."""
        self.gardener.recalibrate_on(self._recent)
        if self.twin is not None:
            twin = self.twin.garden
            recalibrate(twin, self._twin_recent, moving_norms(twin))

    def _take_copy(self, score: float) -> None:
        with self.gardener.as_of_epoch():
            self._kept.take(self.garden, score, self.gardener.epoch)

    def _announce(self, epoch: int) -> None:
        """Call `set_epoch` of the training batches if they have it."""
        set_epoch = getattr(self._train, "set_epoch", None)
        if callable(set_epoch) and self.budget is None:  # A budget has shares, not passes.
            set_epoch(epoch)

    def _stop_early(self, done: int) -> None:
        """End a run whose iterator is exhausted; refuse one that was empty from the start."""
        if not done:
            raise UsageError(empty_set("training"))
        self._is_exhausted = True
        warn(
            f"the training data ended after {done} of {self.config.epochs} decisions "
            f"({self.config.decide_every} steps each), so the run ends here; write epochs={done}"
        )

    def _fork_twin(self) -> None:
        self.twin = self.trainee.fork(self._optimizer_of)
        if self._rewarm is not None:
            self._rewarm.warm(self.twin.optimizer)
        wake_copies(self.twin.garden)
        if self.budget is not None:
            self.budget.fork_twin()
        self._kept.fork()


def _score(evaluator: BatchEvaluator, garden: Garden) -> float:
    return float(_values(evaluator, garden).mean())


def _values(evaluator: BatchEvaluator, garden: Garden) -> Tensor:
    everything_on = torch.ones((1, len(garden.slot_names)), dtype=torch.bool)
    loss, correct = evaluator.measure(garden, everything_on)
    return values_in_points(loss, correct)[0]
