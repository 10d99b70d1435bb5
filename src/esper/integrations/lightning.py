"""Lightning callbacks that grow a network while it is fitted.

`DeepenCallback` deepens the network of any `LightningModule`:

    Trainer(max_steps=8_000, callbacks=[DeepenCallback()]).fit(module, train)

A quarter of its blocks are awake at first; the rest wake as copies. Lightning's checkpoints hold
the whole module and how many blocks are awake, so `fit(..., ckpt_path=...)` resumes exactly.

`GrowingCallback` grows a garden inside a `LightningModule`:

    class Digits(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = esper.Garden(model, slots, example)
        ...

    Trainer(max_epochs=60, callbacks=[GrowingCallback()]).fit(Digits(), train, val)

It decides after every validation. Lightning's checkpoints hold everything: the garden grows back
before its weights are loaded, the optimizer finds its parameters by name, and its state includes
the gardener's memory. So `trainer.fit(..., ckpt_path=...)` resumes exactly, provided that the order
of batches depends only on the epoch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor, nn

from esper.growth.batches import Batches, count_samples
from esper.growth.config import DEFAULT_CONTROLLER
from esper.growth.criterion import Loss
from esper.growth.depth.deepen import Deepen
from esper.growth.gardener import Gardener
from esper.integrations import GardenerOptions, Rounds, make_gardener
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
        controller: who decides, as for `esper.Gardener`.
        horizon: validations of the whole run; by default as many as the trainer will make.
        loss: the loss of a validation sample, as `esper.grow` takes it.
        evaluate: measures the garden instead of the trainer's validation batches: a function from
            the model to (loss[M], correct[M] or None), samples in a fixed order.
        options: further arguments of `esper.Gardener`: `max_growth`, `max_seeds`,
            `max_parameters`, `max_added_flops`, `ablate_every`, `seed`, `config`.
    """

    def __init__(
        self,
        controller: str | Controller = DEFAULT_CONTROLLER,
        *,
        horizon: int | None = None,
        loss: Loss | None = None,
        evaluate: Evaluate | Evaluator | None = None,
        **options: Unpack[GardenerOptions],
    ) -> None:
        """Choose how to grow; the garden is found when the trainer begins to fit."""
        super().__init__()
        # A wrong name is refused here, not when fitting begins.
        inspect.signature(Gardener).bind_partial(**options)
        self._controller = controller
        self._horizon = horizon
        self._loss = loss
        self._evaluate = evaluate
        self._options = options
        self._rounds: Rounds | None = None

    @property
    def gardener(self) -> Gardener:
        """The gardener, with its history; available once `fit` has begun."""
        if self._rounds is None:
            raise UsageError("there is no gardener before trainer.fit(...); read it afterwards")
        return self._rounds.gardener

    @property
    def history(self) -> list[EpochRecord]:
        """One record for each validation."""
        return self.gardener.history

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bind garden and optimizer; Lightning loads the optimizer's saved state after this."""
        if not trainer.enable_validation:
            raise UsageError(
                "GrowingCallback decides after each validation, and this trainer never validates; "
                "give fit() validation batches and the module a validation_step"
            )
        garden = _garden_in(pl_module)
        horizon = self._horizon or _validations(trainer)
        gardener = make_gardener(garden, self._controller, horizon, **self._options)
        samples = count_samples(trainer.train_dataloader)
        gardener.tell(train_samples=samples, samples_per_epoch=_between(trainer, samples))
        optimizer = gardener.optimizer(lambda _: _optimizer_of(garden, trainer))
        self._rounds = Rounds(gardener, self._loss, self._evaluate)
        self._rounds.carry(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Add the loss of a batch."""
        assert self._rounds is not None
        self._rounds.add_loss(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure, decide and act; callbacks that save checkpoints run after this one."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        assert self._rounds is not None
        # A new seed copies the garden's mode; Lightning restores the mode of all other modules.
        self._rounds.gardener.garden.train()
        batches = None if self._evaluate is not None else _validation_batches(trainer)
        self._rounds.end(batches, precision=trainer.precision_plugin.val_step_context)


class DeepenCallback(Callback):  # type: ignore[misc]
    """Deepens the network inside the module being fitted.

    Args:
        options: arguments of `esper.Deepen`: `start`, `at`, `stacks`, `order`, `controller`,
            `ema`. Names of stacks are those in the `LightningModule`; `total_steps` and
            `batches_per_step` come from the trainer.
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
        """The `Deepen` object; available once `fit` has begun."""
        if self._depth is None:
            raise UsageError("there is no Deepen before trainer.fit(...); read it afterwards")
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
        """Start at the trainer's step, which it has restored by now."""
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Count the step and wake blocks when due; callbacks that save run after this one."""
        # A batch that only accumulates gradients is not a step.
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self.depth.step(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)


def _garden_in(module: LightningModule) -> Garden:
    """Return the one garden that is part of a module."""
    gardens = [part for part in module.modules() if isinstance(part, Garden)]
    if len(gardens) != 1:
        raise UsageError(
            f"{type(module).__name__} holds {len(gardens)} gardens instead of one; write "
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
            f"{len(found)} optimizers of configure_optimizers hold parameters of the garden; "
            "return exactly one that does, to which new seeds are added"
        )
    return found[0]


def _validations(trainer: Trainer) -> int:
    """Return how often a trainer will validate."""
    steps = trainer.estimated_stepping_batches
    batches = trainer.num_training_batches
    if math.isinf(steps) or math.isinf(batches):
        raise UsageError(
            "this trainer has no fixed number of validations; write GrowingCallback(horizon=N)"
        )
    between = int(trainer.val_check_batch)
    if trainer.check_val_every_n_epoch is None:
        return max(1, int(steps) * int(trainer.accumulate_grad_batches) // between)
    per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
    epochs = int(math.ceil(steps / per_epoch) // trainer.check_val_every_n_epoch)
    return max(1, epochs * max(1, int(batches) // between))


def _between(trainer: Trainer, samples: int) -> int:
    """Return the number of samples trained on between two validations; 0 if unknown."""
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
            f"the trainer has {len(loaders)} validation loaders, and growth is measured on one; "
            "write GrowingCallback(evaluate=function)"
        )
    batches: Batches = loaders
    return batches
