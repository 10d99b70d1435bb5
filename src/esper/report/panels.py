"""What is drawn of a run: every chart as plain data, for the report and the live page alike.

A panel names the columns it shows; `series_for` turns the panels of one kind of run into the
tables to read, so that nothing is read that nobody looks at. The report draws a panel as SVG
(`chart.py`), the live page with uPlot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve, with a band around it where two more columns are named."""

    name: str
    column: str
    low: str | None = None
    high: str | None = None
    is_dashed: bool = False
    is_joined: bool = False
    """Measured now and then: its points are joined across the gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart."""

    key: str
    group: str
    title: str
    table: str
    lines: tuple[Line, ...] = ()
    by: str | None = None
    """A column of names; the only line is drawn once for each."""
    each: tuple[str, str] | None = None
    """A JSON column, and the member to draw of each of its names ("" where it is the number)."""
    unit: str = ""
    note: str = ""
    is_share: bool = False
    reference: float | None = None
    floor: float | None = None
    ceiling: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One table as charts need it: numbers over a whole-numbered axis."""

    table: str
    x: str
    columns: tuple[str, ...]
    by: str | None = None
    json: tuple[str, ...] = ()
    where: str = "1"
    """Which rows are read at first; of rows that come later the last of its key counts."""


COMPUTED: dict[str, str] = {
    "twin_mean": "score_mean - gain_mean",
    "rollout_seconds": "seconds - COALESCE(update_seconds, 0) - COALESCE(twin_seconds, 0)",
    "growth": "1.0 * parameters / NULLIF(host_parameters, 0)",
    "operations": "1.0 * flops / NULLIF(host_flops, 0)",
    "memory_gb": "memory_bytes / 1073741824.0",
}
"""Columns that no table has, in SQL."""


def _line(name: str, column: str, **more: Any) -> Line:
    return Line(name=name, column=column, **more)


def _one(key: str, group: str, title: str, table: str, column: str, **more: Any) -> Panel:
    return Panel(
        key=key, group=group, title=title, table=table, lines=(_line(title, column),), **more
    )


def _share(key: str, group: str, title: str, table: str, column: str) -> Panel:
    return _one(key, group, title, table, column, is_share=True, floor=0.0)


LEARNING, GROWTH, POLICY = "Learning", "Behaviour", "Policy"
CRITIC, REWARD, SPEED = "Critic", "Reward", "Throughput"
"""Groups of panels; each is a section of the page and of the report."""

TRAINING_PANELS: tuple[Panel, ...] = (
    Panel(
        key="gain",
        group=LEARNING,
        title="Gain over the waiting twin",
        table="rounds",
        unit="points",
        reference=0.0,
        note="Final score minus that of a network with the same start and data that only waited.",
        lines=(
            _line("mean, 25 to 75 %", "gain_mean", low="gain_p25", high="gain_p75"),
            _line("median, 5 to 95 %", "gain_p50", low="gain_p05", high="gain_p95", is_dashed=True),
            _line("greedy", "eval_gain", is_joined=True),
        ),
    ),
    Panel(
        key="return",
        group=LEARNING,
        title="Return of an episode",
        table="rounds",
        unit="reward",
        reference=0.0,
        lines=(
            _line("mean, 25 to 75 %", "return_mean", low="return_p25", high="return_p75"),
            _line(
                "median, 5 to 95 %",
                "return_p50",
                low="return_p05",
                high="return_p95",
                is_dashed=True,
            ),
            _line("greedy", "eval_return", is_joined=True),
        ),
    ),
    Panel(
        key="score",
        group=LEARNING,
        title="Final score, grown and twin",
        table="rounds",
        unit="points",
        lines=(
            _line("grown, mean", "score_mean"),
            _line("grown, best", "score_best", is_dashed=True),
            _line("twin, mean", "twin_mean"),
        ),
    ),
    Panel(
        key="paid_off",
        group=LEARNING,
        title="Episodes that paid off",
        table="rounds",
        is_share=True,
        floor=0.0,
        ceiling=1.0,
        lines=(
            _line("round", "paid_off_share", is_dashed=True),
            _line("average", "paid_off_rolling"),
        ),
    ),
    Panel(
        key="seeds",
        group=GROWTH,
        title="Seeds in a round",
        table="rounds",
        floor=0.0,
        lines=(
            _line("germinated", "seeds_germinated"),
            _line("fossilized", "seeds_fossilized"),
            _line("pruned", "seeds_pruned"),
        ),
    ),
    Panel(
        key="ops",
        group=GROWTH,
        title="Operations taken",
        table="rounds",
        unit="decisions",
        each=("op_counts", ""),
        floor=0.0,
    ),
    Panel(
        key="waits",
        group=GROWTH,
        title="Waiting and being forced",
        table="rounds",
        is_share=True,
        floor=0.0,
        lines=(
            _line("WAIT where free", "wait_share_free"),
            _line("without effect", "idle_share_free"),
            _line("forced", "forced_share", is_dashed=True),
        ),
    ),
    _share("kept", GROWTH, "Early seeds fossilized", "rounds", "fossilization_rate"),
    _one("growth", GROWTH, "Largest growth", "rounds", "growth_ratio", unit="× host", floor=1.0),
    _share("clamped", GROWTH, "Observations at their clamp", "rounds", "obs_clamp_share"),
    Panel(
        key="entropy",
        group=POLICY,
        title="Entropy of every head",
        table="update_heads",
        by="head",
        is_share=True,
        floor=0.0,
        ceiling=1.0,
        note="Share of the greatest there can be, over decisions where the head had a choice.",
        lines=(_line("entropy", "entropy_conditional"),),
    ),
    Panel(
        key="kl_heads",
        group=POLICY,
        title="KL of every head",
        table="update_heads",
        by="head",
        unit="nats",
        floor=0.0,
        lines=(_line("KL", "approx_kl"),),
    ),
    Panel(
        key="kl",
        group=POLICY,
        title="KL of an update",
        table="updates",
        unit="nats",
        floor=0.0,
        lines=(_line("KL from the round's policy", "approx_kl"),),
    ),
    Panel(
        key="ratio",
        group=POLICY,
        title="Joint ratio after the update",
        table="updates",
        reference=1.0,
        lines=(_line("mean, least to greatest", "ratio_mean", low="ratio_min", high="ratio_max"),),
    ),
    Panel(
        key="ratio_heads",
        group=POLICY,
        title="Greatest ratio of every head",
        table="update_heads",
        by="head",
        reference=1.0,
        lines=(_line("ratio", "ratio_max"),),
    ),
    Panel(
        key="clip",
        group=POLICY,
        title="Decisions clipped",
        table="updates",
        is_share=True,
        floor=0.0,
        lines=(
            _line("all", "clipfrac"),
            _line("above", "clipfrac_up", is_dashed=True),
            _line("below", "clipfrac_down", is_dashed=True),
        ),
    ),
    Panel(
        key="grad",
        group=POLICY,
        title="Gradient norm",
        table="updates",
        floor=0.0,
        lines=(_line("all", "grad_norm"), _line("critic's head", "value_grad_norm")),
    ),
    Panel(
        key="grad_heads",
        group=POLICY,
        title="Gradient norm of every head",
        table="update_heads",
        by="head",
        floor=0.0,
        lines=(_line("gradient norm", "grad_norm"),),
    ),
    _one(
        "advantages",
        POLICY,
        "Deviation of the advantages",
        "updates",
        "advantage_std_raw",
        unit="reward",
        floor=0.0,
    ),
    Panel(
        key="lstm",
        group=POLICY,
        title="The policy's memory",
        table="updates",
        unit="r.m.s.",
        floor=0.0,
        lines=(_line("cell", "lstm_c_rms"), _line("hidden", "lstm_h_rms")),
    ),
    _one(
        "explained",
        CRITIC,
        "Explained variance",
        "updates",
        "explained_variance",
        reference=0.0,
        ceiling=1.0,
        note="1 is a critic that knows every return, 0 one that knows only their mean.",
    ),
    Panel(
        key="values",
        group=CRITIC,
        title="Predicted and real returns",
        table="updates",
        unit="reward",
        lines=(
            _line("real, 5 to 95 %", "return_mean", low="return_p05", high="return_p95"),
            _line("predicted", "value_mean"),
        ),
    ),
    _one("value_loss", CRITIC, "Value loss", "updates", "value_loss", floor=0.0),
    _one("q_spread", CRITIC, "Value: spread over ops", "updates", "q_op_spread", floor=0.0),
    Panel(
        key="q_ops",
        group=CRITIC,
        title="Mean value of every op",
        table="updates",
        unit="reward",
        each=("q_by_op", ""),
    ),
    Panel(
        key="terms",
        group=REWARD,
        title="Terms of the reward",
        table="rounds",
        unit="reward a decision",
        reference=0.0,
        each=("reward_terms", "mean"),
    ),
    Panel(
        key="term_shares",
        group=REWARD,
        title="Share of each term",
        table="rounds",
        is_share=True,
        floor=0.0,
        ceiling=1.0,
        note="Of all that was paid or taken, as absolute numbers.",
        each=("reward_terms", "share"),
    ),
    Panel(
        key="reward_ops",
        group=REWARD,
        title="Mean reward of every op",
        table="rounds",
        unit="reward",
        reference=0.0,
        each=("reward_by_op", "mean"),
    ),
    Panel(
        key="seconds",
        group=SPEED,
        title="Time of a round, by phase",
        table="rounds",
        unit="s",
        floor=0.0,
        lines=(
            _line("episodes", "rollout_seconds"),
            _line("twins", "twin_seconds"),
            _line("update", "update_seconds"),
        ),
    ),
    _one("speed", SPEED, "Decisions a second", "rounds", "steps_per_s", floor=0.0),
    _one("memory", SPEED, "Memory", "rounds", "memory_gb", unit="GiB", floor=0.0),
)

GROWING_PANELS: tuple[Panel, ...] = (
    Panel(
        key="score",
        group=LEARNING,
        title="Validation score, grown and twin",
        table="epochs",
        unit="points",
        lines=(_line("grown", "val_score"), _line("twin, which only waits", "twin_score")),
    ),
    Panel(
        key="loss",
        group=LEARNING,
        title="Loss",
        table="epochs",
        lines=(_line("training", "train_loss", is_dashed=True), _line("validation", "val_loss")),
    ),
    Panel(
        key="size",
        group=GROWTH,
        title="Size against the host",
        table="epochs",
        unit="× host",
        floor=1.0,
        lines=(_line("parameters", "growth"), _line("operations", "operations")),
    ),
    _one("seeds", GROWTH, "Seeds alive", "epochs", "live_seeds", floor=0.0),
    _one("seconds", SPEED, "Time of an epoch", "epochs", "seconds", unit="s", floor=0.0),
    _one("memory", SPEED, "Memory", "epochs", "memory_gb", unit="GiB", floor=0.0),
)


def panels_for(kind: str) -> tuple[Panel, ...]:
    """Return the panels of a kind of run; what is neither grown nor trained has none."""
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


def to_mapping(panel: Panel) -> dict[str, Any]:
    """Return a panel as plain data for the page."""
    return dataclasses.asdict(panel)
