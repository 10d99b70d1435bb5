from __future__ import annotations

import pytest

from esper.nissa.report.lanes import BAND
from esper.nissa.report.picture import growth_picture
from tests.nissa.report.reading import having, parse, told, written
from tests.nissa.report.runs import growing_run, make_epoch, make_slot


def test_height_is_proportional_to_alpha() -> None:
    root = parse(growth_picture(growing_run()))
    heights = [float(one.get("height", "nan")) for one in having(root, "alpha", "blending")]
    wanted = [0.2, 0.3, 0.4, 0.5, 0.6, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert heights == pytest.approx([alpha * BAND for alpha in wanted], abs=0.01)


def test_bands_stand_on_the_line_of_alpha_zero() -> None:
    root = parse(growth_picture(growing_run()))
    for lane in ("blending", "fossilized"):
        feet = {
            round(float(one.get("y", "nan")) + float(one.get("height", "nan")), 1)
            for one in having(root, "alpha", lane)
        }
        assert len(feet) == (2 if lane == "blending" else 1)


def test_a_seed_without_amplitude_shows_its_stage() -> None:
    root = parse(growth_picture(growing_run()))
    assert len(having(root, "ribbon", "training")) == 2
    assert not having(root, "alpha", "training")
    assert having(root, "run")


def test_runs_tell_blueprint_stage_epochs_and_alpha() -> None:
    tips = told(parse(growth_picture(growing_run())))
    assert "r0c0: norm, blending, epochs 13 to 17, alpha 0.20 to 0.60" in tips
    assert "r0c1: conv_light, germinated, epoch 26, alpha 0.00" in tips


def test_an_unmeasured_contribution_is_a_dash_and_never_zero() -> None:
    slots = (make_slot("a", stage="TRAINING", blueprint="norm"),)
    texts = written(parse(growth_picture([make_epoch(1, 50.0, slots=slots)])))
    assert "–" in texts
    assert not any("±" in text for text in texts)
