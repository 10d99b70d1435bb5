from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.nissa.reader import StoredRun, open_run
from esper.simic.rewards import RewardConfig
from esper.simic.training.progress import RoundReport
from esper.simic.training.recorded import start_training
from tests.simic.training.tiny import tiny_config


class Recorded:
    """A tiny run with its reports and its store."""

    def __init__(self, folder: Path) -> None:
        self.reports: list[RoundReport] = []
        with start_training(folder, tiny_config(), sinks=()) as run:
            run.carry_out(lambda progress: self._keep(progress.report))
            run.finish()
            self.blueprints = run.trainer.policy.blueprint_names
        self.store: StoredRun = open_run(folder)

    def _keep(self, report: RoundReport | None) -> None:
        if report is not None:
            self.reports.append(report)

    def rows(self, table: str, **key: Any) -> list[Any]:
        return [
            row
            for row in self.store.records(table)
            if all(getattr(row, name) == value for name, value in key.items())
        ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    recorded = Recorded(tmp_path_factory.mktemp("runs") / "run")
    with recorded.store:
        yield recorded


def test_a_round_is_told_as_it_was(recorded: Recorded) -> None:
    (row,), report = recorded.rows("rounds", round=1), recorded.reports[1]
    outcome = report.outcome
    assert row.return_mean == pytest.approx(report.return_mean)
    assert row.gain_mean == pytest.approx(report.gain_mean)
    assert row.episodes == 4
    assert row.env_steps == 72
    assert row.op_counts == outcome.op_counts()
    assert sum(row.op_counts.values()) == 36
    assert row.free_steps + round(row.forced_share * 36) == 36
    assert row.seeds_germinated == int(outcome.seeds.germinated.sum())
    assert row.reward_terms.keys() == set(outcome.term_names)
    assert sum(term["share"] for term in row.reward_terms.values()) == pytest.approx(1.0)
    counts = {op: part["n"] for op, part in row.reward_by_op.items()}
    assert counts == {op: n for op, n in row.op_counts.items() if n}
    assert row.return_p05 <= row.return_p50 <= row.return_p95
    assert 0.0 <= row.obs_clamp_share <= 1.0
    assert row.update_seconds > 0
    assert row.twin_seconds > 0


def test_fates_are_counted_from_the_start(recorded: Recorded) -> None:
    first, second = recorded.rows("rounds")

    def germinated(row: Any) -> int:
        return sum(fate["germinated"] for fate in row.blueprint_fates.values())

    assert germinated(first) == first.seeds_germinated
    assert germinated(second) == first.seeds_germinated + second.seeds_germinated


def test_the_end_tells_what_networks_and_their_twins_scored(recorded: Recorded) -> None:
    (row,), report = recorded.rows("runs"), recorded.reports[-1]
    assert row.val_score == pytest.approx(report.score_rolling)
    twins = [float(each.outcome.twin_scores.mean()) for each in recorded.reports]
    assert row.twin_val_score == pytest.approx(sum(twins) / len(twins))


def test_the_end_tells_nothing_of_twins_that_were_not_there(tmp_path: Path) -> None:
    config = tiny_config(rounds=1, episode_length=3, reward=RewardConfig(mode="shaped"))
    with start_training(tmp_path / "run", config, sinks=()) as run:
        run.carry_out()
        run.finish()
    with open_run(tmp_path / "run") as store:
        (row,) = store.records("runs")
    assert row.val_score is not None
    assert row.twin_val_score is None


def test_every_row_leaves_its_episode(recorded: Recorded) -> None:
    outcome = recorded.reports[0].outcome
    rows = recorded.rows("episodes", round=0)
    assert [row.row for row in rows] == [0, 1, 2, 3]
    assert [row.env_seed for row in rows] == list(outcome.env_seeds)
    assert [row.episodic_return for row in rows] == pytest.approx(outcome.returns.tolist())
    assert [row.gain for row in rows] == pytest.approx(outcome.gains.tolist())
    assert [row.length for row in rows] == [10] * 4
    assert sum(row.seeds_pruned for row in rows) == int(outcome.seeds.pruned.sum())
    assert all(row.task == "tiny_digits" for row in rows)


def test_the_reward_is_the_sum_of_its_recorded_terms(recorded: Recorded) -> None:
    rows = recorded.rows("decisions")
    assert len(rows) == 2 * 2 * 9
    for row in rows:
        assert {"gain", "rent", "terminal", "rollback"} == set(row.reward_terms)
        assert row.reward == pytest.approx(sum(row.reward_terms.values()), abs=1e-5)
    per_episode = {(row.round, row.row): row.episodic_return for row in recorded.rows("episodes")}
    for key in {(row.round, row.row) for row in rows}:
        total = sum(row.reward for row in rows if (row.round, row.row) == key)
        assert total == pytest.approx(per_episode[key], abs=1e-4)


def test_a_decision_names_what_it_used_and_nothing_else(recorded: Recorded) -> None:
    rows = recorded.rows("decisions")
    seen = {row.op for row in rows}
    assert {"WAIT", "GERMINATE"} <= seen
    for row in rows:
        assert (row.slot is None) == (row.op == "WAIT")
        assert (row.blueprint is None) == (row.op != "GERMINATE")
        assert (row.tempo is None) == (row.op != "GERMINATE")
        assert row.slot in (None, "r0c0", "r0c1")
        assert 0.0 < row.confidence_op <= 1.0
        assert row.valid_op >= 1
        assert row.forced == (row.valid_op == 1)
        assert row.effective_op == (row.op if row.took_effect else "WAIT")
        assert set(row.alternatives) <= {"op", "slot", "blueprint", "style", "tempo"} | {
            "alpha_target",
            "alpha_speed",
            "alpha_curve",
        }
        assert "op" in row.alternatives
        others = [choice for choice, _ in row.alternatives["op"]]
        assert row.op not in others


def test_epochs_begin_with_the_one_before_the_first_decision(recorded: Recorded) -> None:
    rows = recorded.rows("epochs", round=0, row=0)
    assert [row.step for row in rows] == list(range(1, 11))
    scores = recorded.reports[0].outcome.states["val_score"][0]
    assert [row.val_score for row in rows] == pytest.approx(scores.tolist())
    assert all(row.twin_score is not None for row in rows)


def test_the_swim_lanes_follow_the_decisions(recorded: Recorded) -> None:
    germinations = [
        row for row in recorded.rows("decisions") if row.op == "GERMINATE" and row.took_effect
    ]
    assert germinations
    for decision in germinations:
        lane = recorded.rows(
            "seed_stages",
            round=decision.round,
            row=decision.row,
            step=decision.step + 1,
            slot=decision.slot,
        )
        assert len(lane) == 1
        assert lane[0].blueprint == decision.blueprint
        assert lane[0].entered
        assert lane[0].age == 1
        # What the score did since the decision, which stands at the end of its epoch.
        (before, after) = (
            recorded.rows("epochs", round=decision.round, row=decision.row, step=step)[0]
            for step in (decision.step, decision.step + 1)
        )
        gained = after.val_score - before.val_score
        assert lane[0].improvement == pytest.approx(gained, abs=1e-4)


def test_every_seed_has_one_life(recorded: Recorded) -> None:
    decisions = recorded.rows("decisions")
    seeds = recorded.rows("seeds")
    born = [row for row in decisions if row.op == "GERMINATE" and row.took_effect]
    assert len(seeds) == len(born)
    for decision in born:
        (seed,) = [
            seed
            for seed in seeds
            if (seed.round, seed.row, seed.slot, seed.germinated)
            == (decision.round, decision.row, decision.slot, decision.step)
        ]
        assert seed.blueprint == decision.blueprint
        assert seed.parameters > 0
        assert (seed.ended is None) == (seed.fate not in ("fossilized", "pruned"))
    fossils = [row for row in decisions if row.op == "FOSSILIZE" and row.took_effect]
    assert sum(seed.fate == "fossilized" for seed in seeds) == len(fossils)


def test_contributions_are_those_of_the_epoch(recorded: Recorded) -> None:
    rows = recorded.rows("contributions")
    lanes = {
        (lane.round, lane.row, lane.step, lane.slot): lane for lane in recorded.rows("seed_stages")
    }
    assert rows
    for row in rows:
        lane = lanes[row.round, row.row, row.step, row.slot]
        assert lane.contribution == pytest.approx(row.value)
        assert lane.stage in ("BLENDING", "HOLDING", "FOSSILIZED")


def test_updates_are_written_with_their_heads(recorded: Recorded) -> None:
    assert len(recorded.rows("updates")) == sum(
        len(report.update.updates) for report in recorded.reports
    )
    heads = recorded.rows("update_heads", round=0, ordinal=0)
    assert len(heads) == 8


def test_values_are_on_the_scale_of_rewards(recorded: Recorded) -> None:
    values = torch.tensor([row.value for row in recorded.rows("decisions")])
    assert values.isfinite().all()
    assert float(values.abs().max()) < 100.0


def test_a_recorded_row_tells_when_its_host_settled(recorded: Recorded) -> None:
    """The tiny hosts settle in most episodes; one that does not has no event."""
    settled: dict[tuple[int, int], int] = {}
    for epoch in recorded.rows("epochs", stabilized=True):
        settled.setdefault((epoch.round, epoch.row), epoch.step)
    events = recorded.rows("events", kind="tamiyo_initiated")
    assert settled
    assert {(event.round, event.row): event.step for event in events} == settled
    assert len(events) == len(settled)
