from __future__ import annotations

import json
from pathlib import Path

import pytest

from esper.lab.tasks import FAMILIES, TASKS, get_family, get_task
from tests.scripts.cli.terminal import esper


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


def test_every_family_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "tasks")
    for name in FAMILIES.names():
        assert name in said.out
    said = esper(capsys, "tasks", "--json")
    families = {row["name"]: row for row in json.loads(said.out)["families"]}
    assert tuple(families) == FAMILIES.names()
    assert families["image16_family"]["sizes"]["claim"] == 24


def test_a_family_lists_its_axes_and_members(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    family = get_family("image16_family")
    said = esper(capsys, "tasks", "--family", "image16_family")
    assert (said.code, said.err) == (0, "")
    for split in ("select", "claim"):
        for member in family.members(split):
            assert member.label in said.out
    assert "lacks capacity" in said.out
    assert "2000, 6000, 20000" in said.out
    said = esper(capsys, "tasks", "--family", "image16_family", "--json")
    members = json.loads(said.out)["family"]["members"]
    assert len(members) == sum(len(family.members(s)) for s in ("train", "select", "claim"))
    purposes = [member.get("purpose") for member in members if member["split"] == "claim"]
    assert purposes.count("neutral") == 6


def test_an_unknown_family_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "tasks", "--family", "image_family")
    assert said.code == 2
    assert "did you mean 'image16_family'" in said.err


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
