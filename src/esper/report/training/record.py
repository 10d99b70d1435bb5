"""What a training run recorded, as far as a report needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from esper.leyline.actions import HEAD_NAMES, HEAD_VALUES, choice_text
from esper.nissa.reader import StoredRun
from esper.nissa.schema import (
    DecisionRow,
    EpisodeRow,
    EventKind,
    EventRow,
    RoundRow,
    UpdateHeadRow,
    UpdateRow,
)

SHOWN_EPISODES = 3
TOLD_EVENTS = (
    EventKind.SETTINGS_CHANGED,
    EventKind.VERSIONS_CHANGED,
    EventKind.CHECKPOINT_LOADED,
    EventKind.STORE_RESTARTED,
    EventKind.GOVERNOR_ROLLBACK,
)
_HEAD_COLUMNS = (
    *("round", "ordinal", "head", "usage", "free_steps", "valid_actions", "entropy"),
    *("entropy_conditional", "entropy_nats", "ratio_max", "approx_kl", "clipfrac", "grad_norm"),
    "choices",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEpisode:
    """One episode with its decisions, in order."""

    episode: EpisodeRow
    decisions: Sequence[DecisionRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """Rounds, updates and a few episodes of one training run."""

    rounds: Sequence[RoundRow] = ()
    updates: Sequence[UpdateRow] = ()
    """The last optimisation epoch of every update."""
    heads: Mapping[str, Sequence[UpdateHeadRow]] = field(default_factory=dict)
    """Per head, the op first, its state after every update."""
    episodes: Sequence[ShownEpisode] = ()
    """The best, the middle and the worst of those recorded in the latest round."""
    events: Sequence[EventRow] = ()
    """Resumes, changed settings and the like."""
    choice_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Per head, what its choices are called, in their order; heads may be missing."""


def read_training(run: StoredRun) -> TrainingRecord:
    """Read a training run from its store."""
    rounds = [row for row in run.records("rounds") if isinstance(row, RoundRow)]
    updates = [UpdateRow(**row) for row in run.rows("updates", where="is_last = 1")]
    heads: dict[str, list[UpdateHeadRow]] = {}
    for row in run.rows(
        "update_heads",
        columns=_HEAD_COLUMNS,
        where="(round, ordinal) IN (SELECT round, ordinal FROM updates WHERE is_last = 1)",
    ):
        heads.setdefault(str(row["head"]), []).append(UpdateHeadRow(**row))
    # The op is chosen first, whatever its place in the action.
    order = {head: 1 + index for index, head in enumerate(HEAD_NAMES)} | {"op": 0}
    kinds = ", ".join("?" for _ in TOLD_EVENTS)
    events = run.rows("events", where=f"kind IN ({kinds})", parameters=[*TOLD_EVENTS])
    return TrainingRecord(
        rounds=rounds,
        updates=updates,
        heads={head: heads[head] for head in sorted(heads, key=lambda one: order.get(one, 99))},
        episodes=_read_episodes(run),
        events=[EventRow(**row) for row in events],
        choice_names=_choice_names(run),
    )


def _choice_names(run: StoredRun) -> dict[str, list[str]]:
    """Return what the choices of every head are called in this run."""
    names = {
        head: [choice_text(head, value) for value in values] for head, values in HEAD_VALUES.items()
    }
    slots = run.info.slots
    if isinstance(slots, Sequence):
        names["slot"] = [str(slot) for slot in slots]
    started = run.rows(
        "events", columns=["data"], where="kind = ?", parameters=[EventKind.TRAINING_STARTED]
    )
    data = started[-1]["data"] if started else None
    blueprints = data.get("blueprints") if isinstance(data, Mapping) else None
    if isinstance(blueprints, Sequence):
        names["blueprint"] = [str(blueprint) for blueprint in blueprints]
    return names


def _read_episodes(run: StoredRun) -> list[ShownEpisode]:
    """Return the best, the middle and the worst recorded episode of the latest round with any."""
    latest = run.query("SELECT MAX(round) FROM decisions").rows[0][0]
    if latest is None:
        return []
    recorded = run.query(
        "SELECT DISTINCT row FROM decisions WHERE round = ? ORDER BY row", [latest]
    ).rows
    rows = {row for (row,) in recorded}
    found = [
        EpisodeRow(**row)
        for row in run.rows("episodes", where="round = ?", parameters=[latest])
        if row["row"] in rows
    ]
    # An episode that is still going on has decisions and no end.
    found += [
        EpisodeRow(round=latest, row=row) for row in sorted(rows - {one.row for one in found})
    ]
    found.sort(key=lambda one: -(one.episodic_return or 0.0))
    if len(found) > SHOWN_EPISODES:
        found = [found[0], found[len(found) // 2], found[-1]]
    return [
        ShownEpisode(
            episode=one,
            decisions=[
                DecisionRow(**row)
                for row in run.rows(
                    "decisions", where="round = ? AND row = ?", parameters=[latest, one.row]
                )
            ],
        )
        for one in found
    ]
