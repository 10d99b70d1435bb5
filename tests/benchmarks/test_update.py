from __future__ import annotations

import json
import sys

import pytest

from benchmarks import update


def test_without_the_reference_it_measures_and_says_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    quick = ["--rows", "2", "--steps", "4", "--hidden", "16", "--rounds", "1", "--minibatches", "2"]
    assert update.main([*quick, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["reference"] == "plain steps"
    assert found["parameters"]["esper"] == found["parameters"]["reference"]
    assert "[bench]" in said.err
    assert len(said.err.splitlines()) == 1
    assert update.main(quick) == 0
    assert "| plain steps |" in capsys.readouterr().out
