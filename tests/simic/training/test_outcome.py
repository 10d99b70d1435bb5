from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from esper.kasmina.signals import Panic
from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import SeedStage
from esper.simic.training.outcome import RoundOutcome, find_seed_events

G, B, F = int(SeedStage.GERMINATED), int(SeedStage.BLENDING), int(SeedStage.FOSSILIZED)
E, P, R = int(SeedStage.EMBARGOED), int(SeedStage.PRUNED), int(SeedStage.RESETTING)
WAIT, GERMINATE, PRUNE = (
    int(LifecycleOp.WAIT),
    int(LifecycleOp.GERMINATE),
    int(LifecycleOp.PRUNE),
)


def lanes(*rows: list[int]) -> Tensor:
    """Stages of one slot: before the first decision and after each."""
    return torch.tensor(rows).unsqueeze(-1)


def outcome(**changes: Any) -> RoundOutcome:
    """Two episodes of up to four decisions; the second ends after two by a rollback."""
    active = torch.tensor([[True] * 4, [True, True, False, False]])
    values: dict[str, Any] = {
        "round": 0,
        "tasks": ("a", "b"),
        "env_seeds": (1, 2),
        "slot_names": {"a": ("r0c0",), "b": ("r0c0",)},
        "decisions": {
            "active": active,
            "free": torch.tensor([[True, True, False, True], [True, False, True, True]]),
            "op": torch.tensor([[WAIT, GERMINATE, WAIT, PRUNE], [WAIT, WAIT, GERMINATE, WAIT]]),
            "effective_op": torch.tensor([[WAIT, GERMINATE, WAIT, PRUNE], [WAIT] * 4]),
            "reward": torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, -2.0, 0.0, 0.0]]),
            "terms": torch.tensor(
                [
                    [[1.0, 0.0], [3.0, -1.0], [3.0, 0.0], [4.0, 0.0]],
                    [[1.0, 0.0], [0.0, -2.0]] + [[0.0] * 2] * 2,
                ]
            ),
        },
        "states": {
            "val_score": torch.tensor([[1.0, 2.0, 9.0, 4.0, 5.0], [1.0, 2.0, 3.0, 99.0, 99.0]]),
            "twin_score": torch.tensor([[1.0, 1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0]]),
            "rolled_back": torch.tensor([[False] * 5, [False, False, True, False, False]]),
            "params": torch.tensor([[10, 10, 15, 15, 10], [10] * 5]),
            "host_params": torch.full((2, 5), 10),
            "flops": torch.tensor([[100, 100, 130, 130, 130], [100] * 5]),
            "host_flops": torch.full((2, 5), 100),
            "max_epochs": torch.full((2, 5), 5),
            "stage": lanes([-1, -1, G, B, E], [-1, -1, -1, G, G]),
            "blueprint": lanes([-1, -1, 3, 3, 3], [-1, -1, -1, 2, 2]),
            "contribution": torch.zeros(2, 5, 1),
        },
        "term_names": ("gain", "rent"),
        "detail_names": (),
        "recorded_rows": (),
        "recorded_decisions": {},
        "recorded_states": {},
        "obs_clamp_share": 0.0,
        "obs_clamp_features": {},
    }
    return RoundOutcome(**{**values, **changes})


def test_an_episode_ends_where_its_row_did() -> None:
    found = outcome()
    assert found.lengths.tolist() == [4, 2]
    assert found.env_steps == 6
    assert found.final_scores.tolist() == [5.0, 3.0]
    assert found.twin_scores.tolist() == [2.0, 1.0]
    assert found.gains.tolist() == [3.0, 2.0]
    assert found.gain_mean == 2.5
    assert found.rolled_back.tolist() == [False, True]
    assert found.running_best.tolist() == [9.0, 3.0]


def test_returns_are_sums_of_raw_rewards() -> None:
    found = outcome(reward_units=torch.tensor([2.0, 2.0]))
    assert found.returns.tolist() == [10.0, -1.0]
    assert found.normalized_returns.tolist() == [5.0, -0.5]
    assert (found.return_mean, found.return_std) == (4.5, 5.5)


def test_without_twins_there_is_no_gain() -> None:
    states = {**outcome().states, "twin_score": torch.full((2, 5), torch.nan)}
    assert outcome(states=states).gain_mean is None


