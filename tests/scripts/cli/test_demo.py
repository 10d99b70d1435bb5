from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from esper.lab.proof.arm import Standing
from esper.scripts.cli import demo
from tests.scripts.cli.terminal import esper


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tables room, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "240")


def arm(name: str, *test: float) -> Standing:
    return Standing(name, list(test), parameters=300, flops=5_000)


def test_it_grows_compares_and_says_where_all_is_and_how_to_do_it_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    said = esper(capsys, "demo", "--seeds", 1, "--epochs", 8, "--out", out)
    assert said.code == 0, said.err
    for text in ("digits_narrow, one seed", "twin (only waits)", "grown", "static, rate 0."):
        assert text in said.out
    assert "Growing beat waiting in " in said.out
    for file in ("growth.svg", "report.html"):
        assert str(out / file) in said.out
        assert (out / file).is_file()
    # And the command that it names grows the same network.
    again = tmp_path / "by hand"
    by_hand = said.out.split("by hand: esper ")[1].splitlines()[0]
    assert "min_training_epochs=3" in by_hand
    assert esper(capsys, *shlex.split(by_hand), "--out", again).code == 0
    assert (again / "config.yaml").read_text() == (out / "config.yaml").read_text()
    first, second = (json.loads((run / "summary.json").read_text()) for run in (out, again))
    for key in ("test_score", "twin_test_score", "parameters_after", "contributions"):
        assert first[key] == second[key]


def test_the_document_has_every_seed_and_the_demo_can_be_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seeds in (1, 2):
        said = esper(
            *(capsys, "demo", "--seeds", seeds, "--seed", 3, "--epochs", 7, "--json"),
            *("--out", tmp_path / "demo"),
        )
    document = json.loads(said.out)
    twin, grown, static = document["arms"]
    assert [len(each["test"]) for each in (twin, grown, static)] == [2, 2, 2]
    assert twin["parameters"] == document["parameters_before"]
    assert document["seed"] == 3
    assert document["cpu_s"] > 0


@pytest.mark.parametrize(
    ("static", "words"),
    [
        ((90.0, 91.0, 92.0), "beat waiting in 2 of 3 runs (+2.00 points), and a static network"),
        ((80.0, 92.0, 95.0), "a static network of that size is as good"),
        ((95.0, 95.0, 95.0), "a static network of that size is better by +3.00 points"),
    ],
)
def test_the_verdict_says_what_was_found(static: tuple[float, ...], words: str) -> None:
    told = demo.verdict(arm("twin", 90, 92, 91), arm("grown", 92, 90, 95), arm("s", *static))
    assert words in told


def test_there_is_at_least_one_network(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "demo", "--seeds", 0)
    assert said.code == 2
    assert "--seeds must be at least 1, got 0" in said.err


def test_a_seed_out_of_range_is_refused_before_there_is_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (-1, 2**63 - 1, 2**70):
        said = esper(capsys, "demo", "--seed", seed, "--out", tmp_path / "demo")
        assert "GrowthConfig.seed must be" in said.complaint()
    assert not (tmp_path / "demo").exists()
