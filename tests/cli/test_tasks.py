from __future__ import annotations

import json
from pathlib import Path

import pytest

from esper.tasks import TASKS, get_task
from tests.cli.terminal import esper


def test_every_task_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "tasks")
    assert (said.code, said.err) == (0, "")
    for name in TASKS.names():
        assert name in said.out
    assert "embedded" in said.out
    assert f"{get_task('digits').host_parameters:,}" in said.out


def test_the_document_has_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "tasks", "--json")
    assert (said.code, said.err) == (0, "")
    rows = {row["name"]: row for row in json.loads(said.out)["tasks"]}
    assert tuple(rows) == TASKS.names()
    digits = rows["digits"]
    assert digits["parameters"] == get_task("digits").host_parameters
    assert digits["data"] == {"status": "found", "where": "embedded", "problem": None}
    assert digits["slots"] == get_task("digits").slot_paths


def test_missing_data_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = esper(capsys, "tasks", "--data", tmp_path, "--json")
    rows = {row["name"]: row for row in json.loads(said.out)["tasks"]}
    assert rows["cifar_baseline"]["data"]["status"] == "missing"
    assert "data_batch_1" in rows["cifar_baseline"]["data"]["problem"]
    assert str(tmp_path) in rows["cifar_baseline"]["data"]["problem"]
    said = esper(capsys, "tasks", "--data", tmp_path)
    assert said.code == 0
    assert "missing" in said.out


def test_a_narrow_terminal_is_enough(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    said = esper(capsys, "tasks")
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= 60
