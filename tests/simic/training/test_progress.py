from __future__ import annotations

import dataclasses

import pytest
import torch

from esper.leyline.actions import LifecycleOp
from esper.simic.agent.config import ExplorationConfig
from esper.simic.agent.losses import PAID_OFF_TARGET
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.progress import Progress, Tally
from tests.simic.training.test_outcome import outcome
from tests.simic.training.test_vectorized_trainer import make_trainer


def step(phase: str, number: int, round_number: int = 2) -> Progress:
    return Progress(
        phase=phase,  # type: ignore[arg-type]
        round=round_number,
        rounds=4,
        step=number,
        steps=10,
        env_steps=0,
        active=1,
        seconds=0.1,
    )


def test_the_share_done_counts_steps_within_the_round() -> None:
    assert step("rollout", 5).done_share == 2.5 / 4
    assert step("twins", 5).done_share == 2 / 4


def test_a_report_speaks_for_its_round() -> None:
    (report,) = make_trainer(rounds=1).run()
    assert report.seconds == sum(report.timings.values())
    assert set(report.timings) == {
        *("twins", "population", "policy", "reward", "update", "evaluation")
    }
    assert report.approx_kl is not None
    assert len(report.conditional_entropies) == 8


NAMES = ("a", "b", "c", "d")


def make_tally() -> Tally:
    return Tally(ExplorationConfig().patience, NAMES)


def played(number: int, *returns: float, has_twins: bool = False) -> RoundOutcome:
    """Return a round whose two episodes return this."""
    like = outcome()
    reward = torch.zeros_like(like.decisions["reward"])
    reward[:, 0] = torch.tensor(returns)
    states = dict(like.states)
    if not has_twins:
        states["twin_score"] = torch.full_like(states["twin_score"], torch.nan)
    return outcome(round=number, decisions={**like.decisions, "reward": reward}, states=states)


def test_nothing_is_known_before_the_first_round() -> None:
    tally = make_tally()
    assert tally.score_rolling is tally.merit_rolling is None
    assert (tally.env_steps, tally.paid_off, tally.fates) == (0, 0.0, {})


def test_what_pays_off_is_the_first_round_and_then_follows_slowly() -> None:
    tally = make_tally()
    tally.add(played(0, 1.0, -1.0))
    assert tally.paid_off == 0.5
    tally.add(played(1, 1.0, 2.0))
    assert tally.paid_off == pytest.approx(0.9 * 0.5 + 0.1)
    tally.add(played(2, 0.0, 0.0))
    assert tally.paid_off == pytest.approx(0.9 * 0.55)


def test_a_return_without_a_gain_is_no_success() -> None:
    """The documents' smoke run: every network level with its twin, every return above 0."""
    level = played(0, 0.97, 1.44, has_twins=True)
    scores = level.states["val_score"]
    for ahead, share in (([0.0, 0.0], 0.0), ([0.5, 0.0], 0.5), ([-1.0, 0.5], 0.5)):
        twins = scores - torch.tensor(ahead).unsqueeze(1)
        tally = make_tally()
        tally.add(dataclasses.replace(level, states={**level.states, "twin_score": twins}))
        assert tally.paid_off == share


def of_tasks(number: int, returns: dict[str, float], rows: int = 8) -> RoundOutcome:
    """Return a round in which every row acts; all rows of a task return the same."""
    tasks = [name for name in returns for _ in range(rows)]
    reward = torch.tensor([[returns[name]] for name in tasks])
    like = outcome()
    return dataclasses.replace(
        like,
        round=number,
        tasks=tasks,
        env_seeds=list(range(len(tasks))),
        decisions={
            "reward": reward,
            "active": torch.ones_like(reward, dtype=torch.bool),
            "effective_op": torch.full(reward.shape, int(LifecycleOp.ADVANCE)),
        },
        states={
            name: values[:1, :2].expand(len(tasks), *values[:1, :2].shape[1:]).clone()
            for name, values in like.states.items()
        },
    )


def test_what_pays_on_one_task_ends_no_curiosity_on_another() -> None:
    tally = make_tally()
    tally.add(of_tasks(0, {"easy": 1.0, "hard": -1.0}))
    easy, hard = tally.settled(["easy", "hard"]).tolist()
    assert easy == 1.0
    assert hard < 0.1
    assert tally.settled(["unknown"]).tolist() == [0.0]


