"""The low-rank pair that changes a weight, and its parameters in optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from esper.growth.depth.blocks import unwrap_optimizers
from esper.growth.steps import ForgottenSteps
from esper.leyline.errors import UsageError

Layout = Literal["linear", "transposed", "conv"]


class LowRank(nn.Module):
    """A parametrization that adds `scale · B A` to a weight; at rank 0 it returns the weight.

    The weight of a convolution is a matrix of output channels by everything else, so `A` is a
    convolution of the same kernel into `rank` channels and `B` a 1×1 convolution.
    """

    def __init__(self, weight: Tensor, layout: Layout, scale: float) -> None:
        """Start at rank 0, with both matrices trained."""
        super().__init__()
        self.layout = layout
        self.scale = scale
        rows, columns = matrix_shape(weight, layout)
        self.trained: tuple[str, ...] = ("A", "B")
        # An optimizer that works in half precision would round small changes away.
        kind = weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
        self.A = nn.Parameter(torch.zeros(0, columns, dtype=kind, device=weight.device))
        self.B = nn.Parameter(torch.zeros(rows, 0, dtype=kind, device=weight.device))

        self.settled_A = nn.Parameter(self.A.detach().clone(), requires_grad=False)
        self.settled_B = nn.Parameter(self.B.detach().clone(), requires_grad=False)

    @property
    def rank(self) -> int:
        """Number of components that train."""
        return self.A.shape[0]

    @property
    def settled(self) -> int:
        """Number of components that were trained and are now frozen."""
        return self.settled_A.shape[0]

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return B and A of all components, settled ones first."""
        if not self.settled:
            return self.B, self.A
        return torch.cat([self.settled_B, self.B], 1), torch.cat([self.settled_A, self.A])

    def train_only(self, *names: str) -> None:
        """Train these matrices only; the other one keeps its first values."""
        self.trained = names
        self.A.requires_grad_("A" in names)
        self.B.requires_grad_("B" in names)

    @property
    def start(self) -> str:
        """Name of the matrix that starts at 0, so that a new component changes nothing."""
        return self.trained[-1]

    @torch.no_grad()
    def settle(self, indices: Sequence[int]) -> None:
        """Freeze copies of these components."""
        own = list(indices)
        self.settled_A = nn.Parameter(torch.cat([self.settled_A, self.A[own]]), False)
        self.settled_B = nn.Parameter(torch.cat([self.settled_B, self.B[:, own]], 1), False)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the adapted weight."""
        left, right = (one.to(weight.dtype) for one in self.factors())
        if not len(right):
            return weight
        if self.layout == "transposed":
            return torch.addmm(weight, right.T, left.T, alpha=self.scale)
        return torch.addmm(weight.flatten(1), left, right, alpha=self.scale).view_as(weight)

    @torch.no_grad()
    def merge_into(self, weight: Tensor) -> None:
        """Give a weight the values that it has with the pair, equal to the bit."""
        weight.copy_(self(weight))


def matrix_shape(weight: Tensor, layout: Layout) -> tuple[int, int]:
    """Return the shape (outputs, inputs) of a weight as a matrix."""
    if layout == "transposed":
        return weight.shape[1], weight.shape[0]
    return weight.shape[0], weight[0].numel()


def as_matrix(gradient: Tensor, layout: Layout) -> Tensor:
    """Return a gradient of a weight as a matrix of outputs by inputs."""
    return gradient.T if layout == "transposed" else gradient.flatten(1)


class AdaptedWeight:
    """One weight of a model with its low-rank pair."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        tensor: str,
        layout: Layout,
        scale: float,
    ) -> None:
        """Put the pair on the weight, at rank 0."""
        self.name = name
        self.module = module
        self.tensor = tensor
        self._order = list(module._parameters)
        weight = module._parameters[tensor]
        assert weight is not None
        self.weight = weight
        self.pair = LowRank(weight, layout, scale)
        self.rows, self.columns = matrix_shape(weight, layout)
        parametrize.register_parametrization(module, tensor, self.pair, unsafe=True)

    @property
    def cost(self) -> int:
        """Trainable parameters of one component."""
        sizes = {"A": self.columns, "B": self.rows}
        return sum(sizes[name] for name in self.pair.trained)

    @property
    def smaller(self) -> str:
        """Name of the matrix with fewer parameters."""
        return "B" if self.rows <= self.columns else "A"

    @property
    def most_rank(self) -> int:
        """Largest rank that a change of the weight can have."""
        return min(self.rows, self.columns)

    @property
    def path(self) -> str:
        """Name of the module that owns the weight."""
        return self.name.rpartition(".")[0]

    def release(self, *, merged: bool) -> None:
        """Remove the pair from the weight; `merged` adds it to the weight first."""
        if merged:
            self.pair.merge_into(self.weight)
        parametrize.remove_parametrizations(self.module, self.tensor, leave_parametrized=False)
        own = self.module._parameters
        # Optimizers and their checkpoints rely on the order of parameters.
        for name in self._order:
            if name in own:
                own[name] = own.pop(name)


