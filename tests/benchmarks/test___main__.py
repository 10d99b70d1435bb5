"""Every benchmark can be found and explains itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main, names


@pytest.mark.parametrize("name", names())
def test_every_benchmark_explains_its_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert f"python -m benchmarks {name}" in capsys.readouterr().out


def test_the_list_names_every_benchmark_and_an_unknown_one_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in names())
    assert main(["nonsense"]) == 2
    assert "unknown benchmark 'nonsense'" in capsys.readouterr().err


def test_what_cannot_be_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["digits_learning", str(tmp_path / "nowhere")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("digits_learning: ")
    assert "nowhere" in line


@pytest.mark.parametrize(
    "words",
    [
        "adapters summary FILE",
        "checkpoints --summary --out FILE",
        "demo --summary --out FILE",
        "depth summary FILE",
        "depth picture python-short FILE --out picture.svg",
        "headroom --summary FILE",
        "maskable_ppo --summary FILE",
        "peers --summary --out FILE",
        "strangers summary FILE",
        "tune_hosts --summary FILE",
    ],
)
def test_a_summary_without_results_is_refused(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.replace("FILE", "nowhere.jsonl").split()) == 2
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert "no results in nowhere.jsonl" in line
