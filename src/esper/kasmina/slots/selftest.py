"""Self-test of slots: grows a seed in every slot once, on a copy that is thrown away.

For each slot a seed is germinated, changed, blended in, saved and loaded. So problems show up here,
with the slot's name, and not hours into a run.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import blueprint_by_id, withheld
from esper.kasmina.garden import Garden, load_garden
from esper.kasmina.lifecycle import GardenConfig, LifecycleConfig
from esper.kasmina.slots.arguments import example_inputs
from esper.kasmina.slots.placement import DeclaredAxes, SlotNames
from esper.kasmina.slots.probe import Trial, call_arguments, tensors_in
from esper.kasmina.slots.symmetry import find_symmetries
from esper.kasmina.state import GateConfig
from esper.leyline.errors import EsperError, EsperWarning, SlotError, reason_of
from esper.leyline.slots import AXES, MEANINGS, AxesName, Symmetry, is_causal, is_equivariant
from esper.utils.randomness import drawing

_MIXING = ("attention", "conv_light", "mlp_small", "norm")
"""Seeds to try first: those that mix positions or channels reveal most."""


@dataclass(frozen=True, slots=True)
class SlotCheck:
    """Result of the self-test at one slot."""

    slot: str
    axes: AxesName
    symmetry: Symmetry
    """Whether the model is causal or equivariant in the order of positions there."""
    blueprint: str
    """The blueprint that was grown; empty where none is offered."""
    parameters: int
    problem: str | None
    """The problem in one line; None where there is none."""
    withheld: tuple[str, ...]
    """Blueprints that are not offered there, because they would break the symmetry."""

    def __str__(self) -> str:
        state = self.problem or "grown, blended in, saved and loaded; samples keep apart"
        place = ", ".join((self.axes, *([self.blueprint] if self.blueprint else ())))
        return f"{self.slot} ({place}): {state}{self._told_withheld()}"

    def _told_withheld(self) -> str:
        if not self.withheld:
            return ""
        *others, last = self.withheld
        names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        return f"; {names} not offered: {MEANINGS[self.symmetry]} in this model"


def check_slots(
    model: nn.Module,
    slots: SlotNames,
    example: Any,
    *,
    axes: DeclaredAxes | None = None,
) -> tuple[SlotCheck, ...]:
    """Grow a seed in every slot once, on a copy of the model, and return what was found.

    Checks: a seed can be built and blended in; outputs change, keep their shape and are finite; no
    sample of a batch depends on the others; a causal or equivariant model stays so; the garden can
    be saved and loaded. Each result also names the blueprints that would break a symmetry.

    Raises:
        SlotError: A slot cannot be placed at all.
    """
    config = GardenConfig(lifecycle=LifecycleConfig(gates=GateConfig(min_training_epochs=0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EsperWarning)
        plain = Garden(copy.deepcopy(model), slots, example, axes=axes, config=config)
        inputs = example_inputs(model, example)
        return tuple(_check(model, plain, name, inputs) for name in plain.slot_names)


def _check(model: nn.Module, plain: Garden, name: str, example: Any) -> SlotCheck:
    garden = copy.deepcopy(plain).eval()
    index = garden.slot_names.index(name)
    choices = garden.table.fits()[0, index].nonzero().flatten().tolist()
    fitting = [blueprint_by_id(choice).name for choice in choices]
    chosen = next((one for one in (*_MIXING, *fitting) if one in fitting), "")
    problem: str | None = None
    try:
        with torch.no_grad():
            if not chosen:
                raise SlotError("no blueprint can be grown there")
            _grow(garden, name, chosen)
            problem = _find_problem(garden, plain.eval(), model, name, example)
    except EsperError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {reason_of(error)[:300]}"
    view = garden.slots[name]
    left_out = withheld(garden.seedbed[index].topology, view.symmetry)
    return SlotCheck(name, view.axes, view.symmetry, chosen, view.parameters, problem, left_out)


def _grow(garden: Garden, name: str, blueprint: str) -> None:
    """Bring a seed to its full amplitude and change its parameters."""
    for result in (
        garden.germinate(name, blueprint, style="linear_add", tempo=1, immediate=False),
        garden.advance(name),
        garden.advance(name),
    ):
        if not result:
            raise SlotError(result.reason)
    garden.tick()
    stream = torch.Generator().manual_seed(0)
    for parameter in garden.slot_parameters(name):
        noise = torch.randn(parameter.shape, generator=stream)
        parameter.add_(noise.to(parameter), alpha=0.1)


def _find_problem(
    garden: Garden, plain: Garden, model: nn.Module, name: str, example: Any
) -> str | None:
    grown, before = _run(garden, example), _run(plain, example)
    shapes = [[list(out.shape) for out in outputs] for outputs in (grown, before)]
    if shapes[0] != shapes[1]:
        return f"outputs {shapes[1]} become {shapes[0]}"
    if not all(bool(torch.isfinite(out).all()) for out in grown if out.is_floating_point()):
        return "outputs are not finite any more"
    if all(torch.equal(one, other) for one, other in zip(grown, before, strict=True)):
        return "a seed there changes nothing: the output of the submodule is not used"
    if _mixes(garden, example) and not _mixes(plain, example):
        axes = garden.slots[name].axes
        return f"with a seed, samples of a batch influence one another: are its axes {axes}?"
    if lost := _lost_symmetry(garden, name, example):
        return f"with a seed it is not true any more that {lost}"
    with tempfile.TemporaryDirectory() as folder:
        garden.save(Path(folder, "garden"))
        fresh = copy.deepcopy(model)
        loaded = load_garden(Path(folder, "garden"), model=fresh).eval()
        again = _run(loaded, example)
    if not all(torch.equal(one, other) for one, other in zip(grown, again, strict=True)):
        return "outputs differ after it was saved and loaded"
    return None


def _lost_symmetry(garden: Garden, name: str, example: Any) -> str:
    """Return the symmetry that a seed broke; empty where it broke none."""
    view = garden.slots[name]
    place = garden.placed.slots[garden.slot_names.index(name)]
    axes = AXES[view.axes]
    shape = tuple(place.shape[axes.order.index(i)] for i in range(len(place.shape)))
    found = find_symmetries(garden.model, example, garden.batch_axis, {place.path: (axes, shape)})
    now = found[place.path]
    keeps = is_causal(now) or not is_causal(view.symmetry)
    keeps = keeps and (is_equivariant(now) or not is_equivariant(view.symmetry))
    return "" if keeps else MEANINGS[view.symmetry]


def _mixes(garden: Garden, example: Any) -> bool:
    """Return whether a sample's outputs depend on the other samples of its batch."""
    return any(found.mixes for found in Trial(garden, {}, example, garden.batch_axis).at_end())


def _run(garden: Garden, example: Any) -> list[Tensor]:
    args, kwargs = call_arguments(example)
    device = next((tensor.device for tensor in tensors_in(example)), torch.device("cpu"))
    with drawing(device, "probe"):
        return list(tensors_in(garden(*args, **kwargs)))
