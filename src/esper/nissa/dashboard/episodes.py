"""One episode looked into: its garden, its seeds, its decisions, and what its critic foresaw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from esper.leyline.actions import HEAD_NAMES
from esper.nissa.dashboard.stream import recorded_rows
from esper.nissa.reader import StoredRun, read_history
from esper.nissa.report.panels import ask, unfolded
from esper.nissa.report.stacks import read_stacks
from esper.nissa.schema import EventKind

MOST_EPOCHS = 3_000
"""Epochs of a garden that are read one by one; of more, one in every few."""

MOST_MARKS = 1_000
MOST_DECISIONS = 50
MOST_FORESEEN = 3_000

_HERE = '"round" = ? AND "row" = ?'
_JSON = ("alternatives", "reward_terms", "reward_details", "explanation")


def read_garden(run: StoredRun, round: int, row: int) -> dict[str, Any]:
    """Return what lived in the slots of an episode, epoch by epoch, and what was decided."""
    here = [round, row]
    span = ask(run, f"SELECT MAX(step) AS last, COUNT(*) AS n FROM epochs WHERE {_HERE}", here)[0]
    every = max(1, math.ceil((span["n"] or 0) / MOST_EPOCHS))
    thin = "" if every == 1 else f" AND (step % {every} = 0 OR entered = 1)"
    stages = ask(
        run,
        "SELECT step, ordinal, slot, stage, blueprint, alpha, contribution, contribution_se "
        f"FROM seed_stages WHERE {_HERE}{thin} ORDER BY ordinal, step",
        here,
    )
    episode = ask(
        run,
        "SELECT task, env_seed, episodic_return, final_score, twin_score, gain, parameter_ratio, "
        "seeds_germinated, seeds_fossilized, seeds_pruned, rollback_reason "
        f"FROM episodes WHERE {_HERE} LIMIT 1",
        here,
    )
    stacks = ask(run, f"SELECT 1 FROM stacks WHERE {_HERE} LIMIT 1", here)
    epochs_thin = "" if every == 1 else f" AND step % {every} = 0"
    return {
        "round": round,
        "row": row,
        "rows": recorded_rows(run, round),
        "last": span["last"],
        "every": every,
        "slots": _slots(run, stages),
        "spans": list(_spans(stages, every)),
        "stacks": [asdict(lane) for lane in read_stacks(read_history(run, every))]
        if stacks
        else [],
        "seeds": ask(
            run,
            "SELECT ordinal, slot, blueprint, germinated, ended, fate, parameters, flops, "
            f"contribution, contribution_se, improvement FROM seeds WHERE {_HERE} ORDER BY ordinal",
            here,
        ),
        "marks": ask(
            run,
            "SELECT step, op, slot, outcome FROM decisions "
            f"WHERE {_HERE} AND op <> 'WAIT' ORDER BY step LIMIT ?",
            [*here, MOST_MARKS],
        ),
        "epochs": ask(
            run,
            "SELECT step, val_score, twin_score FROM epochs "
            f"WHERE {_HERE}{epochs_thin} ORDER BY step",
            here,
        ),
        "episode": episode[0] if episode else None,
        "worth": _worth(run, here),
    }


def _slots(run: StoredRun, stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the slots in their order; of a run over several tasks, those in use."""
    used = {int(stage["ordinal"]): str(stage["slot"]) for stage in stages}
    named = unfolded(ask(run, "SELECT slots FROM runs LIMIT 1")[0]["slots"])
    names = [str(name) for name in named] if isinstance(named, list) else []
    if all(place < len(names) and names[place] == name for place, name in used.items()):
        return names
    return [used[place] for place in sorted(used)]


def _spans(stages: Sequence[Mapping[str, Any]], every: int) -> list[dict[str, Any]]:
    """Return stretches of one stage of one seed, with alpha where it changes.

    An epoch reaches from the number before it to its own, so a stretch begins one before its
    first epoch.
    """
    spans: list[dict[str, Any]] = []
    for stage in stages:
        same = (
            bool(spans)
            and all(spans[-1][name] == stage[name] for name in ("slot", "stage", "blueprint"))
            and stage["step"] - spans[-1]["to"] <= every
        )
        if not same:
            spans.append(
                {
                    **{name: stage[name] for name in ("slot", "stage", "blueprint")},
                    "from": stage["step"] - 1,
                    "alpha": [],
                }
            )
        span = spans[-1]
        span["to"] = stage["step"]
        span["contribution"], span["se"] = stage["contribution"], stage["contribution_se"]
        alpha = span["alpha"]
        if len(alpha) > 1 and alpha[-1][1] == alpha[-2][1] == stage["alpha"]:
            alpha[-1][0] = stage["step"]
        else:
            alpha.append([stage["step"], stage["alpha"]])
    return spans


def _worth(run: StoredRun, here: Sequence[int]) -> list[dict[str, Any]]:
    """Return what every seed, pair and set was worth when it was last measured."""
    return ask(
        run,
        "SELECT kind, slot, other, value, se, MAX(step) AS step FROM contributions "
        f"WHERE {_HERE} GROUP BY kind, slot, other ORDER BY kind, slot, other",
        here,
    )


