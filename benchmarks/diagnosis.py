"""Print the figures of document 004 for a training run: does the controller collapse?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.table import print_table

PARTS = 4

THEIRS = {
    "blueprint entropy given GERMINATE": "0.125 to 0.009",
    "tempo entropy given GERMINATE": "0.125 to 0.011",
    "op entropy": "0.52 to 0.17",
    "explained variance": "0.0001",
    "share of the potential": "–",
    "median KL": "1e-9",
    "WAIT": "88.4 %",
    "seeds germinated": "997",
    "seeds fossilized": "4.0 %",
    "seeds pruned": "90.8 %",
}
"""What document 004 reports of its run. Its entropies are over all steps, and most steps of a head
that has nothing to say count as none; ours are over the steps in which the head decides."""


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks diagnosis", description=__doc__)
    parser.add_argument("run", type=Path, help="folder that `esper train --out` wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    found = diagnose(options.run)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print_table(
        ["figure", "document 004", *(part["rounds"] for part in found)],
        [[name, theirs, *(_text(part[name]) for part in found)] for name, theirs in THEIRS.items()],
    )
    return 0


def diagnose(run: Path) -> list[dict[str, Any]]:
    """Return the figures of a run, quarter by quarter of its rounds."""
    import esper
    from esper.leyline.errors import UsageError

    with esper.open_run(run) as stored:
        rounds = stored.rows("rounds", columns=("round", "op_counts"))
        fates = stored.rows("seeds", columns=("round", "fate"))
        updates = stored.rows(
            "updates",
            columns=("round", "explained_variance", "potential_share", "approx_kl"),
            where="is_last = 1",
        )
        heads = stored.rows(
            "update_heads",
            columns=("round", "head", "entropy_conditional"),
            where="head IN ('op', 'blueprint', 'tempo')",
        )
    numbers = sorted(row["round"] for row in rounds)
    if not numbers:
        raise UsageError(f"{run} has no round yet; train for a few rounds first")
    size = -(-len(numbers) // min(PARTS, len(numbers)))
    parts = [numbers[first : first + size] for first in range(0, len(numbers), size)]
    tables = (rounds, fates, updates, heads)
    return [
        _figures(part, *([row for row in rows if row["round"] in part] for rows in tables))
        for part in parts
    ]


Rows = Sequence[Mapping[str, Any]]


def _figures(part: Sequence[int], rounds: Rows, fates: Rows, updates: Rows, heads: Rows) -> Any:
    entropies = {
        head: [
            row["entropy_conditional"]
            for row in heads
            if row["head"] == head and row["entropy_conditional"] is not None
        ]
        for head in ("op", "blueprint", "tempo")
    }
    counts: dict[str, int] = {}
    for row in rounds:
        for op, count in row["op_counts"].items():
            counts[op] = counts.get(op, 0) + count
    explained, potential = (
        [row[name] for row in updates if row[name] is not None]
        for name in ("explained_variance", "potential_share")
    )
    seeds = [row["fate"] for row in fates]

    def share(count: int, total: int) -> float | None:
        return count / total if total else None

    return {
        "rounds": f"rounds {part[0] + 1} to {part[-1] + 1}",
        "blueprint entropy given GERMINATE": _mean(entropies["blueprint"]),
        "tempo entropy given GERMINATE": _mean(entropies["tempo"]),
        "op entropy": _mean(entropies["op"]),
        "explained variance": _mean(explained),
        "share of the potential": _mean(potential),
        "median KL": median(row["approx_kl"] for row in updates) if updates else None,
        "WAIT": share(counts.get("WAIT", 0), sum(counts.values())),
        "seeds germinated": len(seeds),
        "seeds fossilized": share(seeds.count("fossilized"), len(seeds)),
        "seeds pruned": share(seeds.count("pruned"), len(seeds)),
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _text(value: float | int | None) -> str:
    return "–" if value is None else str(value) if isinstance(value, int) else f"{value:.3g}"
