from __future__ import annotations

from pathlib import Path

import pytest

from esper.scripts.demo import main, verdict
from esper.simic.training.evaluation import Interval


def test_it_trains_grows_compares_and_says_where_the_reports_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "demo"
    code = main(["--recipe", "smoke", "--seeds", "2", "--out", str(out)])
    said = capsys.readouterr()
    assert code == 0, said.err
    for text in ("Trained on digits", "Grown: digits", "WAIT-only", "random", "trained, greedy"):
        assert text in said.out
    assert "The controller " in said.out
    for run in ("tamiyo", "grown"):
        assert str(out / run / "report.html") in said.out
        assert (out / run / "report.html").is_file()


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.1, 0.9, "beats waiting"),
        (-0.9, -0.1, "is worse than waiting"),
        (-0.1, 0.9, "is level with waiting within chance"),
    ],
)
def test_the_verdict_says_what_was_found(low: float, high: float, words: str) -> None:
    told = verdict(Interval((low + high) / 2, low, high, 8))
    assert words in told
    assert f"{low:+.2f} to {high:+.2f}" in told
    assert "only waited" in verdict(Interval(0.0, 0.0, 0.0, 8), has_grown=False)


def test_a_part_that_fails_ends_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--recipe", "nonsense", "--out", str(tmp_path / "demo")]) == 2
    assert "nonsense" in capsys.readouterr().err