def test_ops_are_counted_where_rows_still_ran() -> None:
    found = outcome()
    assert found.op_counts()["WAIT"] == 4
    assert found.op_counts()["GERMINATE"] == 1
    assert [row["WAIT"] for row in found.op_counts_by_row()] == [2, 2]
    # Free and running: three of the first row, one of the second; two of these waited.
    assert found.wait_share_free == 2 / 4
    # An op whose gate was not met changed nothing either.
    found.decisions["effective_op"] = torch.zeros_like(found.decisions["op"])
    assert found.idle_share_free == 1
    assert found.reward_by_op()["WAIT"] == {"n": 4, "mean": pytest.approx(3 / 4)}


def test_terms_have_their_shares_of_the_absolute_reward() -> None:
    table = outcome().term_table()
    assert table["gain"]["share"] == pytest.approx(12 / 15)
    assert table["rent"] == {"mean": pytest.approx(-3 / 6), "share": pytest.approx(3 / 15)}


def test_terms_of_an_episode_add_up_to_its_return() -> None:
    sums = outcome().term_sums()
    assert [sorted(row) for row in sums] == [["gain", "rent"]] * 2
    for row, terms in zip(sums, outcome().decisions["terms"], strict=True):
        assert sum(row.values()) == pytest.approx(float(terms.sum()))


def test_a_rollback_has_a_reason_where_the_rows_say_one() -> None:
    assert outcome().rollback_reasons == [None, None]
    panic = torch.zeros((2, 5), dtype=torch.int64)
    panic[1, 2] = int(Panic.LOBOTOMY)
    found = outcome(states={**outcome().states, "panic": panic})
    assert found.rollback_reasons == [None, "lobotomy"]


def test_fates_are_read_off_the_stages() -> None:
    found = outcome()
    names = ["noop", "one", "two", "three"]
    assert found.blueprint_fates(names) == {
        "three": {"germinated": 1, "fossilized": 0, "pruned": 1}
    }
    # What happens in a row after its end does not count: 'two' is not there.


@pytest.mark.parametrize(
    ("stages", "germinated", "fossilized", "pruned"),
    [
        ([-1, G, B, B, F, F], [0], [3], []),
        ([-1, G, P, E, R, -1], [0], [], [1]),
        ([-1, G, E, R, -1, G], [0, 4], [], [1]),
        ([-1, P, E, R, -1, -1], [0], [], [0]),
        ([-1, -1, -1, -1, -1, -1], [], [], []),
    ],
)
def test_every_way_a_seed_can_go(
    stages: list[int], germinated: list[int], fossilized: list[int], pruned: list[int]
) -> None:
    active = torch.ones(1, 5, dtype=torch.bool)
    found = find_seed_events(lanes(stages), lanes([max(stage, -1) for stage in stages]), active)
    steps = {
        name: getattr(found, name)[0, :, 0].nonzero().flatten().tolist()
        for name in ("germinated", "fossilized", "pruned")
    }
    assert steps == {"germinated": germinated, "fossilized": fossilized, "pruned": pruned}


def test_the_early_seed_that_became_a_fossil_is_the_last_of_its_slot() -> None:
    # Horizon of ten decisions: early is before the sixth. Two seeds in one slot, the second early
    # and fossilized; in another row the fossil germinated too late to count.
    stages = lanes(
        [-1, G, E, -1, G, B, B, F, F, F, F],
        [-1, -1, -1, -1, -1, -1, -1, G, B, B, F],
    )
    states = {
        **outcome().states,
        "stage": stages,
        "blueprint": torch.where(stages >= 0, 1, -1),
        "max_epochs": torch.full((2, 11), 11),
    }
    active = torch.ones(2, 10, dtype=torch.bool)
    found = outcome(states=states, decisions={**outcome().decisions, "active": active})
    assert found.early_seeds.tolist() == [[2, 1], [0, 0]]
    assert found.fossilization_rate == 0.5


def test_a_calm_end_is_stable() -> None:
    steady = torch.full((2, 4), 0.25)
    decisions = {**outcome().decisions, "reward": steady}
    assert outcome(decisions=decisions).stability.tolist() == [1.0, 1.0]
    assert float(outcome().stability[0]) == pytest.approx(1 / (1 + 1.25))


def test_added_operations_are_relative_to_the_host_and_imagined_hosts_have_none() -> None:
    assert outcome().added_flops.tolist() == pytest.approx([0.3, 0.0])
    states = outcome().states
    nothing = {name: torch.zeros(2, 5, dtype=torch.int64) for name in ("flops", "host_flops")}
    assert outcome(states={**states, **nothing}).added_flops.tolist() == [0.0, 0.0]
