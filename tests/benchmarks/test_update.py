from __future__ import annotations

import sys

import pytest

from benchmarks import update


def test_without_the_reference_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    arguments = ["--rows", "2", "--steps", "4", "--hidden", "16", "--rounds", "1"]
    assert update.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "[bench]" in said.err
    assert len(said.err.splitlines()) == 1
