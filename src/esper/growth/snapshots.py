"""Copies of a run's networks: before training, of its best epoch and of its last."""

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
from esper.leyline.errors import NonFiniteError, UsageError, describe_exception
from esper.leyline.records import EpochRecord


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A network as it was when an epoch was measured."""

    epoch: int = 0
    """0 before the first measurement."""
    score: float = -math.inf
    weights: Mapping[str, Any] | None = None
    """Copy of its `state_dict`, lifecycle included; None if only the score is known."""

    @classmethod
    def copy_of(cls, garden: Garden, score: float, epoch: int) -> Snapshot:
        """Return a copy of a garden with the score just measured."""
        weights = {name: _copy(value) for name, value in garden.state_dict().items()}
        return cls(epoch, score, weights)

    def or_better(self, garden: Garden, score: float, epoch: int) -> Snapshot:
        """Return this, or a copy of a garden with a higher score; of equals the first stays."""
        return Snapshot.copy_of(garden, score, epoch) if score > self.score else self

    def write_to(self, garden: Garden) -> None:
        """Load this network into a garden."""
        if self.weights is None:
            raise NonFiniteError(
                "the validation loss was not finite in any epoch; lower the learning rate, clip "
                "gradients or check the data"
            )
        garden.load_state_dict(self.weights)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors."""
        weights = None if self.weights is None else dict(self.weights)
        return {"epoch": self.epoch, "score": self.score, "weights": weights}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Snapshot:
        """Read what `state_dict` returned."""
        return cls(int(state["epoch"]), float(state["score"]), state["weights"])


class KeptNetworks:
    """Copies of the networks that a run may return, taken before the controller acts on them.

    Args:
        keep: which of them the run returns.
    """

    def __init__(self, keep: Keep) -> None:
        """Start without any copy."""
        self._keep = keep
        self.best = Snapshot()
        """The network of the best validated epoch so far."""
        self._last: Snapshot | None = None
        """That of the last epoch, if the run returns it: an action may change it."""
        self._twin_best: Snapshot | None = None
        """The twin of its own best epoch, if a twin is trained."""

    def take(self, garden: Garden, score: float, epoch: int) -> None:
        """Copy the network that was just measured, if the run may return it."""
        self.best = self.best.or_better(garden, score, epoch)
        if self._keep == "last":
            self._last = Snapshot.copy_of(garden, score, epoch)

    def take_twin(self, twin: Garden, score: float, epoch: int) -> None:
        """Copy the twin that was just measured, if the run may return it."""
        assert self._twin_best is not None, "a twin is forked first"
        self._twin_best = self._twin_best.or_better(twin, score, epoch)

    def fork(self) -> None:
        """Start to copy the twin, whose best network so far is that of the run."""
        self._twin_best = self.best

    def kept_epoch(self, last: EpochRecord) -> int:
        """Return the epoch whose network the run returns."""
        return self.best.epoch if self._keep == "best" else last.epoch

    def give_back(
        self, garden: Garden, twin: Garden | None, last: EpochRecord
    ) -> tuple[Snapshot, Snapshot]:
        """Load the networks that the run returns into garden and twin; return what they are.

        Without a twin that differs, the second result describes the network itself.
        """
        if self._keep == "best":
            twin_best = self.best if self._twin_best is None else self._twin_best
            self.best.write_to(garden)
            if twin is not None:
                twin_best.write_to(twin)
            return self.best, twin_best
        if last.decision is not None:
            # The run ended early, after an action that may have changed the network.
            if self._last is None:
                raise UsageError(
                    f"this run stopped early, after epoch {last.epoch}, and its checkpoint holds "
                    "only the best network, not the last; continue it with keep='best'"
                )
            self._last.write_to(garden)
        score = last.val_score if last.twin_score is None else last.twin_score
        return Snapshot(last.epoch, last.val_score), Snapshot(last.epoch, score)

    def state_dict(self) -> dict[str, Any]:
        """Return all copies as plain data and tensors."""

        def saved(one: Snapshot | None) -> dict[str, Any] | None:
            return None if one is None else one.state_dict()

        return {
            "best": self.best.state_dict(),
            "last": saved(self._last),
            "twin_best": saved(self._twin_best),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

        def read(name: str) -> Snapshot | None:
            return None if state[name] is None else Snapshot.from_state_dict(state[name])

        self.best = Snapshot.from_state_dict(state["best"])
        self._last, self._twin_best = read("last"), read("twin_best")


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


# ---- The request of a run, to repeat it


@dataclass(frozen=True, eq=False)
class Recipe:
    """The request of a run, with model, optimizer and schedule as they were before training."""

    request: GrowRequest
    problem: str = ""
    """Why the model could not be copied; empty if it was."""

    @classmethod
    def of(cls, request: GrowRequest) -> Recipe:
        """Copy what training will change into main memory."""
        model = request.model
        # Twice the model may not fit on its device.
        memo: dict[int, Any] = {
            id(tensor): _in_main_memory(tensor)
            for tensor in (*model.parameters(), *model.buffers())
            if tensor.device.type != "cpu"
        }
        try:
            return cls(_copied(request, memo))
        except Exception as error:  # The user's model may fail in any way.
            return cls(request, describe_exception(error))

    def again(self) -> GrowRequest:
        """Return the request with the untrained model.

        Raises:
            UsageError: The model could not be copied.
        """
        if self.problem:
            raise UsageError(
                f"the model could not be copied before training ({self.problem}); give an "
                "untrained one: grown.compare_static(model)"
            )
        request = _copied(self.request, {})
        if isinstance(request.scheduler, LRScheduler):
            _track_steps(request.scheduler.optimizer)
        return request


def _copied(request: GrowRequest, memo: dict[int, Any]) -> GrowRequest:
    """Return a request with copies of its model, optimizer and schedule."""
    own: dict[str, Any] = {
        name: value
        for name in ("model", "optimizer", "scheduler")
        if isinstance(value := getattr(request, name), nn.Module | Optimizer | LRScheduler)
    }
    # In one copy, so that references between them lead to the copies.
    return replace(request, **copy.deepcopy(own, memo))


def _track_steps(optimizer: Optimizer) -> None:
    """Let a schedule see the steps of a copied optimizer, or PyTorch would warn.

    A schedule wraps `optimizer.step` when it is made, and a copy lacks the wrapper.
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
