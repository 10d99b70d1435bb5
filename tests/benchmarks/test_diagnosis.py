from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

import esper
from benchmarks.diagnosis import THEIRS, diagnose, main
from esper.leyline.errors import UsageError
from tests.nissa.report.training_runs import write_training


def test_a_run_is_diagnosed_in_quarters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_training(tmp_path / "run", rounds=8)
    with esper.open_run(folder) as stored:
        updates = stored.rows("updates", where="is_last = 1 AND round IN (2, 3)")
        tempo = stored.rows("update_heads", where="head = 'tempo' AND round IN (2, 3)")
    found = diagnose(folder)
    assert [part["rounds"] for part in found] == [f"rounds {n} to {n + 1}" for n in (1, 3, 5, 7)]
    for figure, rows, column in (
        ("explained variance", updates, "explained_variance"),
        ("tempo entropy given GERMINATE", tempo, "entropy_conditional"),
    ):
        assert found[1][figure] == pytest.approx(fmean(row[column] for row in rows))
    assert all(0 < part["WAIT"] < 1 for part in found)
    assert set(THEIRS) < set(found[0])
    assert main([str(folder)]) == 0
    assert "| WAIT " in capsys.readouterr().out


def test_a_run_without_a_round_cannot_be_diagnosed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no round yet"):
        diagnose(write_training(tmp_path / "run", rounds=0))
