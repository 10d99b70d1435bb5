"""Finds the weights of a model that can be adapted, and says why others cannot be."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from esper.growth.adapters.weights import Layout, LowRank
from esper.leyline.errors import UsageError, warn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)

_MOST_NAMED = 6
_MOST_CLOSE = 3

_WRAPPERS = ("FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine", "OptimizedModule")


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
        chosen: dict[str, Eligible] = {}
        for target in [targets] if isinstance(targets, str) else targets:
            found = {name: one for name, one in self.weights.items() if _is_meant(name, target)}
            if not found:
                refused = {n: why for n, why in self.reasons.items() if _is_meant(n, target)}
                if refused:
                    name, reason = next(iter(refused.items()))
                    raise UsageError(f"{name} cannot be adapted: {reason}")
                known = list(dict.fromkeys(name.rpartition(".")[0] for name in self.weights))
                raise UsageError(
                    f"targets= names {target!r}, which matches no weight"
                    f"{nearest_names(target, known)}"
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


def warn_of_recurrent(model: nn.Module, trainable: Sequence[str]) -> None:
    """Warn if recurrent layers are left out of all that is adapted."""
    own = tuple(f"{name}." for name in (*trainable, *peft_modules(model)))
    found = [
        (path, type(module).__name__)
        for path, module in model.named_modules()
        if isinstance(module, _RECURRENT) and not f"{path}.".startswith(own)
    ]
    if found:
        more = f" and {len(found) - 1} more stay" if len(found) > 1 else " stays"
        path, kind = found[0]
        warn(
            f"{path} (nn.{kind}){more} frozen, because recurrent layers cannot be adapted; to "
            f"train such layers in full, write trainable={[*trainable, *(one for one, _ in found)]}"
        )


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
    elif isinstance(module, _RECURRENT):
        for tensor in module._parameters:
            if tensor.startswith("weight_"):
                yield tensor, "linear"
    elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        yield "weight", "transposed"
    elif isinstance(module, nn.Linear) or (
        # A quantised layer has the attributes of a linear one, but another kind of weight.
        hasattr(module, "in_features") and hasattr(module, "weight")
    ):
        yield "weight", "linear"


def _why_not(module: nn.Module, tensor: str, owners: Counter[int]) -> str:
    """Return why a weight cannot be adapted; empty where it can be."""
    if isinstance(module, _RECURRENT):
        return (
            f"it belongs to an nn.{type(module).__name__}, and recurrent layers cannot be adapted; "
            "name the layer in trainable= to train it in full"
        )
    if parametrize.is_parametrized(module, tensor):
        return "it already has a parametrization; remove that, one of Esper by bake()"
    weight = module._parameters.get(tensor)
    if weight is None and (computed := _computed_by(module)):
        return computed
    if weight is None or not weight.is_floating_point() or weight.itemsize < 2:
        return f"the weight of a {type(module).__name__} is quantised; load the model unquantised"
    if owners[id(weight)] > 1:
        return "it is tied to another weight; untie them, or adapt other weights"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "it has no shape yet; call the model on a batch first"
    if weight.dim() < 2:
        return f"it has {weight.dim()} dimensions, and an adapter needs a matrix of 2"
    if weight.dim() > 2 and not isinstance(module, _CONVOLUTIONS):
        return f"it has {weight.dim()} dimensions but belongs to no convolution"
    return ""


def _computed_by(module: nn.Module) -> str:
    """Return that a hook computes the weight of a module from other parameters, if one does."""
    if "weight" not in vars(module):
        return ""
    utils = "torch.nn.utils."
    if "weight_g" in module._parameters:
        return f"weight_norm computes it; call {utils}remove_weight_norm(module) first"
    if "weight_mask" in module._buffers:
        return f"it is pruned; call {utils}prune.remove(module, 'weight') first"
    if "weight_u" in module._buffers:
        return f"spectral_norm computes it; call {utils}remove_spectral_norm(module) first"
    return ""


def check_targets(model: nn.Module, targets: Any) -> str | list[str]:
    """Return the names of what to adapt; refuse what is no name, and an empty list."""
    if isinstance(targets, str):
        return targets
    names = _names(model, "targets", targets)
    if not names:
        raise UsageError("targets= is empty; name modules to adapt, or leave it out to adapt all")
    return names


def check_modules(model: nn.Module, trainable: Any) -> list[str]:
    """Return the names of the modules to train in full; refuse names of no module."""
    names = _names(model, "trainable", trainable)
    # Heads are rarely deep in a model, so outer modules are listed first.
    known = sorted(dict(model.named_modules()), key=lambda name: name.count("."))[1:]
    for name in names:
        if name not in known:
            raise UsageError(
                f"trainable= names {name!r}, no module of the model"
                f"{nearest_names(name, known, with_ends=False)}"
            )
    _check_not_tied(model, names)
    return names


def _names(model: nn.Module, argument: str, given: Any) -> list[str]:
    """Return a name or several as a list; refuse anything else."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str | nn.Module)
    names = list(given) if is_list else [given]
    for one in names:
        if isinstance(one, str):
            continue
        paths = [path for path, module in model.named_modules() if module is one and path]
        advice = f"{argument}={paths[0]!r}" if paths else f"{argument}=['...']"
        raise UsageError(
            f"{argument}= takes names of modules, got {type(one).__name__}; write {advice}"
        )
    return names


