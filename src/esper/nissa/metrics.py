"""Every metric name in one place: what a column of the store is called in a sink.

The names are those people know from other training code (`charts/episodic_return`,
`losses/approx_kl`); a column of `update_heads` becomes `losses/<series>/<head>`, and a term of the
reward, whoever wrote it, `rewards/mean/<term>` and `rewards/share/<term>`. `points_of` turns a
record into named points; a sink needs nothing else to draw curves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from esper.nissa.columns import TABLE_OF, Row
from esper.nissa.schema import (
    EpisodeRow,
    EpochRow,
    RoundRow,
    RunRow,
    UpdateHeadRow,
    UpdateRow,
)

EPISODES = {
    "episodic_return": "charts/episodic_return",
    "length": "charts/episodic_length",
    "final_score": "charts/final_score",
    "gain": "charts/gain",
    "parameter_ratio": "charts/parameter_ratio",
    "seeds_fossilized": "charts/seeds_fossilized",
    "stability": "charts/stability",
}

EPOCHS = {
    "val_score": "charts/val_score",
    "twin_score": "charts/twin_score",
    "best_score": "charts/best_score",
    "parameters": "charts/parameters",
    "live_seeds": "charts/live_seeds",
    "plateau_epochs": "charts/plateau_epochs",
    "train_loss": "losses/train_loss",
    "val_loss": "losses/val_loss",
    "seconds": "time/epoch_s",
    "memory_bytes": "memory/process_bytes",
    "gpu_memory_share": "memory/gpu_share",
}

ROUNDS = {
    "return_mean": "charts/return_mean",
    "return_p05": "charts/return_p05",
    "return_p50": "charts/return_p50",
    "return_p95": "charts/return_p95",
    "score_mean": "charts/score_mean",
    "score_best": "charts/score_best",
    "score_rolling": "charts/score_rolling",
    "gain_mean": "charts/gain_mean",
    "gain_p05": "charts/gain_p05",
    "gain_p50": "charts/gain_p50",
    "gain_p95": "charts/gain_p95",
    "paid_off_share": "charts/paid_off_share",
    "paid_off_rolling": "charts/paid_off_rolling",
    "eval_return": "charts/eval_return",
    "eval_gain": "charts/eval_gain",
    "wait_share_free": "charts/wait_share_free",
    "forced_share": "charts/forced_share",
    "growth_ratio": "charts/growth_ratio",
    "seeds_germinated": "seeds/germinated",
    "seeds_fossilized": "seeds/fossilized",
    "seeds_pruned": "seeds/pruned",
    "fossilization_rate": "seeds/fossilization_rate",
    "rollbacks": "seeds/rollbacks",
    "anti_gaming_share": "rewards/anti_gaming_share",
    "attribution_ratio_max": "rewards/attribution_ratio_max",
    "hindsight_mean": "rewards/hindsight_mean",
    "hindsight_count": "rewards/hindsight_count",
    "hindsight_delay": "rewards/hindsight_delay",
    "steps_per_s": "charts/SPS",
    "seconds": "time/round_s",
    "update_seconds": "time/round_update_s",
    "twin_seconds": "time/twin_s",
    "memory_bytes": "memory/process_bytes",
    "gpu_memory_share": "memory/gpu_share",
}

_OTHER_UPDATES = {
    "learning_rate": "charts/learning_rate",
    "seconds": "time/update_s",
    "memory_bytes": None,
    "gpu_memory_share": None,
    "forced_share": None,
    "paid_off_rolling": None,
}

UPDATES = {
    column.name: _OTHER_UPDATES.get(column.name, f"losses/{column.name}")
    for column in TABLE_OF[UpdateRow].columns
    if column.sql == "REAL" and column.name != "time"
}
"""Every measured column of an update, as `losses/<column>` unless another name is usual."""

HEADS = {
    column.name: f"losses/{column.name}"
    for column in TABLE_OF[UpdateHeadRow].columns
    if column.sql == "REAL"
}
"""Every measured column of a head; `/<head>` is added."""

METRICS: dict[type[Row], Mapping[str, str | None]] = {
    EpisodeRow: EPISODES,
    EpochRow: EPOCHS,
    RoundRow: ROUNDS,
    UpdateRow: UPDATES,
    UpdateHeadRow: HEADS,
}
"""Columns to metric names, by the class of the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One named number at one step."""

    name: str
    step: int
    value: float


TERMS = ("mean", "share")
"""What is drawn of every term of the reward in a round, as `rewards/<this>/<term>`."""


def points_of(record: Row, run: RunRow) -> Iterator[Point]:
    """Return the points of a record, absent values left out.

    Epochs are drawn when the run trains one network; those of a population are curves only as
    rounds and episodes. Updates are drawn once, when their last epoch is done.
    """
    names = METRICS.get(type(record))
    if names is None:
        return
    if isinstance(record, EpochRow):
        if (run.rows or 1) > 1:
            return
        step, suffix = record.step, ""
    elif isinstance(record, UpdateHeadRow):
        step, suffix = _env_step(record.env_steps, record.round), f"/{record.head}"
    elif isinstance(record, UpdateRow | RoundRow | EpisodeRow):
        if isinstance(record, UpdateRow) and not record.is_last:
            return
        step, suffix = _env_step(record.env_steps, record.round), ""
    else:
        return
    for column, name in names.items():
        value = getattr(record, column)
        if name is not None and value is not None:
            yield Point(name=name + suffix, step=step, value=float(value))
    if isinstance(record, RoundRow) and isinstance(record.reward_terms, Mapping):
        for term, numbers in record.reward_terms.items():
            for series in TERMS:
                if numbers.get(series) is not None:
                    yield Point(
                        name=f"rewards/{series}/{term}", step=step, value=float(numbers[series])
                    )


def _env_step(env_steps: int | None, round_number: int) -> int:
    return round_number if env_steps is None else int(env_steps)
