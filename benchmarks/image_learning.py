"""Evaluate a trained controller on images: greedy on fresh seeds, against simple controls.

It is compared with waiting, with random choices, with the heuristic and with fixed plans. Plans are
tried on a third of the seeds, the best few of them on all; the best is the one with the highest
return on the very seeds it is compared on, which is to its favour.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.table import print_table

FINALISTS = 6
MARGIN = 0.5
"""Test points by which the controller may be behind the best plan."""


def main(arguments: Sequence[str]) -> int:
    """Evaluate the policy of a training run and print what must hold of it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks image_learning", description=__doc__
    )
    parser.add_argument("run", type=Path, help="folder that `esper train cifar16 --out` wrote")
    parser.add_argument("--seeds", type=int, default=24, help="fresh seeds (default: 24)")
    parser.add_argument("--plans", type=int, default=45, help="fixed plans (default: 45)")
    parser.add_argument("--data", help="where data files lie (default: as in training)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="file for every number")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = judge(options.run, options.seeds, options.plans, options.device, options.data)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print_table(["what must hold", "measured", "holds"], result["criteria"])
    print_table(
        ["arm", "test gain", "return", "parameters", "FLOPs", "germinated"], result["table"]
    )
    return 0 if all(holds == "yes" for _, _, holds in result["criteria"]) else 1


def judge(
    run: Path, seeds: int, plans: int, device: str, data: str | None = None
) -> dict[str, Any]:
    """Return the criteria with what was measured, and one row per arm."""
    import esper
    from esper.simic.training.config import TrainConfig
    from esper.simic.training.evaluation import Evaluator, paired_interval
    from esper.tamiyo.controllers.policy_file import load_policy

    with esper.open_run(run) as stored:
        config = TrainConfig.from_mapping(dict(stored.info.config or {})).replace(device=device)
    if data is not None:
        config = config.replace(data=data)
    evaluator = Evaluator(config, seeds)
    where = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    played: dict[str, Any] = {}
    for name, controller in (
        ("learned, greedy", load_policy(run, device=where)),
        ("random", "random"),
        ("heuristic", "heuristic"),
    ):
        started = time.perf_counter()
        played[name] = evaluator.evaluate(controller)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    own = played["learned, greedy"]
    best = _find_best_plan(evaluator, seeds, plans)
    over = {
        "waiting": paired_interval(own.returns - own.twin_returns),
        "random": paired_interval(own.returns - played["random"].returns),
        "the heuristic": paired_interval(own.returns - played["heuristic"].returns),
    }
    behind = paired_interval(own.test_gains - best["test_gains"])
    criteria = [
        [f"return over {name}, 95 % interval above 0", str(each), "yes" if each.low > 0 else "no"]
        for name, each in over.items()
    ]
    criteria.append(
        [
            f"test points over the best of {plans} plans ({best['name']}), mean above -{MARGIN}",
            str(behind),
            "yes" if behind.mean > -MARGIN else "no",
        ]
    )
    table = [
        [
            name,
            str(paired_interval(each.test_gains)),
            str(paired_interval(each.returns)),
            f"{float(each.parameter_ratios.mean()):.2f} x",
            f"{float(each.flop_ratios.mean()):.2f} x",
            f"{float(each.germinated.double().mean()):.2f}",
        ]
        for name, each in played.items()
    ]
    gain, paid = paired_interval(best["test_gains"]), paired_interval(best["returns"])
    table.append([f"plan: {best['name']}", str(gain), str(paid), "", "", ""])
    return {
        "run": str(run),
        "seeds": seeds,
        "criteria": criteria,
        "table": table,
        "plans": best["tried"],
    }


def _find_best_plan(evaluator: Any, seeds: int, count: int) -> dict[str, Any]:
    """Return the plan with the highest mean return, with its returns and test gains by seed."""
    from esper.lab.proof.plans import make_plans

    plans = make_plans(0, count, ("cnn",))
    numbers = list(range(max(1, seeds // 3)))
    first = [float(each["returns"].mean()) for each in _play_plans(evaluator, plans, numbers)]
    order = sorted(range(len(plans)), key=lambda index: -first[index])[:FINALISTS]
    finalists = [plans[index] for index in order]
    found = _play_plans(evaluator, finalists, list(range(seeds)), has_test=True)
    means = [float(each["returns"].mean()) for each in found]
    winner = max(range(len(found)), key=means.__getitem__)
    tried = {plan.name: value for plan, value in zip(plans, first, strict=True)}
    return {"name": finalists[winner].name, "tried": tried, **found[winner]}


def _play_plans(
    evaluator: Any, plans: Sequence[Any], numbers: list[int], *, has_test: bool = False
) -> list[dict[str, Tensor]]:
    """Let every plan grow the network of every seed, all side by side."""
    from esper.leyline.controller import ControllerContext
    from esper.simic.rewards import make_reward
    from esper.simic.training.evaluation import play_episodes
    from esper.tamiyo.controllers.schedule import ScheduleController, parse_schedule

    started = time.perf_counter()
    curves, _, twin_test = evaluator._play_twins()
    plan, population = evaluator._row_source.evaluation(numbers * len(plans))
    try:
        names = next(iter(plan.slot_names.values()))
        context = ControllerContext(slot_names=names)
        schedules = [parse_schedule(each.entries, context) for each in plans for _ in numbers]
        controller = ScheduleController(schedules, context, is_quiet=True)
        reward = make_reward(evaluator.config.reward)
        twins = curves[numbers].repeat(len(plans), 1)
        outcome = play_episodes(population, controller, reward, plan, twins)
        test = population.test_scores() if has_test else None
    finally:
        population.close()
    spent = time.perf_counter() - started
    print(f"{len(plans)} plans on {len(numbers)} seeds: {spent:.0f} s", file=sys.stderr, flush=True)
    found = []
    for index in range(len(plans)):
        own = slice(index * len(numbers), (index + 1) * len(numbers))
        result = {"returns": outcome.returns[own]}
        if test is not None:
            result["test_gains"] = test[own] - twin_test[numbers]
        found.append(result)
    return found
