"""The weights of a model that can be adapted, and the low-rank pair that changes one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from esper.growth.depth.blocks import unwrap_optimizers
from esper.growth.steps import ForgottenSteps
from esper.leyline.errors import CheckpointError, UsageError, instead

Layout = Literal["linear", "transposed", "conv"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")

_WRAPPERS = ("FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine", "OptimizedModule")


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
        """Add the pair to a weight, in the precision of the pair."""
        left, right = self.factors()
        if not len(right):
            return
        product = self.scale * (left @ right)
        product = product.T if self.layout == "transposed" else product.view(weight.shape)
        weight.copy_(weight.to(product.dtype) + product)


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


# ---- Which weights of a model are adapted, and why others are not


@dataclass(slots=True)
class Eligible:
    """A weight that can be adapted."""

    module: nn.Module
    tensor: str
    layout: Layout


@dataclass(slots=True)
class FoundWeights:
    """The weights of a model that can be adapted, by name, and why others cannot be."""

    weights: dict[str, Eligible] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def choose(self, targets: str | Sequence[str]) -> dict[str, Eligible]:
        """Return the weights of these modules, or all for 'auto'; refuse names that match none."""
        if targets == "auto":
            if not self.weights:
                by_reason: dict[str, list[str]] = {}
                for name, reason in self.reasons.items():
                    by_reason.setdefault(reason, []).append(name)
                why = "; ".join(
                    f"{', '.join(names[:3])}{', …' * (len(names) > 3)}: {reason}"
                    for reason, names in by_reason.items()
                )
                raise UsageError(
                    "the model has no weight that can be adapted; Adapt needs an nn.Linear, "
                    "nn.Conv1d, nn.Conv2d, nn.MultiheadAttention or Hugging Face's Conv1D"
                    + (f" ({why})" if why else "")
                )
            return dict(self.weights)
        asked = [targets] if isinstance(targets, str) else list(targets)
        chosen: dict[str, Eligible] = {}
        for target in asked:
            found = {name: one for name, one in self.weights.items() if _is_meant(name, target)}
            if not found:
                refused = {n: why for n, why in self.reasons.items() if _is_meant(n, target)}
                if refused:
                    name, reason = next(iter(refused.items()))
                    raise UsageError(f"{name} cannot be adapted: {reason}")
                known = [name.rpartition(".")[0] for name in self.weights]
                raise UsageError(
                    f"targets= names {target!r}, which matches no weight{instead(target, known)}"
                )
            chosen |= found
        return {name: one for name, one in self.weights.items() if name in chosen}


def _is_meant(weight: str, target: str) -> bool:
    """Return whether a target names a weight, its module or the end of the module's name."""
    module = weight.rpartition(".")[0]
    return target == weight or module == target or f".{module}".endswith(f".{target}")


def find_weights(model: nn.Module, trainable: Sequence[str] = ()) -> FoundWeights:
    """Return the weights of a model that can be adapted, outside modules that train as they are."""
    found = FoundWeights()
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    outside = tuple(f"{name}." for name in (*trainable, *peft_modules(model)))
    for path, module in model.named_modules():
        for tensor, layout in _weights_of(module):
            name = f"{path}.{tensor}" if path else tensor
            if f"{path}.".startswith(outside):
                continue
            reason = _why_not(module, tensor, owners)
            if reason:
                found.reasons[name] = reason
            else:
                found.weights[name] = Eligible(module, tensor, layout)
    return found


def peft_modules(model: nn.Module) -> Iterator[str]:
    """Yield the names of modules that PEFT already adapts or trains."""
    for path, module in model.named_modules():
        if _is_of_peft(module) and path:
            yield path


def _is_of_peft(module: nn.Module) -> bool:
    own = type(module).__module__.partition(".")[0] == "peft"
    return own and (hasattr(module, "base_layer") or hasattr(module, "modules_to_save"))


def _weights_of(module: nn.Module) -> Iterator[tuple[str, Layout]]:
    """Yield the weights of a module that are matrices or filters."""
    if isinstance(module, nn.MultiheadAttention):
        for tensor in _ATTENTION:
            if module._parameters.get(tensor) is not None or parametrize.is_parametrized(
                module, tensor
            ):
                yield tensor, "linear"
    elif isinstance(module, _CONVOLUTIONS):
        yield "weight", "conv"
    elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        yield "weight", "transposed"
    elif isinstance(module, nn.Linear) or (
        # A quantised layer has the attributes of a linear one, but another kind of weight.
        hasattr(module, "in_features") and hasattr(module, "weight")
    ):
        yield "weight", "linear"


