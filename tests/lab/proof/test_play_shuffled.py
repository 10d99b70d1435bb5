"""Arms whose rows see each other: they are played as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.lab.proof.arm import ControllerArm, ShuffledArm, parse_arm, waiting
from esper.lab.proof.play import Cell, Player, make_chunks
from esper.lab.proof.prove import Proof, ProveConfig, make_arm
from esper.lab.proof.results import CellResult, ResultFile
from esper.leyline.errors import UsageError
from esper.tamiyo.controllers.policy_file import new_policy, save_policy
from esper.tamiyo.networks.config import PolicyConfig
from tests.lab.proof.small import member, play_config

MEMBERS = tuple(member(width, size, horizon=8) for width, size in ((2, None), (3, 50), (4, 100)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = PolicyConfig(
        lstm_hidden_dim=16, layout="ratios", policy_gain=1.0, initial_op_bias=(0.0,) * 6
    )
    path = tmp_path_factory.mktemp("policy") / "policy"
    save_policy(path, new_policy(config, seed=1))
    return str(path)


def cells(folder: str) -> list[Cell]:
    arms = [waiting(), ShuffledArm("shuffled", folder), ControllerArm("own", f"greedy:{folder}")]
    return [Cell("proof", arm, each, (5, 6)) for each in MEMBERS for arm in arms]


def play(own: list[Cell], **changes: object) -> dict[tuple[str, str], CellResult]:
    chunks = Player(play_config(**changes)).play(own)
    return {(each.arm, each.member): each for chunk in chunks for each in chunk}


def test_its_cells_are_one_bundle_in_any_chunks(folder: str) -> None:
    chunks = make_chunks(cells(folder), 4)
    names = [[cell.arm.name for cell in chunk] for chunk in chunks]
    assert [name for name in names if "shuffled" in name] == [["shuffled"] * 3]
    whole = play(cells(folder), rows=64)
    parts = play(cells(folder)[::-1], rows=3)
    assert parts == whole
    # The policy does watch, so curves of others make a difference.
    assert any(
        whole["shuffled", each.label].grown != whole["own", each.label].grown for each in MEMBERS
    )


def test_a_part_of_it_is_played_again_as_a_whole(folder: str, tmp_path: Path) -> None:
    shuffled = cells(folder)[1::3]
    whole = play(shuffled)
    results = ResultFile(tmp_path / "results.jsonl")
    results.add([whole["shuffled", MEMBERS[0].label]])
    assert Player(play_config()).play_missing(shuffled, results)
    found = list(ResultFile(tmp_path / "results.jsonl"))
    assert {each.key: each for each in found} == {each.key: each for each in whole.values()}


def test_it_is_an_arm_of_proofs_with_several_members(folder: str, tmp_path: Path) -> None:
    assert make_arm(parse_arm(f"shuffled:{folder}")) == ShuffledArm("shuffled", folder)
    config = ProveConfig(arms=("wait", f"shuffled:{folder}"), seeds=2, play=play_config())
    with pytest.raises(UsageError, match="shows every member the curves of another one"):
        Proof(config, MEMBERS[:1], tmp_path, Player(config.play))
    with pytest.raises(UsageError, match="write shuffled:FOLDER"):
        parse_arm("shuffled")
