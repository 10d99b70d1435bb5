from __future__ import annotations

import json

import pytest

from esper.kasmina.blueprints import BLUEPRINTS, blueprint_names, count_parameters
from esper.scripts.cli.blueprints import describe_blueprints
from tests.scripts.cli.terminal import esper


def test_every_blueprint_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "blueprints")
    assert (said.code, said.err) == (0, "")
    for name in blueprint_names():
        assert name in said.out


def test_the_document_has_sizes_and_topologies(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "blueprints", "--json")
    assert (said.code, said.err) == (0, "")
    rows = json.loads(said.out)["blueprints"]
    assert rows == describe_blueprints()
    assert [row["id"] for row in rows] == list(range(len(blueprint_names())))
    assert [row["name"] for row in rows if not row["selectable"]] == ["noop"]
    conv = next(row for row in rows if row["name"] == "conv_light")
    size = count_parameters(BLUEPRINTS.get("conv_light"), 64, "cnn")
    assert conv["parameters"]["cnn"]["64"] == size
    assert all(row["note"] for row in rows)
    immediate = {row["name"]: row["immediate"] for row in rows}
    assert immediate["kin"] == ["cnn", "sequence", "vector"]
    assert immediate["lora"] == ["sequence", "vector"]
    assert immediate["conv_light"] == []
    assert next(row for row in rows if row["name"] == "kin")["parameters"] == {}


def test_flex_attention_says_how_it_runs() -> None:
    notes = {row["name"]: row["note"] for row in describe_blueprints()}
    assert "CUDA" in notes["flex_attention"]
    assert "CPU" in notes["flex_attention"]


def test_a_narrow_terminal_is_enough(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    said = esper(capsys, "blueprints")
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= 60
