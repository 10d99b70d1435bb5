"""Measure the gain of the best of 16 plans over waiting, for every member of the arena.

All plans with all seeds, and the host that only waits, are rows of one population, so every row has
a twin with the same initial weights and batches. The learning rate is tuned for the waiting host:
that of `esper.lab.tasks.member`, or that of the file `--tuned`, which `python -m benchmarks
tune_hosts` writes and which also has the scores of wider hosts. Plans name one of three slots, so
members have three blocks. Residual hosts are left out, because claims are measured on them.

There are two estimates of the gain. One chooses the best plan on half of the seeds and measures it
on the other half. The other chooses on all seeds but one and measures on that one, for every seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks._arena import (
    STATIC_FACTORS,
    MemberJob,
    add_member_options,
    add_recipe_options,
    add_run_options,
    is_cuda,
    load,
    members_of,
    read_lines,
    record_all,
)
from benchmarks.table import print_table, require_results
from benchmarks.tune_hosts import RATES, best_by_member
from esper.lab.proof.plans import STANDARD_PLANS, Plan
from esper.leyline.controller import ControllerContext
from esper.leyline.stages import SeedStage
from esper.simic.training.evaluation import Interval, paired_interval
from esper.tamiyo.controllers.schedule import ScheduleController, parse_schedule


@dataclass(frozen=True, kw_only=True)
class Job(MemberJob):
    """One member with all its plans."""

    plans: tuple[Plan, ...]
    min_training: int


def run(job: Job) -> dict[str, Any]:
    """Play every plan on every seed and return the record."""
    from esper.lab.population.engine import PopulationConfig
    from esper.lab.population.population import Population

    started = time.perf_counter()
    task = job.recipe.task(job.member, job.learning_rate)
    horizon = task.config.horizon
    arms: tuple[Plan | None, ...] = (None, *job.plans)
    plan_of_row = [arm for arm in arms for _ in job.seeds]
    config = PopulationConfig(use_bf16=job.bf16, rows_per_stack=len(plan_of_row))
    gates = config.lifecycle.gates.replace(min_training_epochs=job.min_training)
    config = config.replace(lifecycle=config.lifecycle.replace(gates=gates))
    population = Population(
        task,
        len(plan_of_row),
        device=job.device,
        strategy=job.strategy,  # type: ignore[arg-type]
        data=[load(task, job.folder, job.test_limit)],
        config=config,
        row_seeds=list(job.seeds) * len(arms),
    )
    try:
        context = ControllerContext(slot_names=tuple(task.slot_paths))
        schedules = [parse_schedule(plan.entries if plan else (), context) for plan in plan_of_row]
        controller = ScheduleController(schedules, context, is_quiet=True)
        controller.reset(population.rows, population.device)
        signals = population.reset()
        epochs = 1
        while epochs < horizon and time.time() < job.deadline:
            signals = population.step(controller.act(signals, population.masks()))
            epochs += 1
            if epochs % 10 == 0:
                spent = time.perf_counter() - started
                print(f"  {job.member.label}: epoch {epochs}, {spent:.0f} s", flush=True)
        trained = time.perf_counter()
        signals = signals.to("cpu")
        test = population.test_scores().tolist()
        captures = sum(getattr(group.engine, "captures", 0) for group in population.groups)
    finally:
        population.close()
    count = len(job.seeds)
    found = {}
    for number, arm in enumerate(arms):
        rows = slice(number * count, (number + 1) * count)
        seeds = () if arm is None else arm.entries
        grown = signals.stage[rows] == SeedStage.FOSSILIZED
        found["waiting" if arm is None else arm.name] = {
            "test": test[rows],
            "val": signals.val_score[rows].tolist(),
            "parameters": fmean(signals.params[rows].tolist()),
            "flops": fmean(signals.flops[rows].tolist()),
            "fossilized": float(grown.sum()) / (count * len(seeds)) if seeds else 1.0,
            "rolled_back_last": int(signals.rolled_back[rows].sum()),
        }
    return {
        **job.facts(),
        "epochs": epochs,
        "horizon": horizon,
        "strategy": population.strategy,
        "captures": captures,
        "train_s": round(trained - started, 1),
        "test_s": round(time.perf_counter() - trained, 1),
        "arms": found,
    }


def gains(record: dict[str, Any]) -> tuple[Tensor, list[str]]:
    """Return float64 [plans, seeds]: test points over the waiting twin; and the plans' names."""
    arms = dict(record["arms"])
    waiting = torch.tensor(arms.pop("waiting")["test"], dtype=torch.float64)
    table = [torch.tensor(arm["test"], dtype=torch.float64) - waiting for arm in arms.values()]
    return torch.stack(table), list(arms)


def by_halves(table: Tensor) -> tuple[int, Interval]:
    """Choose the best plan on every other seed, and return it with its gain on the others."""
    best = int(table[:, 0::2].mean(1).argmax())
    return best, paired_interval(table[best, 1::2])


def leaving_one_out(table: Tensor) -> tuple[list[int], Interval]:
    """Choose for each seed the plan that is best on all others, and return choices and gain."""
    seeds = table.shape[1]
    rest = (table.sum(1, keepdim=True) - table) / (seeds - 1)
    chosen = rest.argmax(0)
    return chosen.tolist(), paired_interval(table[chosen, torch.arange(seeds)])


