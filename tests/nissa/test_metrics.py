from __future__ import annotations

from esper.nissa.columns import TABLE_OF, TABLES
from esper.nissa.metrics import METRICS, Point, points_of
from esper.nissa.schema import (
    DecisionRow,
    EpisodeRow,
    EpochRow,
    RoundRow,
    RunRow,
    UpdateHeadRow,
    UpdateRow,
)

GROWING = RunRow(kind="grow")
TRAINING = RunRow(kind="train", rows=64)


def named(record: object, run: RunRow = TRAINING) -> dict[str, tuple[int, float]]:
    return {p.name: (p.step, p.value) for p in points_of(record, run)}  # type: ignore[arg-type]


def test_the_names_people_know() -> None:
    episode = EpisodeRow(episodic_return=1.5, length=150, env_steps=600)
    assert named(episode) == {
        "charts/episodic_return": (600, 1.5),
        "charts/episodic_length": (600, 150.0),
    }
    update = UpdateRow(
        env_steps=600,
        approx_kl=0.01,
        clipfrac=0.2,
        explained_variance=0.5,
        policy_loss=-0.1,
        value_loss=0.3,
        entropy=0.6,
        learning_rate=3e-4,
        seconds=1.0,
    )
    assert set(named(update)) == {
        "losses/approx_kl",
        "losses/clipfrac",
        "losses/explained_variance",
        "losses/policy_loss",
        "losses/value_loss",
        "losses/entropy",
        "charts/learning_rate",
        "time/update_s",
    }
    assert named(RoundRow(steps_per_s=100.0, env_steps=600)) == {"charts/SPS": (600, 100.0)}


def test_a_head_is_a_curve_of_its_own() -> None:
    head = UpdateHeadRow(head="blueprint", entropy=0.4, approx_kl=0.01, env_steps=600)
    assert named(head) == {
        "losses/entropy/blueprint": (600, 0.4),
        "losses/approx_kl/blueprint": (600, 0.01),
    }


def test_epochs_are_curves_of_one_network_only() -> None:
    epoch = EpochRow(step=7, val_score=80.0, val_loss=0.5)
    assert named(epoch, GROWING) == {
        "charts/val_score": (7, 80.0),
        "losses/val_loss": (7, 0.5),
    }
    assert named(epoch, TRAINING) == {}


def test_absent_values_other_records_and_earlier_epochs_have_no_points() -> None:
    assert named(UpdateRow()) == {}
    assert named(UpdateRow(approx_kl=0.1, is_last=False)) == {}
    assert named(DecisionRow(op="WAIT")) == {}
    assert list(points_of(UpdateRow(approx_kl=0.1, round=3), TRAINING)) == [
        Point(name="losses/approx_kl", step=3, value=0.1)
    ]


def test_every_name_belongs_to_a_column_and_to_one_column_only() -> None:
    for record, names in METRICS.items():
        columns = set(TABLE_OF[record].names)
        assert set(names) <= columns
        used = [name for name in names.values() if name is not None]
        assert len(set(used)) == len(used)
        for name in used:
            group, _, rest = name.partition("/")
            assert group in {"charts", "losses", "seeds", "rewards", "time", "memory"}
            assert rest


def test_volatile_columns_are_drawn_as_times_memory_or_rates() -> None:
    for record, names in METRICS.items():
        for column, name in names.items():
            is_changing = name is not None and (
                name.startswith(("time/", "memory/")) or name == "charts/SPS"
            )
            assert name is None or is_changing == TABLE_OF[record].column(column).is_volatile


def test_every_table_that_has_curves_is_known() -> None:
    assert {TABLE_OF[record].name for record in METRICS} <= set(TABLES)


def test_a_term_of_the_reward_is_a_curve_of_its_own_whoever_wrote_it() -> None:
    terms = {"rent": {"mean": -0.1, "share": 0.25}, "somebody's": {"mean": 0.3, "share": None}}
    assert named(RoundRow(reward_terms=terms, env_steps=600)) == {
        "rewards/mean/rent": (600, -0.1),
        "rewards/share/rent": (600, 0.25),
        "rewards/mean/somebody's": (600, 0.3),
    }
