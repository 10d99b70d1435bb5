from __future__ import annotations

import pytest
import torch

from esper.lab.proof.arm import ControllerArm, ScheduleArm, StaticArm, heuristic_arm, waiting
from esper.lab.proof.play import Cell, Player, Progress, make_chunks
from esper.lab.proof.results import CellResult
from esper.lab.tasks.member import GivenMember
from esper.leyline.errors import UsageError
from esper.simic.training.episodes import live_episodes
from esper.tamiyo.controllers import WaitController
from tests.lab.proof.small import member, play_config

GROW = ScheduleArm(
    "grow",
    lambda member: (
        {"epoch": 0, "op": "grow", "slot": "100%", "blueprint": "conv_heavy", "tempo": 3},
    ),
)
NARROW, FEW = member(2), member(3, 200)


def play(cells: list[Cell], **changes: object) -> dict[tuple[str, str], CellResult]:
    player = Player(play_config(**changes))
    results = [result for chunk in player.play(cells) for result in chunk]
    return {(result.arm, result.member): result for result in results}


def cell(arm: object, own: object = NARROW, seeds: int = 2) -> Cell:
    return Cell("proof", arm, own, tuple(range(5, 5 + seeds)))


def test_a_cell_is_the_same_in_any_company() -> None:
    arms = [waiting(), GROW, ControllerArm("random", "random"), ControllerArm("clock", "periodic")]
    together = play([cell(arm, own) for own in (NARROW, FEW) for arm in arms])
    alone = play([cell(arms[2], FEW)])
    assert alone["random", FEW.label] == together["random", FEW.label]
    # Another order and other parts.
    parts = play([cell(arm, own) for arm in reversed(arms) for own in (NARROW, FEW)], rows=3)
    assert parts == together


def test_what_is_written_down_of_a_network() -> None:
    found = play([cell(waiting()), cell(GROW)])
    waited, grown = found["wait", NARROW.label], found["grow", NARROW.label]
    task = NARROW.task()
    assert waited.parameters == [task.host_parameters] * 2
    assert waited.flops == [task.host_flops] * 2
    assert waited.ablation_flops == [0.0, 0.0]
    assert waited.grown == [[], []]
    assert waited.training_flops == [3.0 * 64 * 12 * task.host_flops] * 2
    assert grown.germinated == [1, 1]
    assert grown.fossilized == [1, 1]
    assert [seed["blueprint"] for seed in grown.grown[0]] == ["conv_heavy"]
    assert grown.grown[0][0]["slot"] == "r0c1"
    assert all(p > task.host_parameters for p in grown.parameters)
    assert all(total > 0 for total in grown.ablation_flops)
    assert grown.training_flops[0] > waited.training_flops[0]
    for each in (waited, grown):
        errors = [1 - score / 100 for score in each.test_scores]
        assert each.test_errors == pytest.approx(errors)


def test_the_limits_hold_for_every_arm() -> None:
    arms = [GROW, ControllerArm("random", "random"), ControllerArm("clock", "periodic:every=2")]
    found = play([cell(arm) for arm in arms], param_limit=1.3, flop_limit=1.3)
    for result in found.values():
        assert max(result.parameters) <= 1.3 * result.host_parameters
        assert max(result.flops) <= 1.3 * result.host_flops
    assert found["grow", NARROW.label].germinated == [0, 0]


def test_a_static_arm_is_wider_and_reported_beside_the_members_own_host() -> None:
    arm = StaticArm("static x2", 2.0, {NARROW.label: 0.1})
    result = play([cell(arm)])["static x2", NARROW.label]
    assert result.host_parameters == NARROW.task().host_parameters
    assert result.parameters[0] > 1.5 * result.host_parameters


def test_settings_of_the_heuristic_reach_it() -> None:
    eager = {"min_epoch": 1, "plateau_epochs": 0, "rotation": ["norm"]}
    found = play([cell(heuristic_arm("eager", eager), seeds=1)], horizon=25)
    own = found["eager", NARROW.label]
    assert own.germinated[0] >= 1
    assert {seed["blueprint"] for row in own.grown for seed in row} <= {"norm"}


def whole_validation() -> GivenMember:
    """Return a member that is validated on all samples, so that scores can be compared."""
    task = member(4, 100, horizon=10).task()
    config = task.config.replace(validation_samples=10_000, learning_rate=0.4)
    return GivenMember("whole validation", type(task)(config))


