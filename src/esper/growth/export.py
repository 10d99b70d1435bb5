"""A grown network as a file other programs run: ONNX or a PyTorch exported program."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from esper.kasmina.placement import call_arguments, evaluating
from esper.leyline.errors import UsageError

Format = Literal["onnx", "pt2"]


def export_model(model: nn.Module, example_input: Any, path: str | Path, kind: Format) -> Path:
    """Write the network in eval mode, with a free batch size, and return the file's path."""
    args, kwargs = call_arguments(example_input)
    if kwargs:
        raise UsageError("export takes positional inputs; pass them as a tuple")
    path = Path(path)
    batch = torch.export.Dim("batch", min=1)
    # The arguments of Garden.forward are `*args`: one entry holding a tuple of them.
    shapes = (tuple({0: batch} for _ in args),)
    with evaluating(model), torch.no_grad():
        try:
            program = torch.export.export(model, args, dynamic_shapes=shapes)
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise UsageError(
                f"PyTorch cannot export this model: {reason}; "
                "save it by garden.save(folder) instead"
            ) from error
        if kind == "pt2":
            torch.export.save(program, path)
        else:
            _write_onnx(program, args, path)
    return path


def _write_onnx(program: torch.export.ExportedProgram, args: tuple[Any, ...], path: Path) -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise UsageError(
            "exporting to ONNX needs the extra: pip install 'esper-grow[export]'; "
            "or use --export pt2"
        ) from None
    torch.onnx.export(program, args, path, dynamo=True, external_data=False, verbose=False)
