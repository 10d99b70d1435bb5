"""Measurements of adapters during training: gradients of weights, use of components."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from esper.growth.adapters.weights import AdaptedWeight, as_matrix
from esper.growth.depth.blocks import world_size
from esper.leyline.errors import UsageError

Weights = Mapping[str, AdaptedWeight]

HUGE = 2.0**100
"""Gradients above this, as under a large scale of a `GradScaler`, are divided by it.

Sums and singular values of larger ones are not finite in single precision.
"""


def shared_seed(device: torch.device) -> int:
    """Return the seed of PyTorch's generator; in several processes that of rank 0."""
    seed = torch.tensor(torch.initial_seed() & 0x7FFF_FFFF_FFFF_FFFF, device=device)
    if world_size() > 1:
        dist.broadcast(seed, 0)
    return int(seed)


class GradientSums:
    """Gradients of whole weights, summed over backward passes.

    Meanwhile the weights require a gradient. A hook takes it away as soon as it is computed, so
    neither the optimizer nor gradient clipping ever sees it. A pass in which a gradient is not
    finite, as where the scale of a `GradScaler` is too high, is left out as a whole: sums over
    different passes could not be compared.
    """

    def __init__(self, weights: Weights) -> None:
        """Watch the backward passes of these weights."""
        self._weights = weights
        self._sums: dict[str, Tensor] = {}
        self._pass: dict[str, Tensor] = {}
        self._has_new = False
        # Passes whose gradients were not finite.
        self.left_out = 0
        self._handles = []
        for name, one in weights.items():
            # What an earlier loop left behind would be added to.
            one.weight.grad = None
            one.weight.requires_grad_(True)
            self._handles.append(one.weight.register_post_accumulate_grad_hook(self._hook(name)))

    def _hook(self, name: str) -> Any:
        def take(weight: Tensor) -> None:
            gradient = weight.grad
            weight.grad = None
            assert gradient is not None
            if name in self._pass:
                self._end_pass()
            self._pass[name] = gradient.detach()

        return take

    def _end_pass(self) -> None:
        """Add the gradients of a backward pass to the sums, if all of them are finite."""
        found, self._pass = self._pass, {}
        # A norm of inf is the largest absolute value; it is NaN if any value is.
        largest = [float(torch.linalg.vector_norm(one, math.inf)) for one in found.values()]
        if not all(math.isfinite(value) for value in largest):
            self.left_out += 1
            return
        for name, gradient in found.items():
            one = self._weights[name].pair
            matrix = as_matrix(gradient, one.layout).to(one.A.dtype)
            if max(largest) > HUGE:
                matrix = matrix / HUGE
            self._sums[name] = self._sums[name] + matrix if name in self._sums else matrix.clone()
        self._has_new = bool(found) or self._has_new

    def end_step(self, *, agrees: bool = False) -> bool:
        """Return whether there was a backward pass with finite gradients since the last call.

        Args:
            agrees: whether all processes call this now; then it is True if there was one in each.
        """
        self._end_pass()
        has_new, self._has_new = self._has_new, False
        if agrees and world_size() > 1:
            device = next(iter(self._weights.values())).weight.device
            is_new = torch.tensor(int(has_new), device=device)
            dist.all_reduce(is_new, dist.ReduceOp.MIN)
            self.left_out += has_new and not bool(is_new)
            return bool(is_new)
        return has_new

    def sums(self) -> dict[str, Tensor]:
        """Return the sums over passes and processes, by weight; those without are left out."""
        if world_size() > 1:
            for name in self._weights:
                # Every process takes part for every weight, with a gradient or without.
                one = self._weights[name]
                own = self._sums.setdefault(name, one.pair.A.new_zeros(one.rows, one.columns))
                dist.all_reduce(own)
        return dict(self._sums)

    def remove(self) -> None:
        """Remove the hooks and freeze the weights again."""
        for handle in self._handles:
            handle.remove()
        for one in self._weights.values():
            one.weight.requires_grad_(False)
            one.weight.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums so far."""
        self._end_pass()
        return {name: value.clone() for name, value in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self._sums = {
            name: value.to(self._weights[name].pair.A.device, copy=True)
            for name, value in state.items()
        }


def measure(
    model: nn.Module,
    sums: GradientSums,
    batches: Iterable[Any],
    loss: Callable[[Any], Tensor],
) -> int:
    """Sum the gradients of some batches, and return how many of them were measured.

    Args:
        model: the adapted network; the gradients of its parameters are as before in the end.
        sums: what to add to.
        batches: what to give to the loss, one after the other.
        loss: returns the loss of a batch.
    """
    if not isinstance(batches, Iterable) or not callable(loss):
        given = f"{type(batches).__name__} and {type(loss).__name__}"
        raise UsageError(
            f"measure() takes batches and a function, got {given}; write "
            "measure(batches, lambda batch: loss of the model)"
        )
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    measured, count = 0, 0
    try:
        for parameter, _ in kept:
            parameter.grad = None
        for batch in batches:
            count += 1
            value = loss(batch)
            _check_loss(value)
            value.backward()
            measured += sums.end_step()
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
    everywhere = torch.tensor(measured, device=kept[0][0].device)
    if world_size() > 1:
        dist.all_reduce(everywhere)
    if not int(everywhere):
        problem = "saw no gradient" if count else "got no batch"
        if sums.left_out:
            problem = f"saw no finite gradient in {count} batches"
        raise UsageError(
            f"measure() {problem}; write measure(batches, lambda batch: loss of the model)"
        )
    return measured


def _check_loss(value: Any) -> None:
    """Refuse what cannot be the loss of a batch."""
    what = type(value).__name__
    if not isinstance(value, Tensor):
        advice = "return the loss itself, without .item()"
    elif value.numel() != 1:
        what = f"a tensor {list(value.shape)}"
        advice = "return one number, as by .mean()"
    elif not value.requires_grad:
        what = "a tensor without a gradient"
        advice = "compute it by the model, without detach() and torch.no_grad()"
    else:
        return
    raise UsageError(f"the loss that measure() calls returned {what}; {advice}")


class Use:
    """How much the loss depends on each component: |b · gradient of b|, summed over steps.

    That is the first-order change of the loss if the component were removed.
    """

    def __init__(self, weights: Weights) -> None:
        """Watch the backward passes of the components."""
        self._weights = weights
        self._now: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._handles = [
            getattr(one.pair, one.pair.start).register_post_accumulate_grad_hook(self._hook(name))
            for name, one in weights.items()
            if one.pair.rank
        ]

    def _hook(self, name: str) -> Any:
        pair = self._weights[name].pair
        inner = 0 if pair.start == "B" else 1

        def take(trained: Tensor) -> None:
            assert trained.grad is not None
            # Under gradient accumulation the last pass has the sum of all.
            self._now[name] = (trained.detach() * trained.grad).sum(inner).abs()

        return take

    def end_step(self) -> None:
        """Add the use in the last backward pass of a step."""
        for name, value in self._now.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._now = {}

    def is_idle(self, name: str, index: int, share: float) -> bool:
        """Return whether a component was used less than this share of the mean component."""
        if name not in self._sums:
            return True
        count = sum(len(value) for value in self._sums.values())
        mean = sum(float(value.sum()) for value in self._sums.values()) / count
        return float(self._sums[name][index]) < share * mean

    def by_weight(self) -> dict[str, float]:
        """Return the share of each weight in the finite use of all."""
        sums = {name: float(value.sum()) for name, value in self._sums.items()}
        sums = {name: value for name, value in sums.items() if math.isfinite(value)}
        whole = sum(sums.values())
        return {name: value / whole for name, value in sums.items()} if whole else {}

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums so far."""
        return {name: value.clone() for name, value in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self._sums = {
            name: value.to(self._weights[name].pair.B.device, copy=True)
            for name, value in state.items()
        }