def print_summary(records: list[dict[str, Any]], tuned: dict[str, dict[str, Any]]) -> None:
    """Print the gains of every member, then every plan of every member."""
    good = [record for record in records if "error" not in record]
    for record in records:
        if "error" in record:
            print(f"failed: {record['item']}: {record['error']}\n{record['traceback']}")
    rows = []
    for record in good:
        table, names = gains(record)
        waiting = record["arms"]["waiting"]
        chosen, fair = leaving_one_out(table)
        usual = max(set(chosen), key=chosen.count)
        arm = record["arms"][names[usual]]
        halves = "–"
        if table.shape[1] >= 4:
            best, interval = by_halves(table)
            halves = f"{names[best]} {interval}"
        rows.append(
            [
                record["member"],
                f"{record['learning_rate']:g}",
                f"{record['epochs']}",
                f"{fmean(waiting['test']):.2f}",
                f"{names[usual]} ({chosen.count(usual)} of {len(chosen)})",
                str(fair),
                halves,
                f"{waiting['parameters']:,.0f} → {arm['parameters']:,.0f}",
                f"{waiting['flops'] / 1e6:.2f} → {arm['flops'] / 1e6:.2f}",
                *(_static(record, factor, tuned) for factor in STATIC_FACTORS),
            ]
        )
    if rows:
        header = ["member", "rate", "epochs", "waiting", "best plan", "gain, one left out"]
        header += ["gain, by halves", "parameters", "MFLOP"]
        header += [f"{factor:g} × width" for factor in STATIC_FACTORS]
        print_table(header, rows)
        above = sum(leaving_one_out(gains(record)[0])[1].low > 0 for record in good)
        print(f"\n{above} of {len(good)} members have an interval above 0 (one left out)\n")
    for record in good:
        print(f"{record['member']}: gain in test points over the twin, {record['train_s']} s")
        table, names = gains(record)
        order = table.mean(1).argsort(descending=True).tolist()
        lines = []
        for index in order:
            arm = record["arms"][names[index]]
            lines.append(
                [
                    names[index],
                    str(paired_interval(table[index])),
                    f"{arm['parameters']:,.0f}",
                    f"{arm['flops'] / 1e6:.2f}",
                    f"{arm['fossilized']:.0%}",
                ]
            )
        print_table(["plan", "gain", "parameters", "MFLOP", "fossilized"], lines)
        print()


def _static(record: dict[str, Any], factor: float, tuned: dict[str, dict[str, Any]]) -> str:
    """Return the gain of a wider host over the host, each at its best rate."""
    width = record["width"]
    wide = tuned.get(record["member"].replace(f" {width}x", f" {round(factor * width)}x", 1))
    own = tuned.get(record["member"])
    if wide is None or own is None:
        return "–"
    difference = torch.tensor(wide["test"]) - torch.tensor(own["test"])
    if len(difference) < 2:
        return "–"
    return (
        f"{paired_interval(difference)}, {wide['parameters']:,} parameters, "
        f"{wide['flops'] / 1e6:.2f} MFLOP"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks headroom",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_options(parser, out="headroom.jsonl", seconds=500.0, seeds=8, first_seed=100)
    parser.add_argument("--tuned", type=Path, help="a file that tune_hosts wrote")
    add_member_options(parser)
    parser.add_argument("--plans", nargs="+", help="parts of names; all by default")
    parser.add_argument("--learning-rate", type=float, help="where none is tuned")
    add_recipe_options(parser, for_seeds=True)
    parser.add_argument("--min-training", type=int, default=10, help="epochs before blending")
    options = parser.parse_args(arguments)
    tuned = {}
    if options.tuned:
        require_results(options.tuned)
        lines = read_lines(options.tuned)
        tuned = best_by_member(
            [each for each in lines if each.get("optimizer") == options.optimizer]
        )
        if not tuned:
            parser.error(
                f"{options.tuned} has no hosts tuned by {options.optimizer}; "
                f"run tune_hosts --optimizer {options.optimizer} first"
            )
    if options.summary is not None:
        require_results(options.summary)
        print_summary(read_lines(options.summary), tuned)
        return 0
    if options.seeds < 2:
        parser.error("an interval needs at least 2 seeds")
    started = time.time()
    plans = tuple(
        plan
        for plan in STANDARD_PLANS
        if options.plans is None or any(part in plan.name for part in options.plans)
    )
    # Rows that are cut short are still scored, which takes time.
    deadline = started + options.seconds - min(45.0, options.seconds / 4)
    settings = MemberJob.settings_of(options)
    jobs = []
    for member in members_of(options.family, options.split, options.members):
        # Claims are measured on residual hosts.
        if member.host == "residual":
            continue
        if options.horizon:
            member = dataclasses.replace(member, horizon=options.horizon)
        own = member.learning_rate if options.optimizer == "sgd" else RATES["adamw"][0]
        rate = options.learning_rate or own
        if member.label in tuned:
            rate = tuned[member.label]["learning_rate"]
        jobs.append(
            Job(
                member=member,
                learning_rate=rate,
                plans=plans,
                min_training=options.min_training,
                deadline=deadline,
                **settings,
            )
        )
    processes = options.jobs or (4 if is_cuda(options.device) else 1)
    rows = options.seeds * (len(plans) + 1)
    print(f"{len(jobs)} members with {rows} rows each, {processes} at once", flush=True)
    records = record_all(run, jobs, processes, options, lambda record: record["member"])
    print_summary(records, tuned)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
