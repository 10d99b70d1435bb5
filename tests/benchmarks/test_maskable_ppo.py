from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import maskable_ppo


def write_curve(path: Path, returns: list[float], seconds: float) -> str:
    rounds = [
        {"env_steps": 10 * number, "return_mean": each, "gain_mean": 2 * each, "seconds": seconds}
        for number, each in enumerate(returns, start=1)
    ]
    path.write_text(json.dumps({"rounds": rounds}), encoding="utf-8")
    return str(path)


def test_curves_are_compared_after_as_many_decisions_and_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = write_curve(tmp_path / "slow.json", [1.0, 2.0, 3.0, 4.0], seconds=10.0)
    fast = write_curve(tmp_path / "fast.json", [0.0, 1.0, 1.0, 1.0, 4.0, 4.0], seconds=2.0)
    picture = tmp_path / "curves.svg"
    assert maskable_ppo.main(["--summary", slow, fast, "--picture", str(picture)]) == 0
    lines = [line.strip("| ").split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    found = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    # 40 decisions and 12 seconds are what both have had; a point is the mean of three rounds.
    assert found == {
        "slow": ["4", "40", "40", "+3.00, +6.00", "+1.00, +2.00", "+3.00, +6.00"],
        "fast": ["6", "60", "12", "+1.00, +2.00", "+3.00, +6.00", "+3.00, +6.00"],
    }
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.count('class="line c1"') == drawn.count('class="line c2"') == 8


def test_a_curve_with_no_round_in_the_shared_time_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = write_curve(tmp_path / "slow.json", [1.0], seconds=10.0)
    fast = write_curve(tmp_path / "fast.json", [1.0], seconds=2.0)
    assert maskable_ppo.main(["--summary", slow, fast]) == 0
    assert "no round yet" in capsys.readouterr().out
