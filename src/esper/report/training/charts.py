"""The charts of a training run: what was gained, how the heads and the critic did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from esper.leyline.actions import LifecycleOp
from esper.nissa.columns import Row
from esper.report.chart import COLORS, Band, Chart, Line, draw_chart
from esper.report.marks import op_words
from esper.report.paths import Point, make_point
from esper.report.training.record import TrainingRecord

_MOST_TERMS = len(COLORS) - 1
_OTHER = "other terms"


def gain_charts(record: TrainingRecord) -> Iterator[Chart]:
    """Return how return and gain went, with the spread over the episodes of a round."""
    rounds = record.rounds
    for title, stem in (
        ("Return of an episode", "return"),
        ("Gain over the waiting twin, in points", "gain"),
    ):
        lines = [Line(name="mean", points=_curve(rounds, f"{stem}_mean"))]
        greedy = _curve(rounds, f"eval_{stem}")
        if any(greedy):
            # An evaluation every few rounds: the points are joined, or nothing would be seen.
            known = [point for point in greedy if point is not None]
            lines.append(Line(name="greedy", points=known, kind="c2"))
        bands = [
            Band(
                name="5 to 95 %",
                low=_curve(rounds, f"{stem}_p05"),
                high=_curve(rounds, f"{stem}_p95"),
            ),
            Band(
                name="25 to 75 %",
                low=_curve(rounds, f"{stem}_p25"),
                high=_curve(rounds, f"{stem}_p75"),
                kind="c1 band strong-band",
            ),
        ]
        yield Chart(
            title=title,
            lines=lines,
            bands=[band for band in bands if any(band.high)],
            reference=0.0,
            size="wide",
        )


def behaviour_charts(record: TrainingRecord) -> Iterator[Chart]:
    """Return what the controller did: waiting, keeping seeds, paying off, growing."""
    rounds = record.rounds
    yield _share("WAIT on free decisions", rounds, "wait_share_free")
    yield _share("Early seeds fossilized", rounds, "fossilization_rate")
    yield _share("Episodes that paid off", rounds, "paid_off_share", average="paid_off_rolling")
    yield Chart(
        title="Seeds in a round",
        lines=[
            Line(name="germinated", points=_curve(rounds, "seeds_germinated")),
            Line(name="fossilized", points=_curve(rounds, "seeds_fossilized"), kind="c4"),
            Line(name="pruned", points=_curve(rounds, "seeds_pruned"), kind="c2"),
        ],
        floor=0.0,
    )
    yield _single("Final score, points", rounds, "score_mean")
    yield _single("Largest growth", rounds, "growth_ratio")
    yield _share("Forced decisions", rounds, "forced_share")
    yield _share("Observation clamped", rounds, "obs_clamp_share")


def learner_charts(record: TrainingRecord) -> Iterator[Chart]:
    """Return how the updates went."""
    updates = record.updates
    yield _single("KL of an update, nats", updates, "approx_kl", floor=0.0)
    yield _share("Decisions clipped", updates, "clipfrac")
    yield _single("Greatest joint ratio", updates, "ratio_max", reference=1.0)
    yield _single("Gradient norm", updates, "grad_norm", floor=0.0)
    yield _share("Mean entropy of heads", updates, "entropy")
    yield _single("Advantages: deviation", updates, "advantage_std_raw", floor=0.0)
    yield _share("Advantages above 0", updates, "advantage_positive")
    yield Chart(
        title="Memory, r.m.s.",
        lines=[
            Line(name="cell", points=_curve(updates, "lstm_c_rms")),
            Line(name="hidden", points=_curve(updates, "lstm_h_rms"), kind="c2"),
        ],
        floor=0.0,
    )
    yield _share("Hangs on last action", updates, "feedback_dependence")


def value_charts(record: TrainingRecord) -> Iterator[Chart]:
    """Return how well the critic knows what is coming."""
    updates = record.updates
    yield _single("Explained variance", updates, "explained_variance", reference=0.0, ceiling=1.0)
    yield _single("Value loss", updates, "value_loss", floor=0.0)
    yield _single("Q: spread over ops", updates, "q_op_spread", floor=0.0)
    yield _single("Q: variance over ops", updates, "q_variance", floor=0.0)
    yield Chart(
        title="Values and returns",
        lines=[
            Line(name="return", points=_curve(updates, "return_mean")),
            Line(name="value", points=_curve(updates, "value_mean"), kind="c2"),
        ],
    )
    yield _single("Their correlation", updates, "value_return_correlation")


def head_charts(record: TrainingRecord, head: str) -> Iterator[Chart]:
    """Return the four charts of one head: entropy, KL, greatest ratio, gradient."""
    rows = record.heads[head]
    lines = [
        Line(name="where it chose", points=_curve(rows, "entropy_conditional")),
        Line(name="all steps", points=_curve(rows, "entropy"), kind="c5 dashed"),
    ]
    yield Chart(title="entropy", lines=lines, is_share=True, floor=0.0, ceiling=1.0)
    yield _single("KL, nats", rows, "approx_kl", floor=0.0)
    yield _single("greatest ratio", rows, "ratio_max", reference=1.0)
    yield _single("gradient norm", rows, "grad_norm", floor=0.0)


def reward_chart(record: TrainingRecord) -> Chart:
    """Return which terms the reward was made of, as shares of all that was paid or taken."""
    shares = [_term_shares(row.reward_terms) for row in record.rounds]
    total: dict[str, float] = {}
    for one in shares:
        for term, share in one.items():
            total[term] = total.get(term, 0.0) + share
    ranked = sorted((term for term in total if total[term] > 0), key=lambda term: -total[term])
    shown = ranked[:_MOST_TERMS]
    names = [*shown, _OTHER] if len(ranked) > _MOST_TERMS else shown
    bands: list[Band] = []
    low: list[Point | None] = [
        (float(row.round), 0.0) if one else None
        for row, one in zip(record.rounds, shares, strict=True)
    ]
    for name, color in zip(names, COLORS, strict=False):
        high: list[Point | None] = []
        for under, one in zip(low, shares, strict=True):
            rest = sum(share for term, share in one.items() if term not in shown)
            size = rest if name == _OTHER else one.get(name, 0.0)
            high.append(None if under is None else (under[0], under[1] + size))
        bands.append(Band(name=name, low=low, high=high, kind=f"{color} area"))
        low = high
    return Chart(
        title="Share of the absolute reward",
        bands=bands,
        size="wide",
        is_share=True,
        floor=0.0,
        ceiling=1.0,
    )


def reward_by_op_chart(record: TrainingRecord) -> Chart:
    """Return what every op paid on average, round by round."""
    known = [
        (row.round, row.reward_by_op)
        for row in record.rounds
        if isinstance(row.reward_by_op, Mapping)
    ]
    lines = []
    for op, color in zip(LifecycleOp, COLORS, strict=True):
        points = [
            make_point(at, by_op[op.name].get("mean")) if op.name in by_op else None
            for at, by_op in known
        ]
        if any(points):
            lines.append(Line(name=op_words(op.name), points=points, kind=color))
    return Chart(title="Mean reward of a decision", lines=lines, reference=0.0, size="wide")


def render_charts(charts: Iterable[Chart], kind: str = "small") -> str:
    """Return a grid of charts; those without anything to show are left out."""
    drawn = [draw_chart(chart) for chart in charts if not chart.is_empty]
    if not drawn:
        return ""
    body = "".join(f"<div>{picture}</div>\n" for picture in drawn)
    return f'<div class="charts {kind}">\n{body}</div>\n'


def _curve(rows: Sequence[Row], column: str) -> list[Point | None]:
    places: list[Any] = [*rows]
    return [make_point(row.round, getattr(row, column)) for row in places]


def _single(title: str, rows: Sequence[Row], column: str, **more: Any) -> Chart:
    return Chart(title=title, lines=[Line(name=title.lower(), points=_curve(rows, column))], **more)


def _share(title: str, rows: Sequence[Row], column: str, average: str | None = None) -> Chart:
    lines = [Line(name=title.lower(), points=_curve(rows, column))]
    if average is not None:
        lines = [
            Line(name="round", points=_curve(rows, column), kind="c5"),
            Line(name="average", points=_curve(rows, average)),
        ]
    return Chart(title=title, lines=lines, is_share=True, floor=0.0)


def _term_shares(terms: Any) -> dict[str, float]:
    if not isinstance(terms, Mapping):
        return {}
    return {
        str(term): float(numbers["share"])
        for term, numbers in terms.items()
        if isinstance(numbers, Mapping) and numbers.get("share")
    }
