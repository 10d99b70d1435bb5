from __future__ import annotations

import json
from pathlib import Path

import pytest

from esper.scripts.cli.main import build_parser
from esper.scripts.cli.search import make
from tests.scripts.cli.terminal import esper

TINY = (
    *("--family", "digits_family", "--split", "train", "--count", "2", "--device", "cpu"),
    *("--rungs", "2x2", "--heuristics", "1", "--horizon", "2", "--set", "play.strategy=sequential"),
)


def test_a_search_from_start_to_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "search"
    said = esper(capsys, "search", *TINY, "--out", str(out))
    assert said.code == 0, said.err
    assert "best single schedule: conv_heavy" in said.out
    assert "Best schedule of every member" in said.out
    assert "in hindsight: " in said.out
    assert json.loads((out / "schedule.json").read_text())
    # What is done is done: continuing plays nothing and says the same.
    again = esper(capsys, "search", "--resume", "--json", "--out", str(out))
    assert again.code == 0
    assert json.loads(again.out) == json.loads((out / "summary.json").read_text())
    assert "is not empty" in esper(capsys, "search", *TINY, "--out", str(out)).complaint()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--out is missing"),
        (("--rungs", "two", "--out", "x"), "a rung is PLANSxSEEDS"),
        (("--family", "digit_family", "--out", "x"), "did you mean 'digits_family'"),
        (("--split", "claim", "--family", "image16_family", "--out", "x"), "--open-claim 1"),
        (("--set", "play.param_limits=3", "--out", "x"), "did you mean 'param_limit'"),
        (("--resume", "--rungs", "2x2", "--out", "x"), "leave out --rungs"),
        (("--resume", "--out", "x"), "is not there, so it is not a run folder"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in esper(capsys, "search", *arguments).complaint()
    assert not (tmp_path / "x").exists()


def test_members_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "search", "--list", "--count", "3", "--json")
    assert len(json.loads(said.out)["members"]) == 3


def test_families_of_depth_bring_their_settings() -> None:
    asked = ["search", "--family", "depth_small", "--out", "x"]
    parser = build_parser(asked)
    config = make(parser.parse_args(asked))
    assert (config.space, config.heuristics) == ("doublings", 0)
    assert config.play.population.copies
    assert (config.play.keep, config.play.flop_limit) == ("best", 4.0)
    assert (config.depths, config.hidden, config.price) == ((2, 4), 0.8, 0.0)
    changed = make(parser.parse_args([*asked, "--heuristics", "2", "--set", "play.flop_limit=3"]))
    assert (changed.heuristics, changed.play.flop_limit) == (2, 3.0)
    plain = make(parser.parse_args(["search", "--out", "x"]))
    assert (plain.space, plain.play.keep, plain.play.population.copies) == ("seeds", "last", False)
