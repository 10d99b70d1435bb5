"""The charts of a run as plain data, for the report and the live page.

A panel names the columns that it shows, and `series_for` returns the tables and columns to read for
one kind of run. The report draws a panel as SVG (`chart.py`), the live page with uPlot.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal, TypedDict

from esper.nissa.reader import StoredRun


@dataclass(frozen=True, slots=True)
class Line:
    """One curve, with a band if `low` and `high` are given."""

    name: str
    column: str
    _: KW_ONLY
    low: str | None = None
    high: str | None = None
    is_dashed: bool = False
    is_joined: bool = False
    """Whether points are joined across gaps, for what is measured rarely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart."""

    key: str
    group: str
    title: str
    table: str
    lines: tuple[Line, ...] = ()
    by: str | None = None
    """A column of names; the line is drawn once for each."""
    each: tuple[str, str] | None = None
    """A JSON column, and the member of its values to draw ("" if they are numbers)."""
    unit: str = ""
    note: str = ""
    is_share: bool = False
    reference: float | None = None
    floor: float | None = None
    ceiling: float | None = None
    only: Literal["seeds", "blocks"] | None = None
    """Whether the panel is only for growing runs with seeds, or only for those in depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The columns of one table that charts need, and its axis."""

    table: str
    x: str
    columns: tuple[str, ...]
    by: str | None = None
    json: tuple[str, ...] = ()
    where: str = "1"
    """Condition of the rows to read."""


COMPUTED: dict[str, str] = {
    "twin_mean": "score_mean - gain_mean",
    "rollout_seconds": "seconds - COALESCE(update_seconds, 0) - COALESCE(twin_seconds, 0)",
    "growth": "1.0 * parameters / NULLIF(host_parameters, 0)",
    "operations": "1.0 * flops / NULLIF(host_flops, 0)",
    "compute": "1.0 * training_flops / NULLIF(static_flops, 0)",
    "memory_gb": "memory_bytes / 1073741824.0",
}
"""Computed columns, in SQL."""


def _panel(table: str, key: str, group: str, title: str, *lines: Line | str, **more: Any) -> Panel:
    """Return a panel; a column name is a line with the panel's title. Shares begin at 0."""
    curves = tuple(Line(title, line) if isinstance(line, str) else line for line in lines)
    if more.get("is_share"):
        more.setdefault("floor", 0.0)
    return Panel(key=key, group=group, title=title, table=table, lines=curves, **more)


_rounds, _updates = partial(_panel, "rounds"), partial(_panel, "updates")
_heads, _epochs = partial(_panel, "update_heads", by="head"), partial(_panel, "epochs")

LEARNING, GROWTH, POLICY = "Learning", "Behaviour", "Policy"
CRITIC, REWARD, SPEED = "Critic", "Reward", "Throughput"
"""Groups of panels; each is a section of the page and of the report."""

