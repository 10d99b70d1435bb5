"""Copies of the networks of a run: as it was before training, of its best and of its last epoch."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.growth.config import Keep
from esper.growth.request import GrowRequest
from esper.kasmina.garden import Garden
from esper.leyline.errors import UsageError, describe_exception
from esper.leyline.records import EpochRecord


@dataclass(frozen=True, slots=True)
class Measured:
    """A network as it was when an epoch was measured."""

    epoch: int = 0
    """0 before anything was measured."""
    score: float = -math.inf
    weights: Mapping[str, Any] | None = None
    """Copies of its `state_dict`, lifecycle included; None where only the score is known."""

    @classmethod
    def copy_of(cls, garden: Garden, score: float, epoch: int) -> Measured:
        """Return a copy of a garden with the score that it has just been measured to have."""
        weights = {name: _copy(value) for name, value in garden.state_dict().items()}
        return cls(epoch, score, weights)

    def or_better(self, garden: Garden, score: float, epoch: int) -> Measured:
        """Return this, or a copy of a garden that scores more; of equals the first stays."""
        return Measured.copy_of(garden, score, epoch) if score > self.score else self

    def write_to(self, garden: Garden) -> None:
        """Make a garden this network."""
        assert self.weights is not None, "an epoch was measured"
        garden.load_state_dict(self.weights)

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain data and tensors."""
        weights = None if self.weights is None else dict(self.weights)
        return {"epoch": self.epoch, "score": self.score, "weights": weights}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Measured:
        """Return what `state_dict` told."""
        return cls(int(state["epoch"]), float(state["score"]), state["weights"])


class Kept:
    """Copies of the networks of a run, taken when they were measured, before anything acted.

    Args:
        keep: which of them the run returns.
    """

    def __init__(self, keep: Keep) -> None:
        """Nothing was measured yet."""
        self._keep = keep
        self.best = Measured()
        """The network of the best validated epoch so far."""
        self._last: Measured | None = None
        """That of the last epoch, where it is to be returned: what is decided may change it."""
        self._twin_best: Measured | None = None
        """The twin of its own best epoch, once there is one."""

    def take(self, garden: Garden, score: float, epoch: int) -> None:
        """Take a copy of the network that was just measured, if it may be returned."""
        self.best = self.best.or_better(garden, score, epoch)
        if self._keep == "last":
            self._last = Measured.copy_of(garden, score, epoch)

    def take_twin(self, twin: Garden, score: float, epoch: int) -> None:
        """Do the same with the twin."""
        assert self._twin_best is not None, "a twin is forked first"
        self._twin_best = self._twin_best.or_better(twin, score, epoch)

    def fork(self) -> None:
        """From here on the twin is another network; so far the best of both is the same."""
        self._twin_best = self.best

    def kept_epoch(self, last: EpochRecord) -> int:
        """Return the epoch whose network `give_back` returns."""
        return self.best.epoch if self._keep == "best" else last.epoch

    def give_back(
        self, garden: Garden, twin: Garden | None, last: EpochRecord
    ) -> tuple[Measured, Measured]:
        """Make network and twin what the run returns; tell of which epochs, with their scores.

        Without a twin that differs, what is told of it is told of the network itself.
        """
        if self._keep == "best":
            twin_best = self.best if self._twin_best is None else self._twin_best
            self.best.write_to(garden)
            if twin is not None:
                twin_best.write_to(twin)
            return self.best, twin_best
        if last.decision is not None:
            # The run has ended early, after something was decided and perhaps done.
            if self._last is None:
                raise UsageError(
                    f"this run stopped early, after epoch {last.epoch}, and its checkpoint has no "
                    "network of that epoch but the best; continue it with keep='best'"
                )
            self._last.write_to(garden)
        score = last.val_score if last.twin_score is None else last.twin_score
        return Measured(last.epoch, last.val_score), Measured(last.epoch, score)

    def state_dict(self) -> dict[str, Any]:
        """Return all of them as plain data and tensors."""

        def told(one: Measured | None) -> dict[str, Any] | None:
            return None if one is None else one.state_dict()

        return {
            "best": self.best.state_dict(),
            "last": told(self._last),
            "twin_best": told(self._twin_best),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

        def read(name: str) -> Measured | None:
            return None if state[name] is None else Measured.from_state_dict(state[name])

        self.best = Measured.from_state_dict(state["best"])
        self._last, self._twin_best = read("last"), read("twin_best")


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


# ---- The run as it was asked for, to repeat it


@dataclass(frozen=True, eq=False)
class Recipe:
    """What a run was asked for, with model, optimizer and schedule as they were before it."""

    request: GrowRequest
    problem: str = ""
    """Why the model could not be copied; empty where it was."""

    @classmethod
    def of(cls, request: GrowRequest) -> Recipe:
        """Copy, into main memory, what training is about to change."""
        model = request.model
        # Twice the model may not fit on its device.
        memo: dict[int, Any] = {
            id(tensor): _in_main_memory(tensor)
            for tensor in (*model.parameters(), *model.buffers())
            if tensor.device.type != "cpu"
        }
        try:
            return cls(_copied(request, memo))
        except Exception as error:  # a model of somebody's own may refuse in any way
            return cls(request, describe_exception(error))

    def again(self) -> GrowRequest:
        """Return the request with a model to train from the beginning.

        Raises:
            UsageError: It cannot be repeated.
        """
        if self.problem:
            raise UsageError(
                f"the model could not be copied before it was trained ({self.problem}); give a "
                "fresh one: grown.compare_static(model)"
            )
        request = _copied(self.request, {})
        if isinstance(request.scheduler, LRScheduler):
            _track_steps(request.scheduler.optimizer)
        return request


def _copied(request: GrowRequest, memo: dict[int, Any]) -> GrowRequest:
    """Return a request whose model, and optimizer and schedule of that model, are copies."""
    own: dict[str, Any] = {
        name: value
        for name in ("model", "optimizer", "scheduler")
        if isinstance(value := getattr(request, name), nn.Module | Optimizer | LRScheduler)
    }
    # Together: what one of them holds of another must be the copy's.
    return replace(request, **copy.deepcopy(own, memo))


def _track_steps(optimizer: Optimizer) -> None:
    """Let a schedule see the steps of an optimizer that was copied: PyTorch warns where it cannot.

    A schedule wraps `optimizer.step` when it is made, and a copy goes without the wrapper.
    """
    step = optimizer.step

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = tracked  # type: ignore[method-assign]


def _in_main_memory(tensor: Tensor) -> Tensor:
    copied = tensor.detach().to("cpu", copy=True)
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
    copied.__dict__.update(tensor.__dict__)
    return copied
