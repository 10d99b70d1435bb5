"""Growth in the training loops of other libraries: `lightning`, `hugging_face`, `transformers`.

Each module needs its own extra and is imported by name: `esper.integrations.lightning`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.batches import Batches, first_batch
from esper.growth.criterion import Loss
from esper.growth.gardener import Gardener
from esper.growth.own_loss import find_criterion
from esper.kasmina.evaluation import Evaluate, Evaluator
from esper.kasmina.recalibration import SpreadSample, moving_norms
from esper.kasmina.slots.probe import map_tensors
from esper.leyline.errors import warn
from esper.leyline.records import EpochRecord
from esper.tamiyo.controllers import WaitController
from esper.utils.randomness import drawing

# ---- Rounds: what a trainer trains from one validation to the next counts as an epoch of growth


_LOSSES = "training_losses"
"""Where the `state_dict` of the optimizer has the sum of this round's losses and their number."""


class Rounds:
    """Ends rounds for a gardener whose loop belongs to a trainer.

    Args:
        gardener: measures and decides; its optimizer is made before `carry` is called.
        loss: how a sample is judged, as `esper.grow` takes it.
        evaluate: measures in place of the trainer's validation batches, where it is given.
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
            # What the network is given, whatever the trainer's batches look like.
            gardener.garden.register_forward_pre_hook(self._see, with_kwargs=True)

    def carry(self, optimizer: Optimizer) -> None:
        """Let an unfinished round travel with the optimizer's state, as the gardener does."""
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._load)

    def add_loss(self, loss: Any) -> None:
        """Count the loss of one training batch, where the trainer tells it."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Summed where it is: to look at it would make the host wait for the device.
            value = loss.detach().double().reshape(())
            self._sum = value if self._sum is None else self._sum + value
            self._batches += 1

    def end(
        self,
        batches: Batches | None,
        *,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> EpochRecord | None:
        """Measure, decide and act; return what happened, None behind the horizon.

        At the horizon it warns where nothing has grown, or not to the end, and says why.
        """
        gardener = self.gardener
        if gardener.epoch >= gardener.horizon:
            return None
        train_loss = None if self._sum is None else float(self._sum) / self._batches
        parameter = next(gardener.garden.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        # Trainers validate in inference mode; what is made there could never be trained.
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
        """Return what collects a round's batches for running statistics, where there are any."""
        gardener = self.gardener
        is_needed = bool(moving_norms(gardener.garden))
        return SpreadSample(gardener.config.statistics_samples if is_needed else 0)

    def _see(self, garden: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Collect what the network is trained on."""
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
