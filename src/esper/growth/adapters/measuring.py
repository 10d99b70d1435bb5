"""Measurements of adapters during training: gradients of weights, use of components."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from esper.growth.adapters.weights import AdaptedWeight, as_matrix
from esper.growth.depth.blocks import world_size

Weights = Mapping[str, AdaptedWeight]


def shared_seed(device: torch.device) -> int:
    """Return the seed of PyTorch's generator; in several processes that of rank 0."""
    seed = torch.tensor(torch.initial_seed() & 0x7FFF_FFFF_FFFF_FFFF, device=device)
    if world_size() > 1:
        dist.broadcast(seed, 0)
    return int(seed)


class GradientSums:
    """Gradients of whole weights, summed over backward passes.

    Meanwhile the weights require a gradient. A hook takes it away as soon as it is computed, so
    neither the optimizer nor gradient clipping ever sees it.
    """

    def __init__(self, weights: Weights) -> None:
        """Watch the backward passes of these weights."""
        self._weights = weights
        self._sums: dict[str, Tensor] = {}
        self._has_new = False
        self._handles = []
        for name, one in weights.items():
            one.weight.requires_grad_(True)
            self._handles.append(one.weight.register_post_accumulate_grad_hook(self._hook(name)))

    def _hook(self, name: str) -> Any:
        def take(weight: Tensor) -> None:
            gradient = weight.grad
            weight.grad = None
            assert gradient is not None
            layout = self._weights[name].pair.layout
            matrix = as_matrix(gradient.detach(), layout).to(self._weights[name].pair.A.dtype)
            self._sums[name] = self._sums[name] + matrix if name in self._sums else matrix.clone()
            self._has_new = True

        return take

    def end_step(self) -> bool:
        """Return whether there was a backward pass since the last call."""
        has_new, self._has_new = self._has_new, False
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
        return {name: value.clone() for name, value in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self._sums = {
            name: value.to(self._weights[name].pair.A.device, copy=True)
            for name, value in state.items()
        }


def describe_not_finite(gradients: Mapping[str, Tensor]) -> str:
    """Return a warning about sums of gradients that are NaN or infinite; empty if none are."""
    odd = [name for name, one in gradients.items() if not bool(torch.isfinite(one).all())]
    if not odd:
        return ""
    which = f"{odd[0]} and {len(odd) - 1} more weights" if len(odd) > 1 else odd[0]
    return (
        f"the gradients of {which} were not finite while they were measured, so these keep the "
        "rank they had; check that the loss is finite in these steps and lower the learning rate, "
        "or place ranks before training by adapters.measure(batches, loss)"
    )


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
