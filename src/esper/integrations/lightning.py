"""Lightning callbacks that let a network grow while it is fitted.

`DeepenCallback` deepens the network of any `LightningModule`:

    Trainer(max_steps=8_000, callbacks=[DeepenCallback()]).fit(module, train)

A quarter of its blocks are awake at first; the rest wake as copies. Checkpoints of Lightning hold
the whole module and how many blocks are awake, so `fit(..., ckpt_path=...)` goes on exactly.

`GrowingCallback` lets a garden inside a `LightningModule` grow:

    class Digits(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = esper.Garden(model, slots, example)
        ...

    Trainer(max_epochs=60, callbacks=[GrowingCallback()]).fit(Digits(), train, val)

It decides whenever the trainer has validated. Checkpoints of Lightning hold everything: the
garden grows back before its weights are loaded, the optimizer finds its parameters by name, and
what the gardener remembers travels with the optimizer. So `trainer.fit(..., ckpt_path=...)` goes on
as if it had not stopped, provided that the order of batches depends on nothing but the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from esper.growth.batches import Batches, count_samples
from esper.growth.criterion import Loss
from esper.growth.depth.deepen import Deepen
from esper.growth.gardener import DEFAULT_CONTROLLER, Gardener, GardenerConfig
from esper.integrations import Rounds
from esper.kasmina.evaluation import Evaluate, Evaluator
from esper.kasmina.garden import Garden
from esper.leyline.controller import Controller
from esper.leyline.errors import UsageError, needing
from esper.leyline.records import EpochRecord

with needing("esper.integrations.lightning", "lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.trainer.states import TrainerFn


class GrowingCallback(Callback):  # type: ignore[misc]
    """Grows the garden that is part of the module being fitted.

    Args:
        controller: 'tamiyo', the learned one that comes along, 'heuristic', 'wait',
            'schedule:FILE', or an object.
        horizon: validations of the whole run; by default as many as the trainer will make.
        loss: how a validation sample is judged: as `esper.grow` takes it.
        evaluate: measures the garden in place of the trainer's validation batches: a function from
            the model to (loss[M], correct[M] or None), samples in a fixed order.
        max_growth: most parameters and operations of the grown network, as a multiple of the
            model's: 2.0 or "2x" lets it double. By default what the controller learned under:
            'tamiyo' grows a network to twice its size at most, rules know no limit.
        max_seeds: most seeds alive or fossilized at once, 0 without a limit.
        max_parameters: most trainable parameters, in place of what `max_growth` allows.
        max_added_flops: most operations per sample that seeds may add, likewise.
        seed: seed of controllers that draw.
        config: further settings.
    """

    def __init__(
        self,
        controller: str | Controller = DEFAULT_CONTROLLER,
        *,
        horizon: int | None = None,
        loss: Loss | None = None,
        evaluate: Evaluate | Evaluator | None = None,
        max_growth: float | str | None = None,
        max_seeds: int | None = None,
        max_parameters: int | None = None,
        max_added_flops: int | None = None,
        seed: int = 0,
        config: GardenerConfig | None = None,
    ) -> None:
        """Choose how to grow; the garden is found when the trainer begins to fit."""
        super().__init__()
        self._horizon = horizon
        self._loss = loss
        self._evaluate = evaluate
        self._make_gardener = partial(
            Gardener,
            controller=controller,
            max_growth=max_growth,
            max_seeds=max_seeds,
            max_parameters=max_parameters,
            max_added_flops=max_added_flops,
            seed=seed,
            # Lightning gives every process a part of the validation samples.
            config=(config or GardenerConfig()).replace(val_is_sharded=True),
        )
        self._rounds: Rounds | None = None

    @property
    def gardener(self) -> Gardener:
        """The gardener at work, with its history; there is one from the start of `fit` on."""
        if self._rounds is None:
            raise UsageError("the gardener comes to work when trainer.fit(...) begins")
        return self._rounds.gardener

    @property
    def history(self) -> list[EpochRecord]:
        """What happened, one record for each validation."""
        return self.gardener.history

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bind garden and optimizer; Lightning loads the optimizer's saved state after this."""
        if not trainer.enable_validation:
            raise UsageError(
                "growth decides whenever the trainer validates; give it validation batches and a "
                "validation_step"
            )
        garden = _garden_in(pl_module)
        gardener = self._make_gardener(garden, horizon=self._horizon or _validations(trainer))
        samples = count_samples(trainer.train_dataloader)
        gardener.tell(train_samples=samples, samples_per_epoch=_between(trainer, samples))
        optimizer = gardener.optimizer(lambda _: _optimizer_of(garden, trainer))
        self._rounds = Rounds(gardener, self._loss, self._evaluate)
        self._rounds.carry(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Take down the loss of a batch."""
        assert self._rounds is not None
        self._rounds.add_loss(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure, decide and act; callbacks that save checkpoints come after this one."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        assert self._rounds is not None
        # A new seed takes its mode from the garden; Lightning puts back that of all others.
        self._rounds.gardener.garden.train()
        batches = None if self._evaluate is not None else _validation_batches(trainer)
        self._rounds.end(batches, precision=trainer.precision_plugin.val_step_context)


class DeepenCallback(Callback):  # type: ignore[misc]
    """Deepens the network inside the module being fitted.

    Args:
        options: of `esper.Deepen`: `start`, `at`, `stacks`, `order`, `controller`, `ema`;
            names of stacks are those in the `LightningModule`, and `total_steps` and
            `batches_per_step` are those of the trainer.
    """

    def __init__(self, **options: Any) -> None:
        """Choose how to deepen; blocks sleep from the first batch on."""
        super().__init__()
        self._options = options
        self._depth: Deepen | None = None
        self._saved: dict[str, Any] = {}
        self._steps = 0

    @property
    def depth(self) -> Deepen:
        """The `Deepen` at work; there is one from the start of `fit` on."""
        if self._depth is None:
            raise UsageError("there is a Deepen once trainer.fit(...) has begun")
        return self._depth

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning writes into its checkpoints."""
        return self._saved if self._depth is None else self._depth.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until fitting starts."""
        self._saved = state_dict

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bind network and optimizers; Lightning loads the optimizers' saved state after this."""
        wrapper = trainer.model if isinstance(trainer.model, nn.Module) else pl_module
        options = dict(self._options)
        if "total_steps" not in options and math.isfinite(trainer.estimated_stepping_batches):
            options["total_steps"] = int(trainer.estimated_stepping_batches)
        options.setdefault("batches_per_step", trainer.accumulate_grad_batches)
        self._depth = Deepen(wrapper, trainer.optimizers, **options)
        if self._saved:
            self._depth.load_state_dict(self._saved)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin where the trainer does, which by now has restored its own state."""
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Count the step and wake blocks when it is time; callbacks that save come after this."""
        # Batches that only add to the gradient are no steps.
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self.depth.step(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)


def _garden_in(module: LightningModule) -> Garden:
    """Return the one garden that is part of a module."""
    gardens = [part for part in module.modules() if isinstance(part, Garden)]
    if len(gardens) != 1:
        raise UsageError(
            f"{type(module).__name__} holds {len(gardens)} gardens; make its network one: "
            "self.net = esper.Garden(model, slots, example)"
        )
    return gardens[0]


def _optimizer_of(garden: Garden, trainer: Trainer) -> Any:
    """Return the optimizer that trains a garden's host, or its seeds where that is frozen."""
    own = {id(parameter) for parameter in garden.parameters()}
    found = [
        optimizer
        for optimizer in trainer.optimizers
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"])
    ]
    if len(found) != 1:
        raise UsageError(
            f"{len(found)} optimizers of configure_optimizers hold parameters of the garden; one "
            "is needed, which new seeds join"
        )
    return found[0]


def _validations(trainer: Trainer) -> int:
    """Return how often a trainer will validate, as far as it says when it ends."""
    steps = trainer.estimated_stepping_batches
    batches = trainer.num_training_batches
    if math.isinf(steps) or math.isinf(batches):
        raise UsageError(
            "cannot tell how often this trainer will validate; say so: GrowingCallback(horizon=N)"
        )
    between = int(trainer.val_check_batch)
    if trainer.check_val_every_n_epoch is None:
        return max(1, int(steps) * int(trainer.accumulate_grad_batches) // between)
    per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
    epochs = int(math.ceil(steps / per_epoch) // trainer.check_val_every_n_epoch)
    return max(1, epochs * max(1, int(batches) // between))


def _between(trainer: Trainer, samples: int) -> int:
    """Return how many of an epoch's samples are trained on from one validation to the next."""
    batches = trainer.num_training_batches
    if math.isinf(batches):
        return 0
    epochs = trainer.check_val_every_n_epoch or 1
    return int(samples * epochs * trainer.val_check_batch / batches)


def _validation_batches(trainer: Trainer) -> Batches:
    """Return the one validation loader of a trainer."""
    loaders = trainer.val_dataloaders
    if isinstance(loaders, list | tuple) and len(loaders) == 1:
        loaders = loaders[0]
    if isinstance(loaders, list | tuple | dict | Tensor):
        raise UsageError(
            f"the trainer has {len(loaders)} validation loaders; say what growth is measured by: "
            "GrowingCallback(evaluate=function)"
        )
    batches: Batches = loaders
    return batches
