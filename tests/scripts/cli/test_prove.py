from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from esper.lab.tasks import get_family
from esper.scripts.cli.main import build_parser
from esper.scripts.cli.prove import make
from esper.tamiyo.controllers import new_policy, save_policy
from tests.scripts.cli.terminal import esper

TINY = (
    *("--family", "digits_family", "--split", "select", "--count", "2", "--device", "cpu"),
    *("--seeds", "2", "--horizon", "2", "--set", "play.strategy=sequential"),
)


def test_a_proof_from_start_to_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = [{"epoch": 0, "op": "grow", "slot": "100%", "blueprint": "norm"}]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    said = esper(capsys, "prove", "schedule:plan.json", "wait", *TINY, "--out", "proof")
    assert said.code == 0, said.err
    assert "schedule ties with wait" in said.out
    assert "report: proof/report.md" in said.out
    assert (tmp_path / "proof" / "report.md").read_text().startswith("# Proof: schedule")
    found = json.loads((tmp_path / "proof" / "results.json").read_text())
    assert found["opening"] == 0
    assert set(found["arms"]) == {"schedule", "wait"}
    # The file is known by its whole path, so the proof can be continued from elsewhere.
    monkeypatch.chdir("/")
    again = esper(capsys, "prove", "--resume", "--json", "--out", str(tmp_path / "proof"))
    assert json.loads(again.out) == found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("wait", "wait", "--out", "x"), "two arms are called 'wait'"),
        (("nobody", "--out", "x"), "there is no arm 'nobody'"),
        (("wait", "schedule:none.json", *TINY, "--out", "x"), "there is no such schedule file"),
        (("wait", "--seeds", "1", "--out", "x"), "seeds must be at least 2"),
        (("wait", "--split", "claim", "--family", "image16_family", "--out", "x"), "at most twice"),
        (("wait", "--open-claim", "1", "--out", "x"), "--open-claim is for --split claim"),
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
    assert words in esper(capsys, "prove", *arguments).complaint()


def test_members_and_arms_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "prove", "--list")
    assert "digits plain 3x2" in said.out
    assert "contextual" in said.out
    claim = ("--family", "image16_family", "--split", "claim", "--open-claim", "1")
    listed = esper(capsys, "prove", "--list", "--json", *claim)
    assert len(json.loads(listed.out)["members"]) == 24


def test_help_teaches_the_arms(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "prove", "--help")
    for words in ("periodic:every=10", "scratch:ARM", "NAME=SPEC", "--resume"):
        assert words in said.out


def test_what_is_trained_from_scratch_is_an_arm_even_where_a_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    arms = ("mine=heuristic", "wait", "scratch:mine", "again=scratch:mine")
    said = esper(capsys, "prove", *arms, "--members", "none such", "--out", "proof")
    assert "none such" in said.complaint()


def test_claim_members_are_drawn_by_the_weights_of_the_first_arm(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_policy(tmp_path / "policy", new_policy(seed=1))
    asked = ("--family", "depth_small", "--split", "claim", "--open-claim", "1", "--list", "--json")
    said = esper(capsys, "prove", str(tmp_path / "policy"), "wait", *asked)
    (file,) = (tmp_path / "policy").glob("*.safetensors")
    key = hashlib.sha256(file.read_bytes()).hexdigest()
    drawn = get_family("depth_small").drawn_claim(key)
    assert json.loads(said.out)["members"] == [member.label for member in drawn]
    assert "put a learned policy first" in esper(capsys, "prove", "wait", *asked).complaint()


def test_a_family_may_ask_for_both_tests_and_for_rules_by_descriptors() -> None:
    for family, asks in (("depth_small", True), ("digits_family", False)):
        asked = ["prove", "wait", "random", "--family", family]
        parser = build_parser(asked)
        config = make(parser.parse_args(asked))
        assert config.wilcoxon is asks
        assert ("contextual" in config.reported) is not asks
        changed = [*asked, "--set", f"wilcoxon={'false' if asks else 'true'}"]
        assert make(parser.parse_args(changed)).wilcoxon is not asks
