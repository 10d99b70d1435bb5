"""Run one architecture through every step: suggest slots, grow, bake, save, export."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import esper
from esper.growth.grown import Format, export_garden
from esper.kasmina.blueprints.registry import blueprint_by_id
from esper.kasmina.garden import Garden
from esper.kasmina.slot_table import OperationResult
from esper.kasmina.slots.probe import axis_size, call_arguments, resized, tensors_along, tensors_in
from esper.leyline.errors import EsperError, EsperWarning
from tests.plots import EAGER

STEPS = ("suggest", "grow", "bake", "save", "pt2", "onnx")
"""The steps of the test, in order."""

_PREFERRED = ("attention", "conv_light", "mlp_small", "norm")
"""Blueprints to use where they fit: those that mix positions or channels."""


@dataclass(frozen=True)
class Specimen:
    """An architecture to test, and a batch for it."""

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], Any]
    axes: str | None = None
    """Axes of its slots, where `suggest_slots` cannot infer them."""


@dataclass
class Findings:
    """Results of one architecture."""

    slots: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    refusals: dict[str, str] = field(default_factory=dict)
    """Message of the error that Esper raised, by step."""


def examine(specimen: Specimen, *, steps: tuple[str, ...] = STEPS) -> Findings:
    """Run all steps; record errors of Esper by step, let any other error through."""
    found = Findings()
    with warnings.catch_warnings():
        # Other libraries warn about their own code.
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", EsperWarning)
        for message in ("the samples of a batch influence", ".*running"):
            warnings.filterwarnings("ignore", message, EsperWarning)
        _examine(specimen, steps, found)
    return found


def _examine(specimen: Specimen, steps: tuple[str, ...], found: Findings) -> None:
    example = specimen.example()
    model = _made(specimen)
    garden: Garden | None = None
    with _noting(found, "suggest"):
        suggested = esper.suggest_slots(model, example, axes=specimen.axes)
        found.slots = tuple(suggested)
        found.axes = tuple(dict.fromkeys(suggested.axes.values()))
        garden = Garden(model, suggested, example, axes=suggested.axes, config=EAGER)
    if garden is None:
        return
    plain = _outputs(garden, example)
    _grow(garden, example)
    grown = _outputs(garden, example)
    assert [out.shape for out in grown] == [out.shape for out in plain]
    assert all(bool(torch.isfinite(out).all()) for out in grown)
    assert not all(map(torch.equal, grown, plain)), "growth changed nothing"
    with tempfile.TemporaryDirectory() as folder:
        if "bake" in steps:
            with _noting(found, "bake"):
                _check_same(_outputs(garden.bake(), example), grown, 1e-5)
        if "save" in steps:
            garden.save(Path(folder, "saved"))
            loaded = esper.load_garden(Path(folder, "saved"), model=_made(specimen))
            _check_same(_outputs(loaded, example), grown, 0.0)
        for kind in ("pt2", "onnx"):
            if kind in steps:
                with _noting(found, kind):
                    path = export_garden(garden, example, Path(folder, f"grown.{kind}"))
                    for batch in (example, _other_size(garden, example)):
                        _check_same(_run_file(path, kind, batch), _outputs(garden, batch), 1e-4)


def _made(specimen: Specimen) -> nn.Module:
    torch.manual_seed(0)
    return specimen.make()


@contextmanager
def _noting(found: Findings, step: str) -> Iterator[None]:
    try:
        yield
    except EsperError as error:
        found.refusals[step] = str(error)


def _grow(garden: Garden, example: Any) -> None:
    """Germinate, train and blend in a seed in every slot, one slot after the other."""
    optimizer = esper.Gardener(garden, "wait", 60).optimizer(torch.optim.AdamW, lr=0.01)
    for index, name in enumerate(garden.slot_names):
        fitting = [
            blueprint_by_id(number).name
            for number in garden.table.fits()[0, index].nonzero().flatten().tolist()
        ]
        chosen = next((one for one in _PREFERRED if one in fitting), fitting[0])
        _done(garden.germinate(name, chosen, tempo=2))
        _done(garden.advance(name))
        _train(garden, optimizer, example, [name])
        _done(garden.advance(name))
        for _ in range(2):
            garden.tick()
    _train(garden, optimizer, example, garden.slot_names)


def _done(result: OperationResult) -> None:
    assert result, result.reason


def _train(
    garden: Garden, optimizer: torch.optim.Optimizer, example: Any, slots: Sequence[str]
) -> None:
    """Train two steps towards outputs of 1; every seed must receive a gradient."""
    args, kwargs = call_arguments(example)
    garden.train()
    for _ in range(2):
        outputs = [out for out in tensors_in(garden(*args, **kwargs)) if out.requires_grad]
        loss = torch.stack([(out - 1).square().mean() for out in outputs]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name in slots:
        learning = [p for p in garden.slot_parameters(name) if p.requires_grad]
        assert any(p.grad is not None and bool(p.grad.any()) for p in learning), name


def _outputs(model: nn.Module, example: Any) -> list[Tensor]:
    args, kwargs = call_arguments(example)
    model.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        found = list(tensors_in(model(*args, **kwargs)))
    return [out for out in found if out.is_floating_point()]


def _other_size(garden: Garden, example: Any) -> Any:
    """Return a batch of three samples."""
    axis = garden.batch_axis
    which = tensors_along(example, axis, axis_size(example, axis))
    return resized(example, which, axis, 3)


def _run_file(path: Path, kind: Format, example: Any) -> list[Tensor]:
    args, kwargs = call_arguments(example)
    if kind == "pt2":
        torch.manual_seed(1)
        with torch.no_grad():
            found = list(tensors_in(torch.export.load(path).module()(*args, **kwargs)))
    else:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [node.name for node in session.get_inputs()]
        given = kwargs or dict(zip(names, tensors_in(args), strict=True))
        results = session.run(None, {name: given[name].numpy() for name in names})
        found = [torch.from_numpy(np.asarray(result)) for result in results]
    return [out for out in found if out.is_floating_point()]


def _check_same(outputs: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(outputs) == len(expected)
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
