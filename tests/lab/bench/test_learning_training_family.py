"""Families against single hosts: what is measured, and that rounds differ."""

from __future__ import annotations

import json

import pytest

from esper.lab.bench.learning import CHANNELS, make_tasks
from tests.scripts.cli.terminal import esper


def test_it_compares_a_family_with_its_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--rows", 16, "--rounds", 2, "--steps", 1, "--samples", 32)
    said = esper(
        capsys, "bench", "family", "--device", "cpu", "--strategy", "sequential", *small, "--json"
    )
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert [each["rows"] for each in found["populations"]] == [16] * (1 + len(CHANNELS))
    assert found["steps"] == 1
    assert found["cost"] > 0
    assert all(each["row_epochs_per_s"] > 0 for each in found["populations"])


def test_other_rounds_have_other_conditions_of_the_same_hosts() -> None:
    first, second = (make_tasks("digits", CHANNELS, 4, number, 64) for number in (0, 1))
    assert len(first) == 16
    hosts = [[task.config.host_options for task in tasks] for tasks in (first, second)]
    assert hosts[0] == hosts[1]
    assert [task.config for task in first] != [task.config for task in second]
