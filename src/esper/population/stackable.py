"""Whether networks of one architecture can run as one stack, and if not, why in one sentence.

Nothing is asked of a host or a blueprint beyond being an ordinary module: this tries it out.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import Blueprint
from esper.kasmina.seedbed import draw_probe, draw_seed
from esper.leyline.blueprints import Topology
from esper.population.engine import SlotSpec

_LONGEST_REASON = 200

_NO_RULE_YET = (
    r"There is a performance drop because we have not yet implemented the batching rule for "
    r"aten::_scaled_dot_product"
)


@contextmanager
def stacked_attention() -> Iterator[None]:
    """Within the block PyTorch does not complain about attention under `vmap`.

    Where it has no rule for attention of many networks at once it loops over them: slower, and
    right. Whoever runs a population can do nothing about it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _NO_RULE_YET, UserWarning)
        yield


def host_problem(
    hosts: Sequence[nn.Module], example: Tensor, *, in_bf16: bool = False
) -> str | None:
    """Return why hosts of one architecture cannot be stacked, or None; two of them will do."""
    return _problem(hosts, example, in_bf16, keeps_shape=False)


def seed_problem(blueprint: Blueprint, slot: SlotSpec, *, in_bf16: bool = False) -> str | None:
    """Return why seeds of a blueprint cannot be stacked in a slot, or None."""
    return _seed_problem(blueprint, slot.channels, slot.topology, slot.shape, in_bf16)


@lru_cache(maxsize=1024)
def _seed_problem(
    blueprint: Blueprint, channels: int, topology: Topology, shape: tuple[int, ...], in_bf16: bool
) -> str | None:
    # A seed may say so itself, by the attribute that `esper.testing.check_blueprint` knows.
    reason = getattr(blueprint.module, "no_vmap", "")
    if reason:
        return str(reason)
    seeds = [draw_seed(blueprint, channels, topology, (0, 0, number)) for number in range(2)]
    return _problem(seeds, draw_probe(shape, (0, 0, 0)), in_bf16, keeps_shape=True)


def _problem(
    modules: Sequence[nn.Module], x: Tensor, in_bf16: bool, *, keeps_shape: bool
) -> str | None:
    if in_bf16:
        modules = [copy.deepcopy(module).to(torch.bfloat16) for module in modules]
        x = x.to(torch.bfloat16) if x.is_floating_point() else x
    first = modules[0]
    for name, module in first.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"{name or 'it'!r} is a BatchNorm, whose statistics change in place"
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return (
                f"{name or 'it'!r} draws random numbers, which must come from each row's own stream"
            )
    buffers = [{name: b.clone() for name, b in each.named_buffers()} for each in modules]
    for name, buffer in buffers[0].items():
        if not all(torch.equal(buffer, other[name]) for other in buffers[1:]):
            return f"its buffer {name!r} differs between rows, which share all buffers"
    problem = _try_out(modules, x, keeps_shape=keeps_shape)
    if problem is not None:
        return problem
    for name, buffer in first.named_buffers():
        if not torch.equal(buffer, buffers[0][name]):
            return f"its buffer {name!r} changes in a forward pass, and rows share all buffers"
    return None


def _try_out(modules: Sequence[nn.Module], x: Tensor, *, keeps_shape: bool) -> str | None:
    """Run the modules as one stack, in training mode, each on inputs of its own."""
    first = modules[0].train()
    parameters = {
        name: torch.stack([each.get_parameter(name).detach() for each in modules])
        for name, _ in first.named_parameters()
    }
    inputs = torch.stack([x] * len(modules))

    def one(own: dict[str, Tensor], own_x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(first, own, (own_x,))
        return result

    try:
        with torch.no_grad(), stacked_attention():
            # A module without parameters needs no stacking: it runs on all rows as one batch.
            out = torch.func.vmap(one)(parameters, inputs) if parameters else first(x)[None]
    except Exception as error:  # a user's own module may raise anything
        reason = " ".join(str(error).split())
        return f"{type(error).__name__}: {reason}"[:_LONGEST_REASON]
    if keeps_shape and out.shape[1:] != x.shape:
        return f"it turns {list(x.shape)} into {list(out.shape[1:])}"
    return None
