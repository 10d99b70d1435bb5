from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from esper.scripts.cli.main import main


def test_without_the_extra_it_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name == "esper.nissa.dashboard.app":
            raise ModuleNotFoundError("No module named 'starlette'", name="starlette")
        return usual(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(["dashboard", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert "pip install 'esper-grow[dash]'" in line
    assert "starlette" in line


def test_a_folder_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", str(tmp_path / "nothing")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_port_out_of_range_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", str(tmp_path), "--port", "70000"]) == 2
    assert "0 to 65535" in capsys.readouterr().err