def test_where_waiting_is_right_curiosity_ends_too() -> None:
    """Soon, where the policy succeeds on other tasks; late, where it may only lack skill."""
    target = PAID_OFF_TARGET

    def rounds_to_settle(returns: dict[str, float]) -> int:
        tally = make_tally()
        for number in range(5_000):
            tally.add(of_tasks(number, returns))
            if float(tally.settled(["bad"])[0]) >= target:
                return number
        return 5_000

    skilled, unskilled = (
        rounds_to_settle({"good": 1.0, "bad": -1.0}),
        rounds_to_settle({"bad": -1.0}),
    )
    assert skilled == pytest.approx(128 / 8, abs=2)
    assert unskilled == pytest.approx(16384 / 8, abs=2)


def test_a_round_that_pays_takes_doubt_back() -> None:
    tally = make_tally()
    for number in range(14):
        tally.add(of_tasks(number, {"good": 1.0, "late": -1.0}))
    assert float(tally.settled(["late"])[0]) > 0.2
    tally.add(of_tasks(14, {"good": 1.0, "late": 0.2}))
    assert float(tally.settled(["late"])[0]) < 0.15


def test_half_of_the_evidence_changes_nothing() -> None:
    """Unskilled, a policy has time to find what pays, all of its curiosity left."""
    tally = make_tally()
    for number in range(16384 // 8 // 2 - 1):
        tally.add(of_tasks(number, {"trap": -1.0}))
    assert tally.settled(["trap"]).tolist() == [0.0]


def test_a_task_that_only_waits_is_not_doubted_further() -> None:
    tally = make_tally()
    waits = of_tasks(0, {"bad": 0.0})
    waits = dataclasses.replace(
        waits,
        decisions={**waits.decisions, "effective_op": torch.zeros_like(waits.decisions["reward"])},
    )
    tally.add(waits)
    assert tally.settled(["bad"]).tolist() == [0.0]


def test_decisions_and_fates_are_counted_over_all_rounds() -> None:
    tally = make_tally()
    for number in range(3):
        tally.add(played(number, 0.0, 0.0))
    assert tally.env_steps == 3 * 6
    assert tally.fates == {"d": {"germinated": 3, "fossilized": 0, "pruned": 3}}


def test_merits_are_averaged_over_ten_rounds() -> None:
    tally = make_tally()
    merits = [float(number % 7) for number in range(12)] + [20.0, -50.0, 40.0, 80.0]
    for number, merit in enumerate(merits):
        tally.add(played(number, merit, merit))
        recent = merits[max(0, number - 9) : number + 1]
        assert tally.merit_rolling == pytest.approx(sum(recent) / len(recent))


def test_the_best_policy_is_the_one_that_was_judged_best() -> None:
    tally = make_tally()
    merits = [None, None, 0.5, None, 0.2, None, 0.5, 0.9, None, 0.6]
    found = [tally.judge(merit) for merit in merits]
    # The newest until one is judged, and of equals.
    assert found == [True, True, True, False, False, False, True, True, False, False]
    other = make_tally()
    other.load_state_dict(tally.state_dict())
    assert [other.judge(0.8), other.judge(1.0)] == [False, True]


def test_a_merit_is_the_gain_where_there_is_a_twin() -> None:
    with_twins, without = played(0, 7.0, 7.0, has_twins=True), played(0, 7.0, 7.0)
    assert with_twins.gain_mean not in (None, 7.0)
    for each, merit in ((with_twins, with_twins.gain_mean), (without, 7.0)):
        tally = make_tally()
        tally.add(each)
        assert tally.merit_rolling == merit


def test_scores_are_averaged_over_the_last_rounds() -> None:
    tally = make_tally()
    tally.add(played(0, 0.0, 0.0))
    assert tally.score_rolling == pytest.approx((5.0 + 3.0) / 2)


@pytest.mark.parametrize("stop", [0, 4, 11])
def test_a_tally_goes_on_from_its_state(stop: int) -> None:
    rounds = [played(number, float(number % 5), -1.0) for number in range(14)]
    whole, other = make_tally(), make_tally()
    for each in rounds[:stop]:
        whole.add(each)
    # What a whole run saves has more in it.
    state = {**whole.state_dict(), "round": stop}
    other.load_state_dict(state)
    assert [whole.add(each) for each in rounds[stop:]] == [
        other.add(each) for each in rounds[stop:]
    ]
    assert other.state_dict() == whole.state_dict()


def test_a_state_does_not_change_afterwards() -> None:
    tally = make_tally()
    tally.add(played(0, 1.0, 1.0))
    state = tally.state_dict()
    tally.add(played(1, 1.0, 1.0))
    assert state["merits"] == [1.0]
    assert state["fates"]["d"]["germinated"] == 1
