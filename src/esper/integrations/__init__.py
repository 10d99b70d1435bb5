"""Growth in the training loops of other libraries, and what their callbacks share.

Each module needs its own extra and is imported by name: `esper.integrations.lightning`,
`esper.integrations.hugging_face`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.batches import Batches, first_batch
from esper.growth.config import GardenerConfig
from esper.growth.criterion import Loss, find_criterion
from esper.growth.gardener import Gardener
from esper.kasmina.evaluation import Evaluate, Evaluator, moving_norms
from esper.kasmina.garden import Garden
from esper.kasmina.recalibration import SpreadSample
from esper.kasmina.slots.probe import map_tensors
from esper.leyline.controller import Controller
from esper.leyline.errors import warn
from esper.leyline.records import EpochRecord
from esper.tamiyo.controllers import WaitController
from esper.utils.randomness import drawing


class GardenerOptions(TypedDict, total=False):
    """Arguments of `esper.Gardener` that a `GrowingCallback` hands on."""

    max_growth: float | str | None
    max_seeds: int | None
    max_parameters: int | None
    max_added_flops: int | None
    ablate_every: int | None
    seed: int
    config: GardenerConfig | None


def make_gardener(
    garden: Garden,
    controller: str | Controller,
    horizon: int,
    **options: Unpack[GardenerOptions],
) -> Gardener:
    """Return a gardener for a trainer, which gives every process a part of the validation set."""
    config = options.get("config") or GardenerConfig()
    options["config"] = config.replace(val_is_sharded=True)
    return Gardener(garden, controller, horizon, **options)


# ---- Rounds: the training from one validation to the next counts as an epoch of growth


_LOSSES = "training_losses"
"""Key in the optimizer's `state_dict` of the sum and the number of this round's losses."""


class Rounds:
    """Calls `Gardener.step` at the end of each round, in a loop that belongs to a trainer.

    Args:
        gardener: measures and decides.
        loss: the loss of a sample, as `esper.grow` takes it.
        evaluate: measures instead of the trainer's validation batches; None uses those.
    """

    def __init__(
        self, gardener: Gardener, loss: Loss | None, evaluate: Evaluate | Evaluator | None
    ) -> None:
        """Begin the first round."""
        self.gardener = gardener
        self._loss = loss
        self._evaluate = evaluate
        self._sum: Tensor | None = None
        self._batches = 0
        self._sample = self._new_sample()
        if self._sample.most:
            # The network's own inputs, whatever the trainer's batches look like.
            gardener.garden.register_forward_pre_hook(self._see, with_kwargs=True)

    def carry(self, optimizer: Optimizer) -> None:
        """Save an unfinished round with the optimizer's state, as the gardener is."""
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._load)

    def add_loss(self, loss: Any) -> None:
        """Add the loss of one training batch; anything but one number is ignored."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Summed on its device: reading it would make the CPU wait.
            value = loss.detach().double().reshape(())
            self._sum = value if self._sum is None else self._sum + value
            self._batches += 1

    def end(
        self,
        batches: Batches | None,
        *,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> EpochRecord | None:
        """Measure, decide and act; return the record, or None after the horizon.

        At the horizon, warn with the reasons if nothing has grown, or not completely.
        """
        gardener = self.gardener
        if gardener.epoch >= gardener.horizon:
            return None
        train_loss = None if self._sum is None else float(self._sum) / self._batches
        parameter = next(gardener.garden.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        # Trainers validate in inference mode; parameters made there could never be trained.
        with torch.inference_mode(False), torch.enable_grad(), drawing(device, "round"):
            if self._evaluate is None:
                assert batches is not None
                judged = find_criterion(
                    gardener.garden.model, self._loss, first_batch(batches), device
                )
                self._evaluate = judged.evaluator(batches, device, precision=precision)
                gardener.tell(**judged.facts)
            with precision():
                gardener.recalibrate_on(self._sample.batches)
            record = gardener.step(self._evaluate, train_loss=train_loss)
        self._sum, self._batches = None, 0
        self._sample = self._new_sample()
        is_over = gardener.epoch >= gardener.horizon
        if is_over and gardener.why and not isinstance(gardener.controller, WaitController):
            warn(" ".join(gardener.why))
        return record

    def _new_sample(self) -> SpreadSample:
        """Return a collector of batches for BatchNorm statistics; of size 0 without such layers."""
        gardener = self.gardener
        is_needed = bool(moving_norms(gardener.garden))
        return SpreadSample(gardener.config.statistics_samples if is_needed else 0)

    def _see(self, garden: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Collect the inputs of a training batch."""
        if not garden.training or not torch.is_grad_enabled():
            return
        inputs: Any = args
        if kwargs:
            names = inspect.signature(self.gardener.garden.model.forward).parameters
            inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        self._sample.add(map_tensors(inputs, Tensor.detach))

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        total = None if self._sum is None else float(self._sum)
        state[_LOSSES] = [total, self._batches]

    def _load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if _LOSSES in state:
            total, self._batches = state[_LOSSES]
            self._sum = None if total is None else torch.tensor(total, dtype=torch.float64)