TRAINING_PANELS: tuple[Panel, ...] = (
    _rounds(
        "gain",
        LEARNING,
        "Validation gain over the waiting twin",
        Line("mean, 25 to 75 %", "gain_mean", low="gain_p25", high="gain_p75"),
        Line("median, 5 to 95 %", "gain_p50", low="gain_p05", high="gain_p95", is_dashed=True),
        Line("greedy", "eval_gain", is_joined=True),
        unit="points",
        reference=0.0,
        note="Final validation score minus that of the twin, which never grows.",
    ),
    _rounds(
        "return",
        LEARNING,
        "Return of an episode",
        Line("mean, 25 to 75 %", "return_mean", low="return_p25", high="return_p75"),
        Line(
            "median, 5 to 95 %", "return_p50", low="return_p05", high="return_p95", is_dashed=True
        ),
        Line("greedy", "eval_return", is_joined=True),
        unit="reward",
        reference=0.0,
    ),
    _rounds(
        "score",
        LEARNING,
        "Final validation score, grown and twin",
        Line("grown, mean", "score_mean"),
        Line("grown, best", "score_best", is_dashed=True),
        Line("twin, mean", "twin_mean"),
        unit="points",
    ),
    _rounds(
        "paid_off",
        LEARNING,
        "Episodes that paid off",
        Line("round", "paid_off_share", is_dashed=True),
        Line("average", "paid_off_rolling"),
        is_share=True,
        ceiling=1.0,
    ),
    _rounds(
        "seeds",
        GROWTH,
        "Seeds in a round",
        Line("germinated", "seeds_germinated"),
        Line("fossilized", "seeds_fossilized"),
        Line("pruned", "seeds_pruned"),
        floor=0.0,
    ),
    _rounds("ops", GROWTH, "Operations taken", unit="decisions", each=("op_counts", ""), floor=0.0),
    _rounds(
        "waits",
        GROWTH,
        "Waiting and being forced",
        Line("WAIT where free", "wait_share_free"),
        Line("without effect", "idle_share_free"),
        Line("forced", "forced_share", is_dashed=True),
        is_share=True,
    ),
    _rounds("kept", GROWTH, "Early seeds fossilized", "fossilization_rate", is_share=True),
    _rounds("growth", GROWTH, "Largest growth", "growth_ratio", unit="× host", floor=1.0),
    _rounds("clamped", GROWTH, "Observations at their clamp", "obs_clamp_share", is_share=True),
    _heads(
        "entropy",
        POLICY,
        "Entropy of every head",
        "entropy_conditional",
        is_share=True,
        ceiling=1.0,
        note="Share of the greatest possible, over decisions where the head had a choice.",
    ),
    _heads("kl_heads", POLICY, "KL of every head", "approx_kl", unit="nats", floor=0.0),
    _updates(
        "kl",
        POLICY,
        "KL of an update",
        Line("KL from the round's policy", "approx_kl"),
        unit="nats",
        floor=0.0,
    ),
    _updates(
        "ratio",
        POLICY,
        "Joint ratio after the update",
        Line("mean, least to greatest", "ratio_mean", low="ratio_min", high="ratio_max"),
        reference=1.0,
    ),
    _heads("ratio_heads", POLICY, "Greatest ratio of every head", "ratio_max", reference=1.0),
    _updates(
        "clip",
        POLICY,
        "Decisions clipped",
        Line("all", "clipfrac"),
        Line("above", "clipfrac_up", is_dashed=True),
        Line("below", "clipfrac_down", is_dashed=True),
        is_share=True,
    ),
    _updates(
        "grad",
        POLICY,
        "Gradient norm",
        Line("all", "grad_norm"),
        Line("critic's head", "value_grad_norm"),
        floor=0.0,
    ),
    _heads("grad_heads", POLICY, "Gradient norm of every head", "grad_norm", floor=0.0),
    _updates(
        "advantages",
        POLICY,
        "Deviation of the advantages",
        "advantage_std_raw",
        unit="reward",
        floor=0.0,
    ),
    _updates(
        "lstm",
        POLICY,
        "The policy's memory",
        Line("cell", "lstm_c_rms"),
        Line("hidden", "lstm_h_rms"),
        unit="r.m.s.",
        floor=0.0,
    ),
    _updates(
        "explained",
        CRITIC,
        "Explained variance",
        Line("critic", "explained_variance"),
        Line("the reward's potential", "potential_share", is_dashed=True),
        reference=0.0,
        ceiling=1.0,
        note="1: the critic predicts all returns; 0: only their mean. The part explained by the "
        "reward's potential is known, not predicted, and not counted for the critic.",
    ),
    _updates(
        "values",
        CRITIC,
        "Predicted and real returns",
        Line("real, 5 to 95 %", "return_mean", low="return_p05", high="return_p95"),
        Line("predicted", "value_mean"),
        unit="reward",
        note="Both without the reward's potential.",
    ),
    _updates("value_loss", CRITIC, "Value loss", "value_loss", floor=0.0),
    _updates("q_spread", CRITIC, "Value: spread over ops", "q_op_spread", floor=0.0),
    _updates("q_ops", CRITIC, "Mean value of every op", unit="reward", each=("q_by_op", "")),
    _rounds(
        "terms",
        REWARD,
        "Terms of the reward",
        unit="reward a decision",
        reference=0.0,
        each=("reward_terms", "mean"),
    ),
    _rounds(
        "term_shares",
        REWARD,
        "Share of each term",
        is_share=True,
        ceiling=1.0,
        note="Of all that was paid or taken, as absolute numbers.",
        each=("reward_terms", "share"),
    ),
    _rounds(
        "reward_ops",
        REWARD,
        "Mean reward of every op",
        unit="reward",
        reference=0.0,
        each=("reward_by_op", "mean"),
    ),
    _rounds(
        "seconds",
        SPEED,
        "Time of a round, by phase",
        Line("episodes", "rollout_seconds"),
        Line("twins", "twin_seconds"),
        Line("update", "update_seconds"),
        unit="s",
        floor=0.0,
    ),
    _rounds("speed", SPEED, "Decisions a second", "steps_per_s", floor=0.0),
    _rounds("memory", SPEED, "Memory", "memory_gb", unit="GiB", floor=0.0),
)

