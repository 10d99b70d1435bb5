from __future__ import annotations

from esper.nissa.report.training_tables import count_ops, late_rounds, render_blueprints, render_ops
from esper.nissa.schema_runs import RoundRow


def test_ops_are_added_up_and_their_rewards_weighted() -> None:
    rounds = [
        RoundRow(
            round=0,
            op_counts={"PRUNE": 1, "WAIT": 9},
            reward_by_op={"WAIT": {"n": 9, "mean": 1.0}, "PRUNE": {"n": 1, "mean": -1.0}},
        ),
        RoundRow(round=1, op_counts={"WAIT": 1}, reward_by_op={"WAIT": {"n": 1, "mean": 0.0}}),
        RoundRow(round=2, op_counts={"OWN": 2}),
    ]
    assert count_ops(rounds) == {"WAIT": (10, 0.9), "PRUNE": (1, -1.0), "OWN": (2, None)}
    table = render_ops(rounds)
    assert "<td>wait</td>" in table
    assert "0.900" in table
    assert "76.9 %" in table


def test_the_last_tenth_is_at_least_one_round() -> None:
    rounds = [RoundRow(round=number) for number in range(25)]
    assert [row.round for row in late_rounds(rounds)] == [23, 24]
    assert [row.round for row in late_rounds(rounds[:3])] == [2]


def test_seeds_that_are_neither_kept_nor_pruned_are_counted() -> None:
    # The table of the briefing of 10 January, in part.
    table = render_blueprints(
        {
            "attention": {"germinated": 85, "fossilized": 0, "pruned": 80},
            "conv_heavy": {"germinated": 182, "fossilized": 16, "pruned": 160},
        }
    )
    assert table.index("conv_heavy") < table.index("attention")
    assert "8.8 %" in table
    assert ">6<" in table
    assert ">5<" in table
