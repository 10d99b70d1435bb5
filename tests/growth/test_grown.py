from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.growth.grown import Format, Grown, check_format, export_model
from esper.kasmina.garden import Garden
from esper.leyline.errors import CheckpointError, UsageError
from esper.runs.grow import grow
from tests.plots import (
    EAGER,
    GROW_ONE,
    SLOTS,
    Script,
    TinyConv,
    growth_config,
    make_batches,
    make_net,
    raise_seed,
    shake,
)


@pytest.fixture(scope="module")
def grown() -> Grown:
    return grow(
        make_net(),
        SLOTS,
        train=make_batches(),
        val=make_batches(2, 32, seed=9),
        epochs=6,
        twin=True,
        controller=Script(GROW_ONE),
        config=growth_config(1),
    )


def test_it_is_told_in_one_line(grown: Grown) -> None:
    told = repr(grown)
    assert "\n" not in told
    assert f"val score {grown.summary.val_score:.2f}" in told
    assert f"(twin {grown.summary.twin_val_score:.2f})" in told
    assert f"→ {grown.summary.parameters_after:,} parameters, " in told
    assert f"→ {grown.summary.flops_after:,} FLOPs, grew mlp_small at " in told
    garden = repr(grown.model)
    assert "\n" not in garden
    assert f"{grown.model.count_parameters():,} parameters" in garden
    assert "mlp_small" in garden


def test_the_report_is_one_page_that_fetches_nothing(grown: Grown, tmp_path: Path) -> None:
    path = grown.report(tmp_path / "deep" / "report.html", command="grow <it> & see")
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "grow &lt;it&gt; &amp; see" in page
    assert "mlp_small" in page
    assert "germinate" in page.lower()
    assert torch.__version__ in page
    for outside in ("http://", "https://", "<script", "src="):
        assert outside not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_report_names_the_command_that_made_it(
    grown: Grown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["my script.py", "--epochs", "6"])
    page = grown.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "my script.py" in page
    assert "--epochs 6" in page


def test_the_picture_is_svg(grown: Grown, tmp_path: Path) -> None:
    path = grown.picture(tmp_path / "growth.svg")
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")
    words = " ".join(root.itertext())
    assert "stem" in words
    assert "mlp_small" in words


def test_both_accept_text_and_replace_what_was_there(grown: Grown, tmp_path: Path) -> None:
    target = str(tmp_path / "page.html")
    for _ in range(2):
        assert grown.report(target) == Path(target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_a_path_that_cannot_be_written_is_named(grown: Grown, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot save to"):
        grown.report(tmp_path / "file" / "report.html")


def test_the_twin_is_the_plain_model(grown: Grown) -> None:
    assert grown.twin is not None
    assert type(grown.twin).__name__ == "TinyNet"
    x = torch.zeros(2, 4)
    assert not torch.equal(grown.twin(x), grown.model(x))


def test_a_plain_network_comes_out_of_it_and_grows_on(grown: Grown) -> None:
    plain, x = grown.bake(), torch.randn(5, 4)
    assert type(plain).__name__ == "TinyNet"
    assert torch.equal(plain(x), grown.model(x))
    again = grow(
        plain,
        SLOTS,
        train=make_batches(),
        val=make_batches(2, 32, seed=9),
        epochs=6,
        controller=Script(GROW_ONE),
        config=growth_config(1),
    )
    assert again.summary.parameters_before == grown.summary.parameters_after
    assert again.summary.parameters_after > again.summary.parameters_before


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
    path = export_model(garden, torch.zeros(4, *SHAPE), tmp_path / f"grown.{kind}", kind)
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


def test_several_inputs_are_exported_by_position(tmp_path: Path) -> None:
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
    path = export_model(garden, example, tmp_path / "grown.pt2", "pt2")
    inputs = torch.randn(5, 3), torch.randn(5, 3)
    out = torch.export.load(path).module()(*inputs)
    torch.testing.assert_close(out, garden.eval()(*inputs), rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match="export takes positional inputs; pass them as a tuple"):
        export_model(garden, {"one": inputs[0], "other": inputs[1]}, path, "pt2")


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
        export_model(garden, torch.zeros(2, 3), tmp_path / "grown.pt2", "pt2")
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_a_missing_extra_is_named_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    check_format("onnx")
    check_format("pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    check_format("pt2")
    with pytest.raises(
        UsageError, match=r"pip install 'esper-grow\[export\]'; or use --export pt2"
    ):
        check_format("onnx")
    with pytest.raises(UsageError, match="the extra"):
        export_model(grown_conv(), torch.zeros(2, *SHAPE), "unused.onnx", "onnx")


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    kind: Any = "onx"
    with pytest.raises(UsageError, match="unknown export format 'onx', did you mean 'onnx'"):
        export_model(grown_conv(), torch.zeros(2, *SHAPE), tmp_path / "grown", kind)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    target = tmp_path / "missing" / "grown.pt2"
    with pytest.raises(CheckpointError, match=r"cannot write .*grown\.pt2: No such file"):
        export_model(grown_conv(), torch.zeros(2, *SHAPE), target, "pt2")