def _why_not(module: nn.Module, tensor: str, owners: Counter[int]) -> str:
    """Return why a weight cannot be adapted; empty where it can be."""
    if parametrize.is_parametrized(module, tensor):
        return "it already has a parametrization; remove that, one of Esper by bake()"
    weight = module._parameters.get(tensor)
    if weight is None or not weight.is_floating_point() or weight.itemsize < 2:
        return f"the weight of a {type(module).__name__} is quantised; load the model unquantised"
    if owners[id(weight)] > 1:
        return "it is tied to another weight; untie them, or adapt other weights"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "it has no shape yet; call the model on a batch first"
    if weight.dim() < 2:
        return "it is not a matrix"
    if weight.dim() > 2 and not isinstance(module, _CONVOLUTIONS):
        return f"it has {weight.dim()} dimensions but belongs to no convolution"
    return ""


def check_modules(model: nn.Module, trainable: str | Sequence[str]) -> list[str]:
    """Return the names of the modules to train in full; refuse names of no module."""
    names = [trainable] if isinstance(trainable, str) else list(trainable)
    # Heads are rarely deep in a model, so outer modules are listed first.
    known = sorted(dict(model.named_modules()), key=lambda name: name.count("."))
    for name in names:
        if name not in known:
            raise UsageError(
                f"trainable= names {name!r}, no module of the model{instead(name, known[1:])}"
            )
    return names


def freeze(model: nn.Module, trainable: Sequence[str]) -> None:
    """Freeze a model except for these modules and those that PEFT trains."""
    own = tuple(f"{name}." for name in trainable)
    outside = tuple(f"{name}." for name in peft_modules(model))
    for name, parameter in model.named_parameters():
        if name.startswith(own) or not name.startswith(outside):
            parameter.requires_grad_(name.startswith(own))


def check_bare(model: nn.Module) -> None:
    """Refuse a model that is wrapped for several processes or compiled."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UsageError(f"Adapt takes a torch.nn.Module, got {name}; give the model itself")
    if isinstance(model, DistributedDataParallel | FSDPModule) or name in _WRAPPERS:
        raise UsageError(
            f"Adapt needs the model without {name}, which would not see parameters that come "
            f"later; write Adapt(model.module, ...) first and wrap the model afterwards"
        )


def check_state(
    state: Mapping[str, Any],
    keys: Collection[str],
    weights: Mapping[str, AdaptedWeight],
    trainable: Mapping[str, nn.Parameter],
    budget: int,
) -> None:
    """Refuse a state that is not one of adapters on these weights.

    Args:
        state: what is to be loaded.
        keys: its keys if it is one.
        weights: the adapted weights, by name.
        trainable: the parameters of the modules that train in full.
        budget: most trainable parameters.
    """
    lacking = sorted(set(keys) - state.keys()) if isinstance(state, Mapping) else sorted(keys)
    if lacking:
        raise CheckpointError(
            f"this is no state of an Adapt: {lacking[0]!r} is missing; give adapters.state_dict()"
        )
    advice = "make model and Adapt as they were made for it"
    for kind, names, there in (
        ("weights", state["pairs"], weights),
        ("trainable parameters", state["trainable"], trainable),
    ):
        if names.keys() != there.keys():
            odd = sorted(names.keys() ^ there.keys())[0]
            raise CheckpointError(
                f"this state belongs to a model with other {kind}: only one of both has {odd}; "
                f"{advice}"
            )
    if state["budget"] != budget:
        raise CheckpointError(
            f"this state has a budget of {state['budget']:,}, but this Adapt of {budget:,}; write "
            f"Adapt(model, {state['budget']})"
        )
    for name, pair in state["pairs"].items():
        one = weights[name]
        for before, after in (("A", "B"), ("settled_A", "settled_B")):
            shapes = [list(pair[key].shape) for key in (before, after)]
            rank = shapes[0][0]
            if shapes != [[rank, one.columns], [one.rows, rank]]:
                raise CheckpointError(
                    f"the pair of {name} has the shapes {shapes[0]} and {shapes[1]}, and the "
                    f"weight is {one.rows}×{one.columns}; {advice}"
                )
    for name, values in state["trainable"].items():
        if values.shape != trainable[name].shape:
            raise CheckpointError(
                f"{name} is {list(values.shape)} in this state and "
                f"{list(trainable[name].shape)} in the model; {advice}"
            )


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


def check_held(parameters: Iterable[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that do not hold all parameters."""
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    missing = sum(id(parameter) not in held for parameter in parameters)
    if missing:
        raise UsageError(
            f"the optimizer lacks {missing} parameters of the adapters; make it from "
            "adapters.parameters(), after adapters.measure(...) if you call that"
        )


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
