from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.lab.tasks import TASKS
from esper.scripts.cli.doctor import examine
from tests.scripts.cli.terminal import esper


def test_what_is_found_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "doctor")
    assert (said.code, said.err) == (0, "")
    for word in ("versions", "devices", "threads", "data", "missing", torch.__version__, "cores"):
        assert word in said.out


def test_the_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = esper(capsys, "doctor", "--json", "--data", tmp_path)
    assert (said.code, said.err) == (0, "")
    found = json.loads(said.out)
    assert set(found) == {"versions", "devices", "threads", "data", "missing"}
    assert found["threads"] == {"torch": int(os.environ["ESPER_THREADS"])}
    assert set(found["data"]) == set(TASKS.names())
    assert found["data"]["digits"] == str(tmp_path) or found["data"]["digits"] == "embedded"
    assert "was not found" in found["data"]["cifar_baseline"]
    assert found["missing"] == {}


def test_a_thing_is_said_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = esper(capsys, "doctor", "--data", tmp_path)
    for word in ("versions", "│ data", "CIFAR-10 was not found", "Fashion-MNIST was not found"):
        told = [line for line in said.out.splitlines() if word in line]
        assert len(told) == 1, (word, told)


def test_a_missing_extra_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def hide(name: str, *rest: Any) -> Any:
        return None if name == "onnxscript" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", hide)
    monkeypatch.setenv("COLUMNS", "120")
    assert examine(None)["missing"] == {"export": "pip install 'esper-grow[export]'"}
    assert "pip install 'esper-grow[export]'" in esper(capsys, "doctor").out


def test_a_narrow_terminal_is_enough(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    said = esper(capsys, "doctor")
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= 60
