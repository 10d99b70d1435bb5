"""Rows, data and blueprints of the tasks of a population."""

from __future__ import annotations

import pytest
import torch

from esper.kasmina.blueprints.registry import BLUEPRINTS, blueprint_names
from esper.leyline.errors import UsageError
from esper.population.membership import fitting_blueprints, load_data, share_out
from tests.population.worlds import TinyImages, TinyText, TinyValues


def test_rows_are_shared_out_evenly_or_as_asked_for() -> None:
    assert share_out(7, 3) == [3, 2, 2]
    assert share_out([1, 5], 2) == [1, 5]
    for rows, tasks in ((1, 2), ([3], 2), ([3, 0], 2)):
        with pytest.raises(UsageError, match=f"every one of {tasks} tasks needs at least one row"):
            share_out(rows, tasks)


def test_blueprints_fit_slots_of_their_topology() -> None:
    images, text = fitting_blueprints(TinyImages()), fitting_blueprints(TinyText())
    assert images.shape == (3, len(blueprint_names()))
    assert text.shape == (2, len(blueprint_names()))
    heavy, noop = BLUEPRINTS.get("conv_heavy").id, BLUEPRINTS.get("noop").id
    assert images[:, heavy].all()
    assert not text[:, heavy].any()
    assert not images[:, noop].any()


def test_data_is_read_once_or_taken_as_it_is() -> None:
    tasks, device = [TinyImages(), TinyValues()], torch.device("cpu")
    found = load_data(tasks, None, device)
    assert [data.kind for data in found] == [task.load(None).kind for task in tasks]
    assert [data.device for data in load_data(tasks, found, device)] == [device, device]
    with pytest.raises(UsageError, match="2 tasks need as many data sets, got 1"):
        load_data(tasks, found[:1], device)