GROWING_PANELS: tuple[Panel, ...] = (
    _epochs(
        "score",
        LEARNING,
        "Validation score, grown and twin",
        Line("grown", "val_score"),
        Line("twin, which only waits", "twin_score"),
        unit="points",
    ),
    _epochs(
        "loss",
        LEARNING,
        "Loss",
        Line("training", "train_loss", is_dashed=True),
        Line("validation", "val_loss"),
    ),
    _epochs(
        "size",
        GROWTH,
        "Size against the host",
        Line("parameters", "growth"),
        Line("operations", "operations"),
        unit="× host",
        floor=1.0,
    ),
    _epochs("seeds", GROWTH, "Seeds alive", "live_seeds", floor=0.0, only="seeds"),
    _epochs(
        "compute",
        GROWTH,
        "Training FLOPs against the static network",
        "compute",
        is_share=True,
        ceiling=1.0,
        note="Spent so far, of what the same steps take with all blocks awake.",
        only="blocks",
    ),
    _epochs("seconds", SPEED, "Time of an epoch", "seconds", unit="s", floor=0.0),
    _epochs("memory", SPEED, "Memory", "memory_gb", unit="GiB", floor=0.0),
)


def panels_for(kind: str) -> tuple[Panel, ...]:
    """Return the panels of a kind of run; there are none for other kinds."""
    return {"train": TRAINING_PANELS, "grow": GROWING_PANELS}.get(kind, ())


_LAST_UPDATE = "(round, ordinal) IN (SELECT round, ordinal FROM updates WHERE is_last = 1)"
_AXES: Mapping[str, tuple[str, str]] = {
    # Table: its axis, and which of its rows are read at first.
    "rounds": ("round", "1"),
    "updates": ("round", "is_last = 1"),
    "update_heads": ("round", _LAST_UPDATE),
    "epochs": ("step", '"round" = 0 AND "row" = 0'),
}


def series_for(kind: str) -> tuple[Series, ...]:
    """Return the tables that the panels of a kind of run are drawn from."""
    panels = panels_for(kind)
    found = []
    for table in dict.fromkeys(panel.table for panel in panels):
        own = [panel for panel in panels if panel.table == table]
        axis, where = _AXES[table]
        found.append(
            Series(
                table=table,
                x=axis,
                columns=_columns(own),
                by=next((panel.by for panel in own if panel.by), None),
                json=tuple(dict.fromkeys(panel.each[0] for panel in own if panel.each)),
                where=where,
            )
        )
    return tuple(found)


def _columns(panels: Sequence[Panel]) -> tuple[str, ...]:
    names = [
        name
        for panel in panels
        for line in panel.lines
        for name in (line.column, line.low, line.high)
        if name is not None
    ]
    return tuple(dict.fromkeys(names))


# ---- Reading the points of charts, with limits of time and size


TIMEOUT_S = 5.0
MOST_POINTS = 1_500
"""Points of a chart; if there are more, the least and the greatest of every few are drawn."""


