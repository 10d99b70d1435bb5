"""Compare the two TRAINING modes over all blueprints and slots of digits.

A seed is germinated at epoch 10, trained in isolation, blended and fossilized, in both modes, from
the same initial weights and with the same batches. Reported per blueprint, over slots and seeds:
what switching the seed fully on at the end of TRAINING does to the validation score, the final test
accuracy over the twin's, and the time of an epoch in TRAINING.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections import defaultdict
from statistics import fmean
from typing import Any

from benchmarks.pool import run_all
from benchmarks.table import print_table

MODES = ("straight_through", "shadow")
GERMINATE_AT = 10

Job = tuple[str, str, str, int, str]


def measure(job: Job) -> dict[str, Any]:
    """Grow one seed in one slot in one mode; job = (task, blueprint, slot, seed, mode)."""
    import torch

    from esper.kasmina.contribution import values_in_points
    from esper.kasmina.evaluation import BatchEvaluator
    from esper.kasmina.slot import SlotMode
    from esper.lab.tasks import get_task
    from esper.lab.tasks.request import task_config, task_run

    name, blueprint, slot, seed, mode = job
    task = get_task(name)
    config = task_config(task, seed=seed, twin=False, keep="last")
    config = config.replace(garden=config.garden.replace(training_mode=mode))
    run = task_run(task, task.load(), config=config, controller="wait")
    garden = run.garden
    evaluator: BatchEvaluator = run._val

    def score(network: Any) -> float:
        everything = torch.ones((1, len(network.slot_names)), dtype=torch.bool)
        return float(values_in_points(*evaluator.measure(network, everything)).mean())

    switched = None
    training_s: list[float] = []
    started = time.process_time()
    for record in run.epochs():
        spent, started = time.process_time() - started, time.process_time()
        # The run waits; this script is the controller. What it does now, the next epoch trains.
        if blueprint == "none":
            continue
        stage = garden.slots[slot].stage.name
        if stage == "TRAINING":
            training_s.append(spent)
        if record.epoch == GERMINATE_AT:
            garden.germinate(slot, blueprint)
        elif stage in ("GERMINATED", "BLENDING"):
            garden.advance(slot)
        elif stage == "TRAINING":
            full = copy.deepcopy(garden)
            index = full.slot_names.index(slot)
            full.seedbed[index].mode = int(SlotMode.BLEND)
            full.seedbed[index].alpha.fill_(1.0)
            before, after = record.val_score, score(full)
            if garden.advance(slot).ok:
                switched = after - before
        elif stage == "HOLDING":
            garden.fossilize(slot)
        started = time.process_time()
    return {
        "blueprint": blueprint,
        "slot": slot,
        "seed": seed,
        "mode": mode,
        "switched": switched,
        "test": run.finish().summary.test_score,
        "stage": garden.slots[slot].stage.name,
        "training_s": fmean(training_s) if training_s else None,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks training_modes", description=__doc__
    )
    parser.add_argument("--task", default="digits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("an interval needs at least 2 seeds")

    from esper.kasmina.blueprints import blueprint_names, selectable
    from esper.lab.tasks import get_task
    from esper.simic.training.evaluation import paired_interval

    task = get_task(options.task)
    blueprints = [blueprint_names()[index] for index in selectable(task.topology)]
    slots, seeds = list(task.slot_paths), range(options.seeds)
    jobs: list[Job] = [(options.task, "none", slots[0], seed, MODES[0]) for seed in seeds]
    for blueprint, slot, seed, mode in itertools.product(blueprints, slots, seeds, MODES):
        jobs.append((options.task, blueprint, slot, seed, mode))
    results = run_all(measure, jobs, options.jobs)
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    twins = {r["seed"]: r["test"] for r in results if r["blueprint"] == "none"}
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        if result["blueprint"] != "none":
            grouped["all", result["mode"]].append(result)
            grouped[result["blueprint"], result["mode"]].append(result)
            grouped[f"slot {result['slot']}", result["mode"]].append(result)
    rows = []
    for (name, mode), members in sorted(grouped.items()):
        gains = [m["test"] - twins[m["seed"]] for m in members]
        switched = [m["switched"] for m in members if m["switched"] is not None]
        rows.append(
            [
                name,
                mode,
                len(members),
                f"{fmean(switched):+.1f}" if switched else "–",
                paired_interval(gains),
                f"{1000 * fmean(m['training_s'] for m in members):.0f} ms",
            ]
        )
    print_table(
        ["blueprint", "mode", "runs", "switched on", "test over twin", "TRAINING epoch"], rows
    )
    paired = [
        b["test"] - a["test"]
        for a, b in zip(grouped["all", MODES[0]], grouped["all", MODES[1]], strict=True)
    ]
    print(f"\nshadow minus straight_through, paired: {paired_interval(paired)} points")
    return 0
