"""What a training run came to, from its store: as plain data, and as a table for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from esper.cli.output import safe

_LATE_SHARE = 0.1
"""The end of a run: its last tenth, at least one round."""


def summarize_training(folder: Path) -> dict[str, Any]:
    """Return how the first round went, how the last tenth did, and where the policy is."""
    from esper.nissa import open_run
    from esper.tamiyo.controllers.policy_file import find_policy

    with open_run(folder) as stored:
        info = stored.info
        rounds = stored.rows("rounds")
        updates = stored.rows(
            "updates", columns=("round", "explained_variance", "approx_kl"), where="is_last = 1"
        )
    late = rounds[-max(1, round(_LATE_SHARE * len(rounds))) :]
    late_updates = updates[-len(late) :] if late else []
    return {
        "run": str(folder),
        "recipe": info.recipe,
        "task": info.task,
        "seed": info.seed,
        "device": info.device,
        "rounds": len(rounds),
        "episodes": sum(row["episodes"] or 0 for row in rounds),
        "env_steps": rounds[-1]["env_steps"] if rounds else 0,
        "seconds": sum(row["seconds"] or 0.0 for row in rounds),
        "first": _means(rounds[:1], updates[:1]),
        "last": {"rounds": len(late), **_means(late, late_updates)},
        "evaluation": _last_evaluation(rounds),
        "policy": str(find_policy(folder)),
    }


def print_summary(console: Console, document: dict[str, Any]) -> None:
    """Print what was learned, and how to use it."""
    first, last = document["first"], document["last"]
    title = f"Trained on {document['task']}: {document['rounds']} rounds, "
    title += f"{document['env_steps']:,} decisions, {document['seconds']:.0f} s"
    table = Table(title=safe(title), title_justify="left")
    table.add_column("")
    table.add_column("first round", justify="right")
    count = last["rounds"]
    table.add_column("last round" if count == 1 else f"last {count} rounds", justify="right")
    for key, name, form in _SHOWN:
        if first.get(key) is not None or last.get(key) is not None:
            table.add_row(name, _text(first.get(key), form), _text(last.get(key), form))
    greedy = document["evaluation"]
    if greedy is not None:
        gain = _text(greedy["gain"], "{:+.2f}")
        told = f"{greedy['episodes']} episodes after round {greedy['round'] + 1}"
        table.add_row("gain, greedy policy, points", "–", gain)
        table.caption, table.caption_justify = f"greedy: {told}", "left"
    console.print(table)
    console.print(safe(f"policy: {document['policy']}"), soft_wrap=True)
    console.print(safe(f"report: {document['report']}"), soft_wrap=True)


_SHOWN = (
    ("return_mean", "return", "{:+.3f}"),
    ("gain_mean", "gain over the twin, points", "{:+.2f}"),
    ("germinations", "seeds an episode", "{:.2f}"),
    ("fossilization_rate", "early seeds fossilized", "{:.0%}"),
    ("wait_share_free", "WAIT on free decisions", "{:.0%}"),
    ("explained_variance", "explained variance", "{:.2f}"),
    ("approx_kl", "KL of an update, nats", "{:.2g}"),
)


def _means(rounds: list[dict[str, Any]], updates: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("return_mean", "gain_mean", "fossilization_rate", "wait_share_free")
    found = {name: _mean([row[name] for row in rounds]) for name in names}
    episodes = sum(row["episodes"] or 0 for row in rounds)
    germinated = sum(row["seeds_germinated"] or 0 for row in rounds)
    found["germinations"] = germinated / episodes if episodes else None
    for name in ("explained_variance", "approx_kl"):
        found[name] = _mean([row[name] for row in updates])
    return found


def _last_evaluation(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the last greedy evaluation, None where there was none."""
    for row in reversed(rounds):
        if row["eval_episodes"]:
            return {
                "round": row["round"],
                "episodes": row["eval_episodes"],
                "return": row["eval_return"],
                "gain": row["eval_gain"],
            }
    return None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
