"""`esper clone`, from a search to a policy that trains on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from esper.lab.proof.search import LESSONS_FILE, SearchConfig
from esper.lab.tasks import get_family
from esper.lab.tasks.family import MemberChoice
from esper.nissa.folder import RunFolder
from esper.nissa.listing import COMMAND
from esper.scripts.cli.clone import make
from esper.scripts.cli.main import build_parser
from tests.scripts.cli.terminal import esper
from tests.scripts.cli.test_search import TINY

SMALL = ("--rounds", "1", "--episodes", "2", "--passes", "2", "--set", "policy.lstm_hidden_dim=16")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from esper.scripts.cli.main import main

    out = tmp_path_factory.mktemp("found") / "search"
    assert main(["search", *TINY, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_from_a_search_to_a_policy_that_trains_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, searched: Path
) -> None:
    out = tmp_path / "clone"
    said = esper(capsys, "clone", str(searched), *SMALL, "--out", str(out))
    assert said.code == 0, said.err
    policy = tmp_path / "clone" / "policy"
    assert f"use it with --controller greedy:{policy}" in "".join(said.out.splitlines())
    told = json.loads((out / "clone.json").read_text())
    # The search played two members; all of the family's are taught.
    assert len(told["members"]) == len(get_family("digits_family").members("train"))
    # What is done is done.
    again = esper(capsys, "clone", "--resume", "--json", "--out", str(out))
    assert json.loads(again.out)["rounds"] == told["rounds"]
    start = (
        *("train", "smoke", "--task", "digits_mlp", "--set", f"start={out}"),
        *("--set", "ppo.anchor_kl=0.1", "--set", "rows=2", "--set", "episode_length=4"),
        *("--set", "policy.layout=travelling", "--set", "policy.lstm_hidden_dim=16"),
    )
    trained = esper(capsys, *start, "--rounds", "1", "--out", str(tmp_path / "run"))
    assert trained.code == 0, trained.err
    # The policy it started from is not needed to go on.
    (out / "policy").rename(tmp_path / "elsewhere")
    more = esper(capsys, "train", "--resume", "--set", "rounds=2", "--out", str(tmp_path / "run"))
    assert more.code == 0, more.err


def test_clones_of_families_of_depth_see_ratios(tmp_path: Path) -> None:
    family = get_family("depth_small")
    config = SearchConfig(members=MemberChoice(family=family.name, split="train"))
    folder = tmp_path / "search"
    folder.mkdir()
    RunFolder(folder).write_config({COMMAND: "search", **config.to_mapping()})
    lessons: dict[str, list[object]] = {member.label: [] for member in family.members("train")}
    (folder / LESSONS_FILE).write_text(json.dumps(lessons))
    asked = ["clone", str(folder), "--out", str(tmp_path / "clone")]
    own = make(build_parser(asked).parse_args(asked))
    assert (own.policy.layout, own.smoothing) == ("ratios", 0.02)
    asked += ["--set", "smoothing=0"]
    assert make(build_parser(asked).parse_args(asked)).smoothing == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "x"), "SEARCH is missing"),
        (("nowhere", "--out", "x"), "is not there, so it is not a run folder"),
        (("SEARCH", "--episodes", "0", "--out", "x"), "episodes must be at least 1"),
        (("SEARCH", "--split", "select", "--out", "x"), "learns on train members alone"),
        (("SEARCH",), "--out is missing"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    searched: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(searched) if each == "SEARCH" else each for each in arguments]
    assert words in esper(capsys, "clone", *given).complaint()
    assert not (tmp_path / "x").exists()


def test_an_anchor_needs_a_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = esper(
        capsys, "train", "smoke", "--set", "ppo.anchor_kl=0.1", "--out", str(tmp_path / "run")
    )
    assert "set start=FOLDER too" in said.complaint()
