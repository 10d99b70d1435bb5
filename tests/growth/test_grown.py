from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from esper.growth.grow import grow
from esper.growth.grown import Grown
from esper.kasmina.garden import load_garden
from esper.leyline.errors import CheckpointError, EsperWarning, UsageError
from tests.nissa.report.runs import growing_run, summary_of
from tests.plots import GROW_ONE, SLOTS, Script, growth_config, make_batches, make_net


@pytest.fixture(scope="module")
def grown() -> Grown:
    with pytest.warns(EsperWarning, match="still being blended in when the run ended, at 67%"):
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
    assert f"validation score {grown.summary.val_score:.2f}" in told
    assert f"(twin {grown.summary.twin_val_score:.2f}, gain " in told
    assert "test" not in told
    assert f"→ {grown.summary.parameters_after:,} parameters, " in told
    assert (
        f"→ {grown.summary.flops_after:,} FLOPs, grew mlp_small at stem (blending), epoch 6 of 6)"
        in told
    )
    # Nothing compares the sizes that a network had: it reached them at different epochs.
    assert str(grown) == told
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


def test_a_split_that_was_tested_is_told_beside_the_validation(grown: Grown) -> None:
    summary = summary_of(growing_run(), val_score=90.0, twin_val_score=89.72)
    tested = dataclasses.replace(summary, test_score=88.0, twin_test_score=88.83)

    validated = "validation score 90.00 (twin 89.72, gain +0.28), "
    test = "test score 88.00 (twin 88.83, gain -0.83), "
    assert validated in repr(dataclasses.replace(grown, summary=summary))
    assert validated + test in repr(dataclasses.replace(grown, summary=tested))


def test_printing_the_model_shows_what_grew_and_where(grown: Grown) -> None:
    shown = str(grown.model).splitlines()
    assert shown[0] == repr(grown.model)
    (line,) = [number for number, line in enumerate(shown) if "seed=" in line]
    assert shown[line - 1].strip() == "(stem): Sequential("
    assert re.fullmatch(r"\s+seed=mlp_small \(blending, alpha 0\.67, 162 parameters\)", shown[line])
    assert "\n".join(shown[1:line] + shown[line + 1 :]) == repr(make_net())


def test_the_picture_is_svg(grown: Grown, tmp_path: Path) -> None:
    path = tmp_path / "growth.svg"
    picture = grown.plot(path)
    assert picture == grown.plot()
    assert path.read_text(encoding="utf-8") == picture._repr_svg_()
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


@pytest.mark.filterwarnings("ignore:A static network of the same size")
def test_a_plain_network_comes_out_of_it_and_grows_on(grown: Grown) -> None:
    plain, x = grown.bake(), torch.randn(5, 4)
    assert type(plain).__name__ == "TinyNet"
    assert torch.equal(plain(x), grown.model(x))
    again = grow(
        plain,
        SLOTS,
        train=make_batches(),
        val=make_batches(2, 32, seed=9),
        epochs=9,
        controller=Script(GROW_ONE),
        config=growth_config(1),
    )
    assert again.summary.parameters_before == grown.summary.parameters_after
    assert again.summary.parameters_after > again.summary.parameters_before


def test_it_is_saved_and_loaded(grown: Grown, tmp_path: Path) -> None:
    folder = grown.save(tmp_path / "saved")
    x = torch.randn(5, 4)
    assert torch.equal(load_garden(folder, model=make_net()).eval()(x), grown.model(x))


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_it_is_exported_by_the_ending_of_the_path(kind: str, grown: Grown, tmp_path: Path) -> None:
    path = grown.export(tmp_path / f"grown.{kind}")
    assert path.stat().st_size > 1000
    if kind == "pt2":
        x = torch.randn(5, 4)
        torch.testing.assert_close(torch.export.load(path).module()(x), grown.model(x))
    with pytest.raises(UsageError, match=r"use \.onnx or \.pt2"):
        grown.export(tmp_path / "grown.pt")
