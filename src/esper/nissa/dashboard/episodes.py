"""Reads one episode: lanes, seeds, decisions, and the critic's predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from esper.leyline.actions import HEAD_NAMES
from esper.nissa.dashboard.stream import recorded_rows
from esper.nissa.reader import StoredRun, read_history, read_seeds
from esper.nissa.report.lanes import Frame, draw_slots, read_lanes
from esper.nissa.report.markup import Scale, counted, element, visible
from esper.nissa.report.page import MARGIN, NAMESPACE
from esper.nissa.report.panels import ask, unfolded
from esper.nissa.report.stacks import awake_counts, draw_stacks, read_stacks
from esper.nissa.schema import EventKind

MOST_EPOCHS = 3_000
"""Largest number of epochs that are read; longer episodes are read with a stride."""

MOST_LANE_EPOCHS = 600
"""The same for lanes, which are as wide as a screen; zooming in reads and draws them again."""

MOST_DECISIONS = 50
MOST_FORESEEN = 3_000
_MOST_SEED_DECISIONS = 1_000

_HERE = '"round" = ? AND "row" = ?'
_JSON = ("alternatives", "reward_terms", "reward_details", "explanation")


def read_garden(run: StoredRun, round: int, row: int) -> dict[str, Any]:
    """Return the facts of an episode: task, scores, seeds and stacks."""
    here = [round, row]
    span = ask(run, f"SELECT MAX(step) AS last, COUNT(*) AS n FROM epochs WHERE {_HERE}", here)[0]
    every = max(1, math.ceil(span["n"] / MOST_EPOCHS))
    episode = ask(
        run,
        "SELECT task, env_seed, episodic_return, final_score, twin_score, gain, parameter_ratio, "
        "seeds_germinated, seeds_fossilized, seeds_pruned, rollback_reason "
        f"FROM episodes WHERE {_HERE} LIMIT 1",
        here,
    )
    has_stacks = ask(run, f"SELECT 1 FROM stacks WHERE {_HERE} LIMIT 1", here)
    stacks = read_stacks(read_history(run, every, round=round, row=row)) if has_stacks else []
    return {
        "round": round,
        "row": row,
        "rows": recorded_rows(run, round),
        "last": span["last"],
        "every": every,
        "slots": _slots(run, here),
        "stacks": [
            {
                "awake": stack.spans[-1][2],
                "blocks": stack.blocks,
                "text": f"{visible(stack.name, limit=40)}: {awake_counts(stack)} blocks awake",
            }
            for stack in stacks
        ],
        "seeds": ask(
            run,
            "SELECT ordinal, slot, blueprint, germinated, ended, fate, parameters, flops, "
            f"contribution, contribution_se, improvement FROM seeds WHERE {_HERE} ORDER BY ordinal",
            here,
        ),
        "epochs": ask(
            run,
            "SELECT step, val_score, twin_score FROM epochs "
            f"WHERE {_HERE} AND step % ? = 0 ORDER BY step",
            [*here, every],
        ),
        "episode": episode[0] if episode else None,
        "worth": _worth(run, here),
    }


def _slots(run: StoredRun, here: Sequence[int]) -> list[str]:
    """Return the slots that decisions of an episode may be about."""
    named = unfolded(ask(run, "SELECT slots FROM runs LIMIT 1")[0]["slots"])
    names = [str(name) for name in named] if isinstance(named, list) else []
    rows = ask(run, f"SELECT DISTINCT slot FROM seed_stages WHERE {_HERE} ORDER BY ordinal", here)
    used = [str(one["slot"]) for one in rows]
    return names if set(used) <= set(names) else used


# ---- Lanes: the drawing of the report, at the width and the part of the run that a page shows

_UNIT_PX = 0.65
"""Size of a unit of the drawing on the page, in pixels."""

_FONT_PX = 12.0


def draw_lanes(
    run: StoredRun,
    round: int,
    row: int,
    *,
    epochs: tuple[float, float],
    left: float,
    right: float,
    width: float,
) -> str:
    """Draw what happened at the slots of an episode, or in its stacks, as an SVG.

    Args:
        run: The run.
        round: Its round.
        row: Its row of the round.
        epochs: The first and the last epoch to show.
        left: Where the first epoch is, in pixels from the left.
        right: Where the last epoch is, in pixels from the left.
        width: Width of the drawing in pixels.
    """
    low, high = epochs
    between = (math.floor(low), math.ceil(high) + 1)
    count = f"SELECT COUNT(*) AS n FROM epochs WHERE {_HERE} AND step >= ? AND step <= ?"
    epochs_there = ask(run, count, [round, row, *between])[0]["n"]
    every = max(1, math.ceil(epochs_there / MOST_LANE_EPOCHS))
    history = read_history(run, every, round=round, row=row, between=between)
    frame = Frame(
        Scale(low, high, left / _UNIT_PX, right / _UNIT_PX), width / _UNIT_PX, _FONT_PX / _UNIT_PX
    )
    stacks = read_stacks(history)
    if stacks:
        drawing, height = draw_stacks(stacks, frame, MARGIN)
        drawing.extend(frame.axis(height))
        height += frame.row + MARGIN
        text = "; ".join(f"{one.name}: {awake_counts(one)} blocks awake" for one in stacks)
    else:
        seeds = read_seeds(run, round=round, row=row)
        lanes = read_lanes(history, seeds) if history else []
        drawing, height = draw_slots(lanes, frame, MARGIN, is_live=True)
        text = f"{counted(len(lanes), 'slot')}, {counted(len(seeds), 'seed')}."
    return element(
        "svg",
        *drawing,
        xmlns=NAMESPACE,
        class_="growth lanes",
        role="group",
        aria_label=visible(text, limit=1000),
        viewBox=f"0 0 {frame.width:.1f} {height:.1f}",
    )


def _worth(run: StoredRun, here: Sequence[int]) -> list[dict[str, Any]]:
    """Return the last measured contribution of every seed, pair and set."""
    return ask(
        run,
        "SELECT kind, slot, other, value, se, MAX(step) AS step FROM contributions "
        f"WHERE {_HERE} GROUP BY kind, slot, other ORDER BY kind, slot, other",
        here,
    )


def read_seed(run: StoredRun, round: int, row: int, ordinal: int) -> dict[str, Any] | None:
    """Return the life of one seed, None if there is no such seed."""
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
            [*life, _MOST_SEED_DECISIONS],
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
    """Return decisions with their reasons, the newest first; `before` continues a list.

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
    """Return the critic's predictions at decisions of a round, and the real returns.

    The real return is the sum of later rewards. The potential paid before is listed separately,
    because the critic does not have to predict it.
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
