"""Evaluate a trained controller on digits: greedy on fresh seeds, against waiting and random."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.table import print_table


def main(arguments: Sequence[str]) -> int:
    """Evaluate the policy of a training run and print what must hold of it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks digits_learning", description=__doc__
    )
    parser.add_argument("run", type=Path, help="folder that `esper train digits --out` wrote")
    parser.add_argument("--seeds", type=int, default=20, help="fresh seeds (default: 20)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = judge(options.run, options.seeds, options.device)
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print_table(["what must hold", "measured", "holds"], result["criteria"])
    print_table(["controller", "test gain", "return", "germinated", "fossilized"], result["table"])
    return 0 if all(holds == "yes" for _, _, holds in result["criteria"]) else 1


def judge(run: Path, seeds: int, device: str) -> dict[str, Any]:
    """Return the criteria with what was measured, and one row per controller."""
    import esper
    from esper.simic.training.config import TrainConfig
    from esper.simic.training.evaluation import Evaluator, paired_interval
    from esper.tamiyo.controllers.policy_file import load_policy

    with esper.open_run(run) as stored:
        config = TrainConfig.from_mapping(dict(stored.info.config or {})).replace(device=device)
        updates = stored.rows(
            "updates", columns=("round", "explained_variance", "approx_kl"), where="is_last = 1"
        )
    late = updates[-max(1, len(updates) // 4) :]
    explained = fmean(row["explained_variance"] for row in late)
    moved = median(row["approx_kl"] for row in updates)
    evaluator = Evaluator(config, seeds)
    where = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    played = {}
    for name, controller in (
        ("learned, greedy", load_policy(run, device=where)),
        ("random", "random"),
        ("heuristic", "heuristic"),
    ):
        print(f"playing {seeds} seeds: {name}", file=sys.stderr, flush=True)
        played[name] = evaluator.evaluate(controller)
    own, chance = played["learned, greedy"], played["random"]
    gain = paired_interval(own.test_gains)
    over_waiting = paired_interval(own.returns - own.twin_returns)
    over_random = paired_interval(own.returns - chance.returns)
    early, germinations = own.early_fossilization, float(own.germinated.double().mean())

    def criterion(what: str, measured: object, holds: bool) -> list[str]:
        return [what, str(measured), "yes" if holds else "no"]

    return {
        "run": str(run),
        "seeds": seeds,
        "criteria": [
            criterion("test accuracy over the twin, 95 % interval above 0", gain, gain.low > 0),
            criterion("return over waiting, above 0", over_waiting, over_waiting.low > 0),
            criterion("return over random, above 0", over_random, over_random.low > 0),
            criterion(
                "explained variance, last quarter > 0.5", f"{explained:.2f}", explained > 0.5
            ),
            criterion("median KL in 1e-4 to 3e-2", f"{moved:.2g}", 1e-4 <= moved <= 3e-2),
            criterion("early seeds fossilized >= 30 %", _share(early), (early or 0.0) >= 0.3),
            criterion("germinations an episode >= 0.5", f"{germinations:.2f}", germinations >= 0.5),
        ],
        "table": [
            [
                name,
                str(paired_interval(each.test_gains)),
                str(paired_interval(each.returns)),
                f"{float(each.germinated.double().mean()):.2f}",
                f"{float(each.fossilized.double().mean()):.2f}",
            ]
            for name, each in played.items()
        ],
    }


def _share(value: float | None) -> str:
    return "none germinated" if value is None else f"{value:.0%}"
