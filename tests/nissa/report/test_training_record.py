from __future__ import annotations

from pathlib import Path

from esper.leyline.actions import HEAD_NAMES
from esper.nissa import open_run, open_store
from esper.nissa.report.training import read_training
from esper.nissa.schema import DecisionRow
from tests.nissa.report.training_runs import LENGTH, train_row, write_training


def test_a_run_is_read_back(tmp_path: Path) -> None:
    write_training(tmp_path / "run", rounds=5)
    with open_run(tmp_path / "run") as run:
        record = read_training(run)
    assert [row.round for row in record.rounds] == [0, 1, 2, 3, 4]
    assert [(row.round, row.ordinal) for row in record.updates] == [(n, 1) for n in range(5)]
    assert next(iter(record.heads)) == "op"
    assert set(record.heads) == set(HEAD_NAMES)
    assert {(row.round, row.ordinal) for row in record.heads.values()} == {(4, 1)}
    assert [row[0] for row in record.points["rounds"]["rows"]] == [0, 1, 2, 3, 4]
    assert [event.kind for event in record.events] == ["settings_changed"]


def test_the_best_the_middle_and_the_worst_episode_of_the_latest_round_are_shown(
    tmp_path: Path,
) -> None:
    write_training(tmp_path / "run", rounds=5)
    with open_run(tmp_path / "run") as run:
        shown = read_training(run).episodes
    returns = [one.episode.episodic_return or 0.0 for one in shown]
    assert returns == sorted(returns, reverse=True)
    assert {one.episode.round for one in shown} == {4}
    assert [len(one.decisions) for one in shown] == [LENGTH] * 3


def test_an_episode_without_an_end_is_shown_too(tmp_path: Path) -> None:
    with open_store(tmp_path / "run", train_row(), sinks=(), watch=False) as store:
        store.write(DecisionRow(round=2, row=3, step=1, op="WAIT"))
    with open_run(tmp_path / "run") as run:
        shown = read_training(run).episodes
    assert [(one.episode.round, one.episode.row, len(one.decisions)) for one in shown] == [
        (2, 3, 1)
    ]
