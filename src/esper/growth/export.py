"""A grown network as one file that needs neither Esper nor the host's class: ONNX or PT2."""

from __future__ import annotations

import inspect
import io
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from esper.kasmina.garden import Garden
from esper.kasmina.probe import axis_size, call_arguments, evaluating, resized, tensors_along
from esper.leyline.errors import UsageError, unknown_name
from esper.leyline.files import atomic_write_bytes

Format = Literal["onnx", "pt2"]


def check_format(kind: str) -> None:
    """Refuse a format that is not known or whose packages are missing, before any work is done."""
    if kind not in get_args(Format):
        raise unknown_name("export format", kind, get_args(Format))
    if kind == "onnx":
        try:
            import onnxscript  # noqa: F401
        except ImportError:
            raise UsageError(
                "exporting to ONNX needs the extra: pip install 'esper-grow[export]'; "
                "or export to pt2"
            ) from None


def format_of(path: str | Path) -> Format:
    """Return the format that the ending of a path names."""
    for kind in get_args(Format):
        if Path(path).suffix == f".{kind}":
            found: Format = kind
            return found
    raise UsageError(f"the ending of {str(path)!r} names no format; use .onnx or .pt2")


def export_garden(garden: Garden, example: Any, path: str | Path, kind: Format) -> Path:
    """Write a garden in eval mode, with a free batch size, and return the file's path."""
    check_format(kind)
    path = Path(path)
    axis = garden.batch_axis
    size = axis_size(example, axis)
    which = tensors_along(example, axis, size)
    # Of a batch of one PyTorch would take the size for fixed.
    example = resized(example, which, axis, max(size, 2)) if size else example
    size = max(size, 2)
    args, kwargs = call_arguments(example)
    batch = torch.export.Dim("batch", min=1)

    def free(leaf: Any) -> dict[int, Any] | None:
        is_along = isinstance(leaf, Tensor) and leaf.dim() > axis and leaf.shape[axis] == size
        return {axis: batch} if is_along else None

    shapes: dict[str, Any] = {"args": tree_map(free, args)} if args else {}
    shapes |= {name: tree_map(free, value) for name, value in kwargs.items()}
    model = _naming(garden, list(kwargs)) if kwargs else garden
    with evaluating(garden), torch.no_grad():
        try:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
        except Exception as error:
            raise UsageError(
                f"PyTorch cannot export this model: {_first_line(error)}; "
                "save it by garden.save(folder) instead"
            ) from error
        content = _as_pt2(program) if kind == "pt2" else _as_onnx(program)
    atomic_write_bytes(path, content)
    return path


def _naming(garden: Garden, names: list[str]) -> nn.Module:
    """Return a garden behind arguments of these names: PyTorch cannot export a plain `**kwargs`."""

    def forward(self: Any, **inputs: Any) -> Any:
        return self.garden(**inputs)

    kinds = inspect.Parameter
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            kinds("self", kinds.POSITIONAL_OR_KEYWORD),
            *(kinds(name, kinds.KEYWORD_ONLY) for name in names),
        ]
    )
    model: nn.Module = type("Named", (nn.Module,), {"forward": forward})()
    model.garden = garden
    return model


def _as_pt2(program: torch.export.ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _as_onnx(program: torch.export.ExportedProgram) -> bytes:
    try:
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:
        raise UsageError(
            f"ONNX cannot express this model: {_first_line(error)}; export to pt2 instead"
        ) from error
    assert converted is not None
    content: bytes = converted.model_proto.SerializeToString()
    return content


def _first_line(error: BaseException) -> str:
    """Return the first line of what an error was caused by."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().split("\n")[0].strip() or type(error).__name__
