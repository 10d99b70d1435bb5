"""Whole rounds of a recipe, measured."""

from __future__ import annotations

import pytest

from esper.lab.bench.learning import measure_rounds
from esper.lab.tasks import get_task
from esper.simic.training.config import get_recipe


def test_a_round_counts_what_rows_and_twins_learn_from() -> None:
    rate = measure_rounds("smoke", 1, "cpu", rows=4)
    task, config = get_task("digits").config, get_recipe("smoke")
    each = config.epochs * task.samples_per_step
    assert rate.rows == 4
    assert rate.images == (4 + 4 // config.rows_per_seed) * each
    assert rate.images_per_s == pytest.approx(rate.images / rate.round_s)
    assert 0 < rate.twins_s + rate.episodes_s + rate.update_s <= rate.round_s