def test_the_network_of_the_best_epoch_is_scored_if_asked_for() -> None:
    own = cell(waiting(), whole_validation(), seeds=4)
    player = Player(play_config(keep="best"))
    stage = player.prepare([own])
    moments = list(live_episodes(stage.population, WaitController(), stage.seeds))
    curves = torch.stack([moment.signals.val_score for moment in moments], 1)
    player.close()
    best, last = (play([own], keep=keep)["wait", own.member.label] for keep in ("best", "last"))
    assert best.scored_epochs == (curves.argmax(1) + 1).tolist()
    assert last.scored_epochs == [10] * 4
    assert best.val_scores == pytest.approx(curves.amax(1).tolist())
    assert last.val_scores == pytest.approx(curves[:, -1].tolist())
    for result in (best, last):
        assert result.curves == [pytest.approx(each, abs=1e-4) for each in curves.tolist()]
    # The case is one in which this makes a difference, for the test split as well.
    assert best.val_scores != last.val_scores
    assert best.test_scores != last.test_scores
    assert best.training_flops == last.training_flops


def test_what_is_written_down_is_the_network_of_the_best_epoch() -> None:
    # It grows after its best epoch: then nothing has grown in what is scored.
    late = ScheduleArm(
        "late",
        lambda member: ({"epoch": 8, "op": "germinate", "slot": 1, "blueprint": "norm"},),
    )
    own = [cell(late, whole_validation(), seeds=8)]
    best, last = (play(own, keep=keep)["late", own[0].member.label] for keep in ("best", "last"))
    sizes = {True: own[0].member.task().host_parameters, False: last.parameters[0]}
    early = [epoch <= 8 for epoch in best.scored_epochs]
    assert set(early) == {True, False}
    assert best.parameters == [sizes[each] for each in early]
    assert best.germinated == last.germinated == [1] * 8
    assert best.germinated_at == last.germinated_at == [[9]] * 8


def test_a_row_is_the_same_in_any_company_also_at_its_best_epoch() -> None:
    cells = [cell(arm, own) for own in (NARROW, FEW) for arm in (waiting(), GROW)]
    together = play(cells, keep="best")
    assert play(cells[::-1], keep="best", rows=3) == together
    assert play(cells, keep="best", strategy="stacked").keys() == together.keys()


def test_chunks_have_no_more_rows_than_asked_for() -> None:
    cells = [cell(waiting(), seeds=seeds) for seeds in (3, 3, 1, 8, 2)]
    chunks = make_chunks(cells, 6)
    assert [[len(each.seeds) for each in chunk] for chunk in chunks] == [[3, 3], [1], [8], [2]]


def test_members_of_different_horizons_live_side_by_side() -> None:
    short, long = member(2, horizon=4), GivenMember("long", member(2, horizon=7).task())
    seen: list[Progress] = []
    player = Player(play_config(), seen.append)
    cells = [cell(arm, own) for own in (short, long) for arm in (waiting(), GROW)]
    (results,) = player.play(cells)
    alone = [result for each in cells for result in next(Player(play_config()).play([each]))]
    assert results == alone
    assert seen[-1].done == seen[-1].total == 2 * 2 * (4 + 7)
    waited = [result for result in results if result.arm == "wait"]
    assert waited[0].training_flops[0] * 7 == waited[1].training_flops[0] * 4
    grown = [result for result in results if result.arm == "grow"]
    assert grown[0].germinated == grown[1].germinated == [1, 1]


def test_progress_ends_at_the_total_and_a_stop_gives_the_chunk_up() -> None:
    seen: list[Progress] = []
    player = Player(play_config(rows=2, horizon=3), seen.append)
    assert len(list(player.play([cell(waiting()), cell(GROW)]))) == 2
    assert seen[-1].done == seen[-1].total == 12
    assert seen[-1].left_s == 0
    assert seen[0].left_s is not None
    assert "part 1 of 2, 2 networks, epoch 1" in seen[0].text
    stopped = Player(play_config(horizon=3), is_stopped=lambda: True)
    assert list(stopped.play([cell(waiting())])) == []


def test_a_device_is_asked_for_only_where_there_is_something_to_play(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    player = Player(play_config(device="cuda"))
    assert list(player.play([])) == []
    with pytest.raises(UsageError, match="no CUDA device"):
        next(player.play([cell(waiting())]))


def test_a_wrong_schedule_names_its_arm() -> None:
    wrong = ScheduleArm("wrong", lambda member: ({"epoch": 0, "op": "sow", "slot": 0},))
    with pytest.raises(UsageError, match=r"arm 'wrong' on .*: entry 1: field 'op'"):
        play([cell(wrong)])