# ---- Components that come and go


def renew(one: AdaptedWeight, directions: Tensor, optimizers: Sequence[Optimizer]) -> None:
    """Let a weight train components with these directions; the other matrix starts at 0."""
    zeros = {"A": directions.new_zeros(len(directions), one.columns)}
    zeros["B"] = directions.new_zeros(one.rows, len(directions))
    fixed = "A" if one.pair.start == "B" else "B"
    own = {**zeros, fixed: directions if fixed == "A" else directions.T}
    _replace(one, own, optimizers)


def extend(one: AdaptedWeight, directions: Tensor, optimizers: Sequence[Optimizer]) -> None:
    """Let a pair train more components beside those that it has."""
    pair, zeros = one.pair, directions.new_zeros(one.rows, len(directions))
    rows, columns = [pair.A.detach(), directions], [pair.B.detach(), zeros]
    _replace(one, {"A": torch.cat(rows), "B": torch.cat(columns, 1)}, optimizers)


def _replace(
    one: AdaptedWeight, values: dict[str, Tensor], optimizers: Sequence[Optimizer]
) -> None:
    """Give a pair new parameters, so that an optimizer counts their steps from 0."""
    for key, value in values.items():
        old = getattr(one.pair, key)
        new = nn.Parameter(value.to(old, copy=True).contiguous(), old.requires_grad)
        setattr(one.pair, key, new)
        swap(optimizers, old, new, keeps_state=False)


# ---- Optimizers of pairs whose rank changes


def inner_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers behind wrappers; refuse those under which ranks cannot change."""
    found = unwrap_optimizers(optimizer)
    for one in found:
        if type(one).__name__ in ("LBFGS", "ZeroRedundancyOptimizer"):
            raise UsageError(
                f"{type(one).__name__} keeps no separate state for each parameter, so ranks cannot "
                "change under it; use AdamW or SGD"
            )
    return found


def check_held(
    parameters: Iterable[nn.Parameter], optimizers: Sequence[Optimizer], *, is_resumed: bool
) -> None:
    """Refuse optimizers that do not hold all parameters.

    Args:
        parameters: of the adapters.
        optimizers: what trains them.
        is_resumed: whether a state was loaded.
    """
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    missing = sum(id(parameter) not in held for parameter in parameters)
    if missing:
        advice = "make it from adapters.parameters(), after adapters.measure(...) if you call that"
        if is_resumed:
            advice = "write adapters.load_state_dict(state, optimizer), or make it after that line"
        raise UsageError(f"the optimizer lacks {missing} parameters of the adapters; {advice}")


def watch_steps(weights: Mapping[str, AdaptedWeight], after: int) -> ForgottenSteps:
    """Return a warning for optimizers of adapters that step while `adapters.step` is not called."""

    def holds_adapters(optimizer: Optimizer) -> bool:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        pairs = [one.pair for one in weights.values()]
        return any(id(getattr(pair, key)) in held for pair in pairs for key in pair.trained)

    return ForgottenSteps(
        holds_adapters,
        after,
        "the optimizer steps but adapters.step(optimizer) was never called, so no ranks are placed "
        "or moved; call adapters.step(optimizer) after each optimizer.step()",
    )


def swap(
    optimizers: Sequence[Optimizer], old: nn.Parameter, new: nn.Parameter, *, keeps_state: bool
) -> None:
    """Replace a parameter in the groups of optimizers; a new one starts without state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new if one is old else one for one in group["params"]]
        state = optimizer.state.pop(old, None)
        if state is not None and keeps_state:
            optimizer.state[new] = state


# ---- What users read


def table(
    weights: Mapping[str, AdaptedWeight],
    asked: Mapping[str, float],
    used: Mapping[str, float],
    placed: str,
) -> str:
    """Return a line for each weight that has a rank.

    Args:
        weights: all that can have one.
        asked: shares of the gradients' promise, by weight.
        used: shares of the use.
        placed: the sentence about the budget.
    """
    ranked = [(name, one) for name, one in weights.items() if one.pair.rank]
    if not ranked:
        return f"Adapt({placed})"
    lines = [
        f"{'weight':40} {'shape':>12} {'rank':>5} {'parameters':>11} {'gradient':>9} {'use':>6}"
    ]
    for name, one in ranked:
        gradient = f"{asked[name]:.1%}" if name in asked else ""
        use = f"{used[name]:.1%}" if name in used else ""
        shape = f"{one.rows}×{one.columns}"
        size = one.pair.rank * one.cost
        lines.append(f"{name:40} {shape:>12} {one.pair.rank:>5} {size:>11,} {gradient:>9} {use:>6}")
    without = len(weights) - len(ranked)
    rest = f"; {without} other weights have no rank" if without else ""
    return "\n".join([*lines, f"{placed}{rest}"])
