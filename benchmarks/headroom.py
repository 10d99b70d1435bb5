"""How much growing is worth on every task of the arena: the best of 16 plans over waiting.

All plans with all seeds are rows of one population, the waiting host among them, so every row has a
twin with the same initial weights and batches. The learning rate is the one at which the waiting
host does best: that of `esper.lab.tasks.member`, or of `--tuned`, what `python -m benchmarks
tune_hosts` wrote, which also says how good wider hosts are. Plans name one of three slots, so
members of three blocks are measured; what growing brings to residual hosts is left for the claim.

The best plan is chosen on one half of the seeds and its gain taken on the other; the second
estimate leaves out one seed at a time, chooses on all others, and is as fair but uses every seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
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
    Recipe,
    add_member_options,
    add_recipe_options,
    is_cuda,
    load,
    members_of,
    read_lines,
    work_through,
)
from benchmarks.table import print_table
from benchmarks.tune_hosts import RATES, best_by_member
from esper.lab.proof.plans import STANDARD_PLANS, Plan
from esper.lab.tasks.member import Member
from esper.leyline.controller import ControllerContext
from esper.leyline.stages import SeedStage
from esper.simic.training.evaluation import Interval, paired_interval
from esper.tamiyo.controllers.schedule import ScheduleController, parse_schedule


@dataclass(frozen=True)
class Job:
    """One member with all its plans."""

    member: Member
    learning_rate: float
    recipe: Recipe
    plans: tuple[Plan, ...]
    seeds: tuple[int, ...]
    min_training: int
    folder: Path | None
    device: str
    strategy: str
    bf16: bool
    test_limit: int | None
    deadline: float


def run(job: Job) -> dict[str, Any]:
    """Let every plan grow every seed's network, and return all scores."""
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
        "member": job.member.label,
        "data": job.member.data,
        "host": job.member.host,
        "train_size": job.member.train_size,
        "width": job.member.width,
        "learning_rate": job.learning_rate,
        **dataclasses.asdict(job.recipe),
        "epochs": epochs,
        "horizon": horizon,
        "seeds": list(job.seeds),
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
    """Say how much better the wider host is at its own rate than the waiting one at its own."""
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
    parser.add_argument(
        "--data", type=Path, help="folder of the data; the usual places if not given"
    )
    parser.add_argument("--out", type=Path, default=Path("headroom.jsonl"))
    parser.add_argument("--tuned", type=Path, help="what tune_hosts wrote")
    parser.add_argument("--summary", type=Path, help="print the tables of this file and end")
    parser.add_argument("--seconds", type=float, default=500.0, help="stop by then")
    add_member_options(parser)
    parser.add_argument("--plans", nargs="+", help="parts of names; all by default")
    parser.add_argument("--learning-rate", type=float, help="where none is tuned")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--horizon", type=int, help="epochs; the members' own by default")
    add_recipe_options(parser, for_seeds=True)
    parser.add_argument("--min-training", type=int, default=10, help="epochs before blending")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--strategy", default=None, help="stacked on a CUDA device by default")
    parser.add_argument("--fp32", action="store_true", help="no BF16 on a CUDA device")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 chooses")
    parser.add_argument("--test-limit", type=int, help="only so many test images, for trials")
    options = parser.parse_args(arguments)
    tuned = {}
    if options.tuned:
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
        print_summary(read_lines(options.summary), tuned)
        return 0
    if options.seeds < 2:
        parser.error("an interval needs at least 2 seeds")
    started = time.time()
    on_cuda = is_cuda(options.device)
    plans = tuple(
        plan
        for plan in STANDARD_PLANS
        if options.plans is None or any(part in plan.name for part in options.plans)
    )
    jobs = []
    for member in members_of(options.family, options.split, options.members):
        # What growing brings to residual hosts is left for the claim.
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
                recipe=Recipe.of(options),
                plans=plans,
                seeds=tuple(range(options.first_seed, options.first_seed + options.seeds)),
                min_training=options.min_training,
                folder=options.data,
                device=options.device,
                strategy=options.strategy or ("stacked" if on_cuda else "sequential"),
                bf16=on_cuda and not options.fp32,
                test_limit=options.test_limit,
                # Rows that are cut short are still scored, which takes a while.
                deadline=started + options.seconds - min(45.0, options.seconds / 4),
            )
        )
    processes = options.jobs or (4 if on_cuda else 1)
    rows = options.seeds * (len(plans) + 1)
    print(f"{len(jobs)} members with {rows} rows each, {processes} at once", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    records = []
    with options.out.open("a", encoding="utf-8") as file:
        for record in work_through(run, jobs, processes, started + options.seconds):
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            name = record.get("member") or f"failed: {record.get('error')}"
            spent = time.time() - started
            print(f"[{spent:4.0f} s] {len(records)}/{len(jobs)} {name}", flush=True)
    print(f"{len(records)} of {len(jobs)} done after {time.time() - started:.0f} s\n")
    print_summary(records, tuned)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
