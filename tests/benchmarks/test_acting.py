"""The benchmark of steps in which seeds come and go runs and says what it measured."""

from __future__ import annotations

import json

import pytest

from benchmarks.acting import main


@pytest.mark.parametrize("extra", [[], ["--grown"]])
def test_it_times_steps_of_a_small_population(
    extra: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--device cpu --task digits --rows 2 --steps 1 --warm-up 0 --batch-size 512 --json"
    assert main([*options.split(), *extra]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["rows"] == 2
    assert found["steps"] == 1
    assert 0 < found["mean_ms"] <= found["longest_ms"]
    assert found["memory_gib"] is None
