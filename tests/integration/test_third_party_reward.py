"""A reward of somebody else, in one file: its terms are recorded, asked for, drawn and reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.nissa import open_run
from esper.nissa.report import report_run
from esper.scripts.cli.main import main
from esper.simic.rewards import REWARDS, RewardConfig
from esper.simic.training.recorded import start_training
from tests.nissa.sinks.event_file import scalars
from tests.simic.training.tiny import tiny_config

PLUG_IN = '''
"""Pays for new best scores and for boldness."""

from typing import Any

import torch

import esper
from esper.simic.rewards.contract import RewardStep


@esper.register_reward("bold")
class BoldReward:
    needs_twin = False

    def __init__(self, config: Any) -> None:
        pass

    def reset(self, signals: Any) -> None:
        pass

    def step(self, transition: Any) -> RewardStep:
        risen = transition.after.best_score - transition.before.best_score
        acted = (transition.effective_op != 0).float()
        return RewardStep(
            terms={
                "new_record": torch.where(transition.active, risen, 0.0),
                "boldness": torch.where(transition.active, 0.5 + acted, 0.0),
            },
            details={"acted": acted},
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    exec(compile(PLUG_IN, "bold.py", "exec"), {"__name__": "bold"})
    made = tmp_path_factory.mktemp("runs") / "bold"
    try:
        with start_training(made, tiny_config(reward=RewardConfig(mode="bold"))) as run:
            run.carry_out()
        yield made
    finally:
        REWARDS.unregister("bold")


def test_its_terms_are_in_the_store(folder: Path) -> None:
    with open_run(folder) as run:
        decisions, episodes = run.rows("decisions"), run.rows("episodes")
        rounds = run.rows("rounds")
    assert decisions
    for row in decisions:
        terms = row["reward_terms"]
        assert sorted(terms) == ["boldness", "new_record"]
        assert sum(terms.values()) == pytest.approx(row["reward"], rel=1e-5, abs=1e-6)
        acted = row["effective_op"] != "WAIT"
        assert terms["boldness"] == 0.5 + acted
        assert row["reward_details"] == {"acted": float(acted)}
    for row in episodes:
        whole = sum(row["reward_terms"].values())
        assert whole == pytest.approx(row["episodic_return"], rel=1e-5, abs=1e-5)
    for row in rounds:
        assert sum(term["share"] for term in row["reward_terms"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize("view", ["decision_terms", "episode_terms", "round_terms"])
def test_they_can_be_asked_for_by_name(
    folder: Path, view: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sql = f"SELECT term, COUNT(*) AS n FROM {view} GROUP BY term ORDER BY term"
    assert main(["query", str(folder), sql, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["term"] for row in rows] == ["boldness", "new_record"]
    assert rows[0]["n"] == rows[1]["n"] > 0


def test_numbers_of_a_view_are_those_of_its_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sql = "SELECT round, mean, share FROM round_terms WHERE term = 'boldness' ORDER BY round"
    assert main(["query", str(folder), sql, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    with open_run(folder) as run:
        kept = [row["reward_terms"]["boldness"] for row in run.rows("rounds")]
    assert [(row["mean"], row["share"]) for row in found] == [
        (term["mean"], term["share"]) for term in kept
    ]


def test_they_are_curves(folder: Path) -> None:
    found = scalars(folder / "tb")
    for term in ("boldness", "new_record"):
        assert len(found[f"rewards/mean/{term}"]) == len(found[f"rewards/share/{term}"]) == 2


def test_they_are_in_the_report(folder: Path) -> None:
    page = report_run(folder).read_text(encoding="utf-8")
    terms = page[page.index("Terms of the reward") :]
    assert "<td>boldness</td>" in terms
    assert "<td>new record</td>" in terms
    decisions = page[page.index("Decisions of one episode") :]
    assert "boldness" in decisions
