from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from esper.leyline.errors import UnknownNameError, UsageError
from esper.nissa import open_store, register_sink
from esper.nissa.columns import TABLE_OF, TABLES, Row
from esper.nissa.schema import DecisionRow, EpochRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow, RunRow, UpdateHeadRow, UpdateRow
from esper.nissa.sinks import SINKS, SinkContext
from esper.nissa.sinks.sink import METRICS, Point, make_sink, points_of
from tests.nissa.telling import run_row


class Remembering:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.context: SinkContext | None = None
        self.records: list[Row] = []
        self.status: str | None = None

    def start(self, context: SinkContext) -> None:
        self.context = context

    def write(self, records: Sequence[Row]) -> None:
        self.records += records

    def mark(self) -> Mapping[str, Any]:
        return {"count": len(self.records)}

    def close(self, status: str) -> None:
        self.status = status


def test_the_built_in_sinks_are_there() -> None:
    assert {"tensorboard", "wandb"} <= set(SINKS.names())


def test_a_third_party_adds_a_sink_by_one_decorator(tmp_path: Path) -> None:
    made: list[Remembering] = []

    @register_sink("remembering")
    def make() -> Remembering:
        made.append(Remembering())
        return made[-1]

    try:
        with open_store(tmp_path, run_row(), sinks=["remembering"]) as store:
            store.write(EpochRow(step=1, val_score=3.0))
            mark = store.watermark()
            store.write(EpochRow(step=2))
            store.finish("finished")
    finally:
        SINKS.unregister("remembering")
    (sink,) = made
    assert sink.context is not None
    assert (sink.context.folder, sink.context.is_resumed) == (tmp_path, False)
    assert sink.context.run.run_id
    assert [row.step for row in sink.records if isinstance(row, EpochRow)] == [1, 2]
    assert sink.status == "finished"
    assert mark["sinks"] == {"remembering": {"count": 1}}


def test_a_resumed_sink_gets_its_cursor_back(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(), sinks=[Remembering()]) as store:
        store.write(EpochRow(step=1))
        mark = store.watermark()
    again = Remembering()
    open_store(tmp_path, run_row(), resume=mark, sinks=[again]).close()
    assert again.context is not None
    assert (again.context.is_resumed, again.context.cursor) == (True, {"count": 1})
    assert again.status == "interrupted"


def test_names_and_objects_that_are_no_sinks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown sink 'tensorbord', did you mean"):
        make_sink("tensorbord")
    for wrong in (3, Remembering, object()):
        with pytest.raises(UsageError, match="a sink is a name"):
            make_sink(wrong)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="unknown sink 'nope'"):
        open_store(tmp_path, run_row(), sinks=["nope"])
    # The refusal comes before anything is opened.
    assert list(tmp_path.iterdir()) == []


GROWING = RunRow(kind="grow")
TRAINING = RunRow(kind="train", rows=64)
KNOWN_GROUPS = {
    *("charts", "losses", "ppo", "critic", "seeds", "rewards", "time", "memory"),
    *("head_usage", "entropy"),
}


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


def test_what_the_documents_name_has_their_names() -> None:
    head = UpdateHeadRow(
        **{"head": "tempo", "ratio_max": 3.5, "ratio_min": 0.1, "ratio_mean": 1.1},
        **{"ratio_std": 0.2, "usage": 0.18, "entropy_nats": 0.9, "env_steps": 600},
    )
    assert named(head) == {
        "ppo/ratio_tempo_max": (600, 3.5),
        "ppo/ratio_tempo_min": (600, 0.1),
        "ppo/ratio_tempo_mean": (600, 1.1),
        "losses/ratio_std/tempo": (600, 0.2),
        "head_usage/tempo": (600, 0.18),
        "entropy/tempo": (600, 0.9),
    }
    assert named(UpdateRow(env_steps=600, q_variance=0.02, q_op_spread=0.3)) == {
        "critic/q_variance_across_ops": (600, 0.02),
        "critic/q_op_spread": (600, 0.3),
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
            assert group in KNOWN_GROUPS
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
