"""What `esper tasks` shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from esper.lab.tasks import TASKS, describe_task


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_describes_itself_in_plain_data(name: str) -> None:
    description = describe_task(name)
    assert json.loads(json.dumps(description)) == description
    assert description["summary"].endswith(".")
    assert description["parameters"] > 0
    assert description["slots"]


def test_embedded_data_is_always_there(no_data: Path) -> None:
    assert no_data.is_dir()
    assert describe_task("digits")["data"] == {
        "status": "found",
        "where": "embedded",
        "problem": None,
    }


@pytest.mark.parametrize("name", ["fashion", "cifar_baseline", "stories"])
def test_missing_data_says_so(no_data: Path, name: str) -> None:
    data = describe_task(name)["data"]
    assert data["status"] == "missing"
    assert str(no_data) in data["problem"]
