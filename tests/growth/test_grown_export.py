from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.growth.grown import Format, check_format, export_garden
from esper.kasmina.garden import Garden
from esper.leyline.errors import CheckpointError, UsageError
from tests.plots import EAGER, TinyConv, raise_seed, shake

SHAPE = (1, 8, 8)


def grown_conv() -> Garden:
    """A conv network with a fossil and a seed that is half blended in, in train mode."""
    torch.manual_seed(0)
    garden = Garden(TinyConv(), ["first", "second"], torch.zeros(2, *SHAPE), config=EAGER)
    raise_seed(garden, "first", "BLENDING", blueprint="conv_light", style="gated_gate", ticks=2)
    raise_seed(garden, "second", "BLENDING", blueprint="attention", style="linear_multiply")
    shake(garden)
    return garden.train()


def run_file(path: Path, kind: Format, images: Tensor) -> Tensor:
    if kind == "pt2":
        out: Tensor = torch.export.load(path).module()(images)
        return out
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (name,) = (node.name for node in session.get_inputs())
    (scores,) = session.run(None, {name: images.numpy()})
    return torch.from_numpy(np.asarray(scores))


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_an_exported_network_gives_the_same_outputs(kind: Format, tmp_path: Path) -> None:
    garden = grown_conv()
    path = export_garden(garden, torch.zeros(4, *SHAPE), tmp_path / f"grown.{kind}")
    assert path.is_file()
    assert garden.training
    garden.eval()
    for size in (1, 4, 7):
        images = torch.randn(size, *SHAPE)
        with torch.no_grad():
            expected = garden(images)
        torch.testing.assert_close(run_file(path, kind, images), expected, rtol=0, atol=1e-5)
    # It is the grown network, not its host.
    garden.seedbed[0].alpha.zero_()
    with torch.no_grad():
        assert not torch.allclose(garden(images), expected, atol=1e-3)
    assert list(tmp_path.iterdir()) == [path]


def test_several_inputs_are_exported_by_position_and_by_name(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(3, 5)

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            out: Tensor = self.stem(one + other)
            return out

    example = (torch.zeros(2, 3), torch.ones(2, 3))
    garden = Garden(Sum(), ["stem"], example, config=EAGER)
    raise_seed(garden, "stem")
    shake(garden)
    path = export_garden(garden, example, tmp_path / "grown.pt2")
    inputs = torch.randn(5, 3), torch.randn(5, 3)
    out = torch.export.load(path).module()(*inputs)
    torch.testing.assert_close(out, garden.eval()(*inputs), rtol=0, atol=1e-5)
    named = {"one": inputs[0], "other": inputs[1]}
    path = export_garden(garden, {name: value[:1] for name, value in named.items()}, path)
    again = torch.export.load(path).module()(**named)
    torch.testing.assert_close(again, out)


def test_a_model_that_cannot_be_exported_says_so_in_one_line(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.stem(x)
            return out if float(out.sum()) > 0 else -out

    garden = Garden(Branching(), ["stem"], torch.zeros(2, 3))
    with pytest.raises(UsageError, match="PyTorch cannot export this model: ") as caught:
        export_garden(garden, torch.zeros(2, 3), tmp_path / "grown.pt2")
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_a_missing_extra_is_named_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    check_format("onnx")
    check_format("pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    check_format("pt2")
    with pytest.raises(UsageError, match=r"pip install 'esper-grow\[export\]'; or export to pt2"):
        check_format("onnx")
    with pytest.raises(UsageError, match="esper-grow"):
        export_garden(grown_conv(), torch.zeros(2, *SHAPE), "unused.onnx")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    target = tmp_path / "file" / "grown.pt2"
    with pytest.raises(CheckpointError, match=r"cannot save to .*a file is in the way"):
        export_garden(grown_conv(), torch.zeros(2, *SHAPE), target)