def read_seed(run: StoredRun, round: int, row: int, ordinal: int) -> dict[str, Any] | None:
    """Return the life of one seed, None where there is no such seed."""
    here = [round, row]
    found = ask(run, f"SELECT * FROM seeds WHERE {_HERE} AND ordinal = ?", [*here, ordinal])
    if not found:
        return None
    seed = found[0]
    later = ask(
        run,
        f"SELECT MIN(germinated) AS next FROM seeds WHERE {_HERE} AND slot = ? AND germinated > ?",
        [*here, seed["slot"], seed["germinated"]],
    )[0]["next"]
    # What happens in the slot from the next germination on is the next seed's.
    until = later if later is not None else 2**62
    life = [*here, seed["slot"], seed["germinated"], until]
    between = f"{_HERE} AND slot = ? AND step > ? AND step <= ?"
    count = ask(run, f"SELECT COUNT(*) AS n FROM seed_stages WHERE {between}", life)[0]["n"]
    every = max(1, math.ceil(count / MOST_EPOCHS))
    return {
        "seed": seed,
        "stages": ask(
            run,
            "SELECT step, stage, entered, alpha, alpha_target, contribution, contribution_se, "
            "improvement, interaction, grad_norm, grad_health FROM seed_stages "
            f"WHERE {between} AND (step % {every} = 0 OR entered = 1) ORDER BY step",
            life,
        ),
        "decisions": ask(
            run,
            "SELECT step, op, outcome, reason, reward FROM decisions "
            f"WHERE {_HERE} AND slot = ? AND step >= ? AND step < ? ORDER BY step LIMIT ?",
            [*life, MOST_MARKS],
        ),
        "worth": [one for one in _worth(run, here) if seed["slot"] in (one["slot"], one["other"])],
    }


def read_decisions(
    run: StoredRun,
    *,
    round: int | None = None,
    row: int | None = None,
    op: str | None = None,
    slot: str | None = None,
    outcome: str | None = None,
    acted: bool = False,
    before: int | None = None,
) -> dict[str, Any]:
    """Return decisions, the newest first, with what is known of why; `before` goes on from there.

    Args:
        run: The run.
        round: Only of this round.
        row: Only of this row.
        op: Only this operation.
        slot: Only about this slot.
        outcome: Only with this outcome.
        acted: Only those that did more than wait.
        before: Only those written before the one with this id.
    """
    given = {"round": round, "row": row, "op": op, "slot": slot, "outcome": outcome}
    chosen = {name: value for name, value in given.items() if value is not None}
    conditions = [f'"{name}" = ?' for name in chosen]
    values: list[Any] = [*chosen.values()]
    if acted:
        conditions.append("op <> 'WAIT'")
    if before is not None:
        conditions.append("id < ?")
        values.append(before)
    where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
    rows = ask(
        run,
        'SELECT *, (SELECT data FROM events WHERE events."round" = decisions."round" '
        'AND events."row" = decisions."row" AND events.step = decisions.step AND kind = ? LIMIT 1) '
        f"AS explanation FROM decisions {where}ORDER BY id DESC LIMIT ?",
        [EventKind.DECISION_EXPLAINED, *values, MOST_DECISIONS],
    )
    return {"decisions": [_decision(found) for found in rows]}


def _decision(found: dict[str, Any]) -> dict[str, Any]:
    for name in _JSON:
        found[name] = unfolded(found[name])
    heads = {
        head: {
            "choice": found.pop(head),
            "probability": found.pop(f"confidence_{head}"),
            "valid": found.pop(f"valid_{head}"),
        }
        for head in HEAD_NAMES
    }
    return {**found, "heads": heads}


def read_foreseen(run: StoredRun, round: int) -> dict[str, Any]:
    """Return what the critic predicted at decisions of a round, and what came of them.

    That is what was paid from there on, and beside it the potential that had been paid before: the
    critic is not asked to foresee what is known already.
    """
    rows = ask(
        run,
        'SELECT "row", step, op, value, potential, reward FROM decisions '
        'WHERE "round" = ? ORDER BY "row", step LIMIT 100000',
        [round],
    )
    discount = _discount(run)
    points: list[list[Any]] = []
    ahead, at = 0.0, None
    for found in reversed(rows):
        if found["row"] != at:
            ahead, at = 0.0, found["row"]
        if not isinstance(found["reward"], int | float):
            continue
        ahead = found["reward"] + discount * ahead
        if isinstance(found["value"], int | float):
            before = found["potential"] if isinstance(found["potential"], int | float) else 0.0
            real = ahead + before
            points.append([found["value"], real, found["row"], found["step"], found["op"]])
    every = max(1, math.ceil(len(points) / MOST_FORESEEN))
    return {"round": round, "discount": discount, "every": every, "points": points[::every]}


def _discount(run: StoredRun) -> float:
    config = unfolded(ask(run, "SELECT config FROM runs LIMIT 1")[0]["config"])
    found = config.get("ppo") if isinstance(config, Mapping) else None
    gamma = found.get("gamma") if isinstance(found, Mapping) else None
    return float(gamma) if isinstance(gamma, int | float) else 1.0