class Points(TypedDict):
    """Rows of one table for charts; the first column is the axis."""

    columns: list[str]
    rows: list[list[Any]]
    every: int
    """How many points of the axis were merged into one."""


def ask(run: StoredRun, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Return the rows of one SELECT as dicts."""
    return run.query(sql, parameters, timeout_s=TIMEOUT_S).to_dicts()


def unfolded(text: Any) -> Any:
    """Return the value of a JSON column, None if it is not valid."""
    if not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_series(
    run: StoredRun, kind: str, between: tuple[int, int] | None = None
) -> dict[str, Points]:
    """Return the points of all charts, by table.

    Args:
        run: The run.
        kind: Its kind: grow or train.
        between: First and last position on the axis; all by default. A part of a long run has as
            many points as the whole, so that they lie closer together.
    """
    return {series.table: _read_table(run, _part(series, between)) for series in series_for(kind)}


def read_new(run: StoredRun, series: Series, after: int, upto: int) -> Points:
    """Return the rows of a table that were written after one and up to another."""
    episode = f" AND {series.where}" if series.table == "epochs" else ""
    where = f"id > ? AND id <= ?{episode} ORDER BY id"
    return _rows(run, series, where, [after, upto])


def _part(series: Series, between: tuple[int, int] | None) -> Series:
    if between is None:
        return series
    low, high = map(int, between)
    where = f'({series.where}) AND "{series.x}" BETWEEN {low} AND {high}'
    return dataclasses.replace(series, where=where)


def _read_table(run: StoredRun, series: Series) -> Points:
    span = ask(
        run,
        f'SELECT MIN("{series.x}") AS low, MAX("{series.x}") AS high FROM "{series.table}"'
        f" WHERE {series.where}",
    )[0]
    if span["low"] is None:
        return _rows(run, series, f"{series.where} LIMIT 0", [])
    size = math.ceil((span["high"] - span["low"] + 1) / MOST_POINTS)
    if size <= 1:
        return _rows(run, series, f"{series.where} ORDER BY id", [])
    return _thinned(run, series, size, span["low"])


def _rows(run: StoredRun, series: Series, where: str, parameters: Sequence[Any]) -> Points:
    names = _names(series)
    chosen = ", ".join(f'{_sql(name)} AS "{name}"' for name in names)
    answer = run.query(
        f'SELECT {chosen} FROM "{series.table}" WHERE {where}',
        parameters,
        timeout_s=TIMEOUT_S,
    )
    return {"columns": names, "rows": _decoded(series, names, answer.rows), "every": 1}


def _thinned(run: StoredRun, series: Series, size: int, low: int) -> Points:
    """Return two rows for every few: the least value of each column, then the greatest.

    So outliers stay visible, and a band keeps its width.
    """
    names = _names(series)
    fixed = {series.x, series.by, *series.json}
    groups = f'("{series.x}" - {int(low)}) / {int(size)}'
    if series.by is not None:
        groups += f', "{series.by}"'
    halves = []
    for extreme in ("MIN", "MAX"):
        chosen = ", ".join(
            f"{extreme}({_sql(name)})" if name == series.x or name not in fixed else f'"{name}"'
            for name in names
        )
        halves.append(
            f'SELECT {chosen} FROM "{series.table}" WHERE {series.where} GROUP BY {groups}'
        )
    statement = f"{' UNION ALL '.join(halves)} ORDER BY 1"
    answer = run.query(statement, timeout_s=TIMEOUT_S)
    return {"columns": names, "rows": _decoded(series, names, answer.rows), "every": size}


def _names(series: Series) -> list[str]:
    by = [] if series.by is None else [series.by]
    return [series.x, *by, *series.columns, *series.json]


def _sql(name: str) -> str:
    return COMPUTED.get(name, f'"{name}"')


def _decoded(
    series: Series, names: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> list[list[Any]]:
    places = [names.index(name) for name in series.json]
    found = []
    for row in rows:
        values = list(row)
        for place in places:
            values[place] = unfolded(values[place])
        found.append(values)
    return found
