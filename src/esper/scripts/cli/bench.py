"""Measure throughput on this machine, relative to a reference.

Targets: engine (many networks in training, on random data), observation, policy, update (a PPO
update), family (rows of several architectures against as many of one) and round (whole rounds of a
recipe). Policy and update are compared with sb3-contrib's RecurrentPPO if it is installed, else
with plain steps of the same network.

Examples:
  esper bench                                  the population engine, on the best device here
  esper bench engine --device cuda --rows 16 64 256 --json
  esper bench engine --device cpu --task digits --rows 2
  esper bench observation                      observations, against plain Python
  esper bench policy --rows 16                 forward and backward of the policy
  esper bench update --rounds 3 --json         a whole PPO update
  esper bench family                           rows of four architectures against rows of one
  esper bench round --recipe cifar --rounds 3  whole rounds of training, on real data
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from esper.lab.bench import EXTRACTION, FAMILY, PHASES, POLICY, RATES, ROUND, UPDATE, Column
from esper.leyline.errors import UsageError
from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import err_console, out_console, print_json, print_line, safe
from esper.utils.process import choose_device

_STRATEGIES = ("sequential", "stacked", "workers")
_PRECISIONS = ("fp32", "bf16")
_DEVICES = ("auto", "cpu", "cuda")


_WIDTH = 512
"""Of the controller's network."""
_PASSES, _MINIBATCHES = 4, 4
"""Of an update."""
_ENGINE_ONLY = ("task", "strategy", "precision", "batch_size", "samples", "reference_rows")


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "target",
        nargs="?",
        default="engine",
        choices=tuple(_BENCHES),
        metavar="TARGET",
        help=f"what to measure: {', '.join(_BENCHES)} (default: engine)",
    )
    parser.add_argument("--device", choices=_DEVICES, default="auto", help="device")
    parser.add_argument(
        "--rows",
        type=_count,
        nargs="+",
        metavar="N",
        help="networks at once (default: engine 16 and 64 on CUDA, 2 on the CPU; observation 64; "
        "policy and update 16; round the recipe's)",
    )
    parser.add_argument(
        "--task",
        nargs="+",
        metavar="T",
        help="engine and family: tasks, or cifar_wide for a 32-64-128 host (default: "
        "cifar_baseline)",
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        choices=_STRATEGIES,
        metavar="S",
        help="strategies to compare with the sequential one: stacked, workers (default: stacked "
        "on CUDA, both on the CPU)",
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=_PRECISIONS,
        metavar="P",
        help="precision of the networks: fp32, bf16 (default: both on CUDA, fp32 on the CPU)",
    )
    for name, meaning in (
        ("--batch-size", "samples per batch (default: 128)"),
        ("--samples", "samples per epoch (default: the task's)"),
        (
            "--steps",
            "engine: timed steps; policy and update: steps per episode (default: 3 on CUDA and 2 "
            "on the CPU; 150)",
        ),
        (
            "--rounds",
            "repetitions of each measurement and its reference (default: observation 30, policy "
            "9, update 5, family and round 2)",
        ),
        ("--reference-rows", "networks of the sequential reference (default: 2)"),
    ):
        parser.add_argument(name, type=_count, metavar="N", help=meaning)
    parser.add_argument(
        "--recipe",
        metavar="R",
        help="round: the recipe to time (default: cifar on CUDA, smoke on the CPU)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    strays = [name for name in _ENGINE_ONLY if getattr(options, name)]
    if options.target == "family":
        strays = [name for name in strays if name in ("batch_size", "reference_rows")]
    if options.target != "engine" and strays:
        option = strays[0].replace("_", "-")
        raise UsageError(f"--{option} is for `esper bench engine`; leave it out")
    if options.recipe and options.target != "round":
        raise UsageError("--recipe is for `esper bench round`; leave it out")
    code: int = _BENCHES[options.target](options)
    return code


def _bench_engine(options: argparse.Namespace) -> int:
    import torch

    from esper.lab.bench.engine import measure, measure_matmul, ratios

    device = choose_device(options.device).type
    cases = _cases(options, device)
    progress = err_console()
    rates = {
        precision: measure_matmul(torch.device(device), use_bf16=precision == "bf16")
        for precision in sorted({_precision(case.use_bf16) for case in cases})
    }
    results = []
    for number, case in enumerate(cases, start=1):
        progress.print(
            safe(
                f"measuring {number} of {len(cases)}: {case.task}, {case.strategy}, "
                f"{case.rows} rows, {_precision(case.use_bf16)}"
            )
        )
        rate = rates[_precision(case.use_bf16)]
        results.append(measure(case, device, matmul_rate=rate))
    found = [
        {**result.to_mapping(), "ratio": ratio}
        for result, ratio in zip(results, ratios(results), strict=True)
    ]
    title = f"Population engine on {_machine(device)} (ratio: against rows one after another)"
    phases = "Where a step's time goes (of mm: share of the measured matmul rate)"
    tflops = {name: rate / 1e12 for name, rate in rates.items()}
    document = {"data": "random bytes", "matmul_tflops": tflops, "results": found}
    return _show(options, device, document, (title, RATES, found), (phases, PHASES, found))


def _cases(options: argparse.Namespace, device: str) -> list[Any]:
    """Return the cases to measure, with the reference of every task first."""
    from esper.lab.bench.engine import make_cases

    on_cuda = device == "cuda"
    return make_cases(
        options.task or ["cifar_baseline"],
        options.strategy or (("stacked",) if on_cuda else ("stacked", "workers")),
        options.rows or ((16, 64) if on_cuda else (2,)),
        options.precision or (_PRECISIONS if on_cuda else ("fp32",)),
        reference={"rows": options.reference_rows or 2},
        batch_size=options.batch_size or 128,
        samples=options.samples,
        steps=options.steps or (3 if on_cuda else 2),
    )


def _bench_observation(options: argparse.Namespace) -> int:
    from esper.lab.bench.learning import time_extraction
    from esper.lab.imagined import middle_aged_hosts

    if options.device == "cuda":
        raise UsageError("the readable reference is plain Python; use --device cpu")
    found = [
        asdict(time_extraction(middle_aged_hosts(rows).signals(), options.rounds or 30))
        for rows in options.rows or (64,)
    ]
    reference = "ratio: against the readable reference, row by row from plain floats"
    title = f"Observation on {_machine('cpu')} ({reference})"
    return _show(options, "cpu", {"results": found}, (title, EXTRACTION, found))


def _bench_policy(options: argparse.Namespace) -> int:
    from esper.lab.bench.learning import PolicyWork, compare_captured, compare_policies
    from esper.lab.bench.update import find_reference
    from esper.lab.imagined import random_lives

    rounds = options.rounds or 9

    def measure(rows: int, steps: int, device: str) -> _Measured:
        ours = PolicyWork(random_lives(rows, steps), _WIDTH, device)
        reference, left_out = find_reference(ours)
        results = compare_policies(ours, reference, rounds=rounds)
        if device == "cuda":
            results.append(compare_captured(ours, rounds=rounds))
        return [result.to_mapping() for result in results], left_out

    return _compare_rows(options, "Policy", measure, POLICY, {})


def _bench_update(options: argparse.Namespace) -> int:
    from esper.lab.bench.update import UpdateWork, compare_updates, find_update_reference
    from esper.lab.imagined import random_lives

    rounds = options.rounds or 5

    def measure(rows: int, steps: int, device: str) -> _Measured:
        minibatches = min(_MINIBATCHES, rows)  # a minibatch is whole rows
        ours = UpdateWork(
            random_lives(rows, steps),
            _WIDTH,
            epochs=_PASSES,
            minibatches=minibatches,
            device=device,
        )
        reference, left_out = find_update_reference(ours)
        result = compare_updates(ours, reference, rounds=rounds)
        return [{"minibatches": minibatches, **result.to_mapping()}], left_out

    return _compare_rows(options, "Whole PPO update", measure, UPDATE, {"passes": _PASSES})


def _bench_family(options: argparse.Namespace) -> int:
    from esper.lab.bench.learning import measure_family

    device = choose_device(options.device).type
    on_cuda = device == "cuda"
    task = (options.task or ["cifar16" if on_cuda else "digits"])[0]
    err_console().print(safe(f"measuring five populations on {task}, in turns"))
    found = measure_family(
        task,
        rows=options.rows[0] if options.rows else None,
        device=device,
        strategy=options.strategy[0] if options.strategy else "auto",
        use_bf16=(options.precision or ["bf16" if on_cuda else "fp32"])[0] == "bf16",
        samples=options.samples,
        rounds=options.rounds or 2,
        steps=options.steps or 8,
    )
    title = f"Four architectures and one on {_machine(device)}: {found['steps']} steps in turns"
    _show(options, device, found, (title, FAMILY, found["populations"]))
    low, high = found["quartiles"]
    if not options.json:
        print_line(
            out_console(),
            f"a step of the family takes {found['cost']:.2f} times the mean step of the hosts "
            f"alone (middle half {low:.2f} to {high:.2f}): {100 / found['cost']:.0f} % of their "
            "row epochs per s",
        )
    return 0


def _bench_round(options: argparse.Namespace) -> int:
    from esper.lab.bench.learning import measure_rounds

    device = choose_device(options.device).type
    recipe = options.recipe or ("cifar" if device == "cuda" else "smoke")
    rounds = options.rounds or 2
    found = []
    for rows in options.rows or (None,):
        size = "" if rows is None else f", {rows} rows"
        err_console().print(safe(f"measuring {recipe}{size}: {rounds} rounds after a first one"))
        found.append(measure_rounds(recipe, rounds, device, rows).to_mapping())
    title = f"Rounds of training on {_machine(device)}: medians of {rounds}"
    return _show(options, device, {"results": found}, (title, ROUND, found))


_Measured = tuple[list[dict[str, Any]], str]
"""Results, and a line about a reference that could not be measured."""


def _compare_rows(
    options: argparse.Namespace,
    title: str,
    measure: Callable[[int, int, str], _Measured],
    columns: Sequence[Column],
    settings: dict[str, int],
) -> int:
    """Compare with a reference at every number of rows; `measure` gets rows, steps and device."""
    import torch

    device = choose_device(options.device).type
    steps, progress = options.steps or 150, err_console()
    found: list[dict[str, Any]] = []
    left_out = ""
    for rows in options.rows or (16,):
        progress.print(safe(f"measuring {rows} rows, {steps} steps an episode"))
        torch.manual_seed(0)
        results, left_out = measure(rows, steps, device)
        found += [{"rows": rows, **result} for result in results]
    if left_out:
        progress.print(safe(left_out))
    size = [f"{steps} steps an episode", f"hidden {_WIDTH}"]
    size += [f"{value} {name}" for name, value in settings.items()]
    title = f"{title} on {_machine(device)}: {', '.join(size)}"
    shared = {"steps": steps, "hidden": _WIDTH, **settings, "left_out": left_out or None}
    return _show(options, device, {**shared, "results": found}, (title, columns, found))


def _show(
    options: argparse.Namespace,
    device: str,
    document: dict[str, Any],
    *tables: tuple[str, Sequence[Column], Sequence[dict[str, Any]]],
) -> int:
    """Print results as one JSON document or as tables."""
    import torch

    if options.json:
        about = {
            "target": options.target,
            "device": device,
            "machine": _machine(device),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        print_json({**about, **document})
    else:
        for table in tables:
            _print_table(*table)
    return 0


def _machine(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores"


def _precision(use_bf16: bool) -> str:
    return "bf16" if use_bf16 else "fp32"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def _print_table(title: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> None:
    """Print results, one per row."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1), pad_edge=False)
    for name, _, show in columns:
        is_text = show is str
        # In a narrow terminal a number is folded; cut off it would be wrong.
        table.add_column(
            name, justify="left" if is_text else "right", no_wrap=is_text, overflow="fold"
        )
    for row in rows:
        table.add_row(*(safe(show(row[key])) for _, key, show in columns))
    out_console().print(table)


_BENCHES: dict[str, Callable[[argparse.Namespace], int]] = {
    "engine": _bench_engine,
    "observation": _bench_observation,
    "policy": _bench_policy,
    "update": _bench_update,
    "family": _bench_family,
    "round": _bench_round,
}
"""The targets by name."""
