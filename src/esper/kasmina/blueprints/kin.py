"""`kin`: a seed that is a copy of the block in front of its slot, with its optimizer state.

So a network becomes deeper while it trains: the copy starts with the block's weights, buffers and
moments. It is called with the block's output and the block's other arguments, and at full amplitude
its output replaces the block's. The block must keep the shape of its input and have a residual
path; `find_kin` checks that for every slot.

Germinating another in the same slot doubles what is awake: of a block and its copies, in their
order, there are copies behind them. They are one seed, which is measured, kept and pruned as one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BLUEPRINTS, Blueprint
from esper.kasmina.calls import Call, has_residual_path, is_shareable, replace_first, watch
from esper.kasmina.flops import counting
from esper.kasmina.slots.probe import (
    call_arguments,
    first_tensor,
    shape_problem,
    shapes_of,
    tensors_in,
    trying,
)
from esper.kasmina.wrapping import disconnect, machinery_of
from esper.leyline.errors import reason_of
from esper.leyline.slots import TOPOLOGIES

KIN = "kin"

BLUEPRINTS.register(
    KIN,
    Blueprint(
        KIN,
        module=None,
        topologies=TOPOLOGIES,
        identity_at_start=(),
        note="Copy of the block in front of the slot, with its optimizer state.",
    ),
)


@dataclass(frozen=True, slots=True)
class Kin:
    """Whether and how the block in front of a slot can be copied."""

    problem: str = "this garden was saved before Esper could copy blocks"
    """Why a copy cannot grow there; empty where it can."""
    parameters: int = 0
    """Trainable parameters of the block."""
    flops: int = 0
    """Operations of one sample's forward pass through the block."""
    positional: int = 1
    """Number of the block's positional arguments."""
    names: tuple[str, ...] = ()
    """Names of its keyword arguments."""
    empty: tuple[int | str, ...] = ()
    """Arguments, by position or name, that were None in the example."""

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Kin:
        """Rebuild it from plain data; missing fields take their defaults."""
        several = {name: tuple(data.get(name, ())) for name in ("names", "empty")}
        return cls(**{**data, **several})


def copy_block(block: nn.Module) -> nn.Module:
    """Return a copy of a block: weights, buffers, modes and hooks of its owner, no slots or seeds.

    Parameters that are one in the block are one in the copy.
    """
    # Slots and guards are reachable through hooks, and must not be copied.
    memo: dict[int, Any] = {id(one): one for one in machinery_of(block)}
    for module in block.modules():
        for value in tensors_in(list(vars(module).values())):
            if not value.is_leaf:
                # A tensor kept from the last pass: PyTorch refuses to deepcopy it.
                memo[id(value)] = value.detach().clone()
    copied = copy.deepcopy(block, memo)
    disconnect(copied)
    return copied


def grow_copies(
    block: nn.Module, copies: Sequence[nn.Module], count: int
) -> tuple[list[nn.Module], list[tuple[nn.Parameter, nn.Parameter]]]:
    """Return `count` copies of a block, and the parameters of new ones, each with its source.

    Args:
        block: the block.
        copies: its copies so far, in the order in which they run. They come first; where they are
            more than `count`, those that were copied last are left out.
        count: how many are wanted: 1, 3, 7 or more, as everything awake is doubled every time.
    """
    copies = list(copies[:count])
    sources: list[tuple[nn.Parameter, nn.Parameter]] = []
    while len(copies) < count:
        awake = [block, *copies]
        new = [copy_block(each) for each in awake]
        for copied, source in zip(new, awake, strict=True):
            sources += zip(copied.parameters(), source.parameters(), strict=True)
        copies += new
    return copies, sources


def as_seed(copies: Sequence[nn.Module]) -> nn.Module:
    """Return copies as one seed: one by itself, several in a `Sequential`."""
    if len(copies) == 1:
        return copies[0]
    seed = nn.Sequential(*copies)
    seed.training = copies[0].training
    return seed


def find_kin(model: nn.Module, paths: list[str], example: Any, samples: int) -> dict[str, Kin]:
    """Return for every submodule, by path, whether a copy of it can grow behind it, and its costs.

    Args:
        model: run once on the example.
        paths: submodules that are called once.
        example: one batch.
        samples: number of samples in it.
    """
    blocks = {path: model.get_submodule(path) for path in paths}
    args, kwargs = call_arguments(example)
    owners = _owners(model)
    with trying(model, example), torch.no_grad():
        with counting(model) as count:
            calls = watch(model, blocks, args, kwargs)
        found = {}
        for path, block in blocks.items():
            call = calls[path][0]
            given: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
            tied = _tied_to(path, block, owners)
            every = list(block.parameters())
            learning = [p.numel() for p in every if p.requires_grad]
            still = f"0 of its {sum(p.numel() for p in every):,} parameters train"
            found[path] = Kin(
                problem=tied or ("" if learning else still),
                parameters=sum(learning),
                flops=count.by_module[path] // max(1, samples),
                positional=len(call.args),
                names=tuple(call.kwargs),
                empty=tuple(key for key, value in given if value is None),
            )
            if not found[path].problem:
                problem = _find_problem(block, call)
                found[path] = dataclasses.replace(found[path], problem=problem)
    return found


def _find_problem(block: nn.Module, call: Call) -> str:
    """Return why a block cannot be applied to its own output; empty where it can."""
    hidden = call.inputs[0][1] if call.inputs else None
    output = first_tensor(call.output)
    if not isinstance(hidden, Tensor):
        return f"its first argument is a {type(hidden).__name__}, not a tensor"
    if change := shape_problem(hidden, output):
        return change
    if (count := len(list(tensors_in(call.output)))) > 1:
        return f"it returns {count} tensors, of which a copy would get one"
    for _, value in call.inputs[1:]:
        if not is_shareable(value):
            return (
                f"it is given a {type(value).__name__}, which a copy of it would change as well; "
                "where that is a cache, switch it off (use_cache=False)"
            )
    try:
        return _try_copy(block, call, output)
    except Exception as error:
        # Any error of a user's block.
        return f"a copy of it cannot run: {reason_of(error)}"


def _try_copy(block: nn.Module, call: Call, output: Tensor) -> str:
    copied = copy_block(block)
    given = output.clone()
    source, _ = call.inputs[0]
    args, kwargs = replace_first(call.args, call.kwargs, given)
    made = first_tensor(copied(*args, **kwargs))
    if not isinstance(made, Tensor) or made.shape != output.shape:
        return f"a copy of it turns {shapes_of(output)} into {shapes_of(made)}"
    if not torch.equal(given, output):
        return "it changes its input in place; write x = x + f(x) instead of x += f(x)"
    if not has_residual_path(copied, call, [source]):
        return "it has no residual path, which a copy needs; let the block return x + f(x)"
    return ""


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of every parameter of a model, by its id."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return owners


def _tied_to(path: str, block: nn.Module, owners: Mapping[int, list[str]]) -> str:
    """Return which parameter a block shares with another module; empty if none."""
    for parameter in block.parameters():
        names = owners[id(parameter)]
        outside = [name for name in names if not name.startswith(f"{path}.")]
        if outside:
            inside = next(name for name in names if name.startswith(f"{path}."))
            return f"it is tied: {inside} is also {outside[0]}; give each a weight of its own"
    return ""