def nearest_names(name: str, known: Sequence[str], *, with_ends: bool = True) -> str:
    """Return the end of a message about an unknown name: the nearest names, or the first ones.

    Args:
        name: what was given.
        known: what could be given.
        with_ends: whether the ends of names could be given too.
    """
    ends = [one.rpartition(".")[2] for one in known] if with_ends else []
    close = [one for one in known if one.endswith(f".{name}")][:_MOST_CLOSE]
    names = list(dict.fromkeys([*known, *ends]))
    close = close or difflib.get_close_matches(name, names, n=_MOST_CLOSE, cutoff=0.5)
    if close:
        return f", did you mean {' or '.join(repr(one) for one in close)}?"
    shown = ", ".join(known[:_MOST_NAMED])
    rest = f", … ({len(known)} in all)" if len(known) > _MOST_NAMED else ""
    return f"; known: {shown or 'none'}{rest}"


def _check_not_tied(model: nn.Module, trainable: Sequence[str]) -> None:
    """Refuse to train a parameter that also belongs to a module that stays frozen."""
    own = tuple(f"{name}." for name in trainable)
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        inside = [name for name in names if name.startswith(own)]
        outside = [name for name in names if not name.startswith(own)]
        if inside and outside:
            modules = [next(one for one in trainable if inside[0].startswith(f"{one}."))]
            modules.append(outside[0].rpartition(".")[0])
            raise UsageError(
                f"trainable= names {modules[0]!r}, but {inside[0]} is tied to {outside[0]}, which "
                f"would stay frozen; untie them, or write trainable={modules}"
            )


def freeze(model: nn.Module, trainable: Sequence[str]) -> None:
    """Freeze a model except for these modules and those that PEFT trains."""
    own = tuple(f"{name}." for name in trainable)
    outside = tuple(f"{name}." for name in peft_modules(model))
    for name, parameter in model.named_parameters():
        if name.startswith(own) or not name.startswith(outside):
            parameter.requires_grad_(name.startswith(own))


def check_bare(model: nn.Module) -> None:
    """Refuse a model that is wrapped for several processes or compiled, or that has adapters."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UsageError(f"Adapt takes a torch.nn.Module, got {name}; give the model itself")
    if isinstance(model, DistributedDataParallel | FSDPModule) or name in _WRAPPERS:
        if name == "OptimizedModule":
            advice = "write Adapt(model._orig_mod, ...) first and compile the model afterwards"
        elif isinstance(model, FSDPModule):
            advice = "write Adapt(model, ...) first and call fully_shard afterwards"
        else:
            advice = "write Adapt(model.module, ...) first and wrap the model afterwards"
        raise UsageError(
            f"Adapt needs the model without {name}, which would not see parameters that come "
            f"later; {advice}"
        )
    adapted = [path for path, module in model.named_modules() if isinstance(module, LowRank)]
    if adapted:
        # Each would freeze what the other one trains.
        first = adapted[0].replace("parametrizations.", "").removesuffix(".0")
        more = f" and {len(adapted) - 1} more weights have" if len(adapted) > 1 else " has"
        raise UsageError(
            f"{first}{more} adapters of another Adapt already; call bake() on that one first, or "
            "give all modules to one Adapt by targets=[...]"
        )
