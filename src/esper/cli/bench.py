"""`esper bench`: measured rates on this machine, and ratios against a reference in the same run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from esper.cli.output import err_console, out_console, print_json, safe
from esper.leyline.errors import UsageError

_TARGETS = ("engine", "observation", "policy", "update")
_STRATEGIES = ("sequential", "stacked", "workers")
_PRECISIONS = ("fp32", "bf16")
_DEVICES = ("auto", "cpu", "cuda")

_EPILOG = """\
examples:
  esper bench                                  the population engine, on the best device here
  esper bench engine --device cuda --rows 16 64 256 --json
  esper bench engine --device cpu --task digits --rows 2
"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "bench",
        help="measure throughput on this machine, with ratios against a reference",
        description="Measure how fast Esper is here. Networks train on random bytes in the shape "
        "of the task's data: throughput does not depend on what they show.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "target",
        nargs="?",
        default="engine",
        choices=_TARGETS,
        metavar="TARGET",
        help=f"what to measure: {', '.join(_TARGETS)} (default: engine)",
    )
    parser.add_argument("--device", choices=_DEVICES, default="auto", help="where to measure")
    parser.add_argument(
        "--rows",
        type=_count,
        nargs="+",
        metavar="N",
        help="rows of a population (default: 16 and 64 on CUDA, 2 on the CPU)",
    )
    parser.add_argument(
        "--task",
        nargs="+",
        metavar="T",
        help="tasks, or cifar_wide for a 32-64-128 host (default: cifar_baseline)",
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        choices=_STRATEGIES,
        metavar="S",
        help="what to compare with rows one after another: stacked, workers (default: stacked on "
        "CUDA, both on the CPU)",
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=_PRECISIONS,
        metavar="P",
        help="precision of hosts: fp32, bf16 (default: both on CUDA, fp32 on the CPU)",
    )
    parser.add_argument(
        "--batch-size", type=_count, metavar="B", help="samples of a batch (default: 128)"
    )
    parser.add_argument(
        "--samples",
        type=_count,
        metavar="N",
        help="samples of an epoch (default: the task's)",
    )
    parser.add_argument(
        "--steps", type=_count, metavar="N", help="timed steps (default: 3 on CUDA, 2 on the CPU)"
    )
    parser.add_argument(
        "--reference-rows",
        type=_count,
        metavar="N",
        help="rows timed one after another (default: 2)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure the target and print what was found."""
    if options.target == "engine":
        return _bench_engine(options)
    raise UsageError(
        f"`esper bench {options.target}` is not there yet, only `esper bench engine` is; "
        "in a checkout of the repository `python -m benchmarks` lists what else can be measured"
    )


def _bench_engine(options: argparse.Namespace) -> int:
    import torch

    from esper.population.throughput import measure, measure_matmul, ratios

    device = _choose_device(options.device)
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
    if options.json:
        document = {
            "target": "engine",
            "device": device,
            "machine": _machine(device),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "data": "random bytes",
            "matmul_tflops": {name: rate / 1e12 for name, rate in rates.items()},
            "results": found,
        }
        print_json(document)
        return 0
    reference = "ratio: against rows one after another"
    _print_table(f"Population engine on {_machine(device)} ({reference})", _RATES, found)
    _print_table(
        "Where a step's time goes (of mm: share of the measured matmul rate)", _PHASES, found
    )
    return 0


def _cases(options: argparse.Namespace, device: str) -> list[Any]:
    """Return what to measure, the reference of every task first."""
    from esper.population.throughput import Case, measured_task

    on_cuda = device == "cuda"
    rows: Sequence[int] = options.rows or ((16, 64) if on_cuda else (2,))
    strategies: Sequence[Any] = options.strategy or (
        ("stacked",) if on_cuda else ("stacked", "workers")
    )
    precisions = options.precision or (_PRECISIONS if on_cuda else ("fp32",))
    shared = {
        "batch_size": options.batch_size or 128,
        "samples": options.samples,
        "steps": options.steps or (3 if on_cuda else 2),
    }
    cases = []
    for task in options.task or ["cifar_baseline"]:
        measured_task(task)  # an unknown name is refused before anything is measured
        reference = options.reference_rows or 2
        cases.append(Case(task=task, strategy="sequential", rows=reference, **shared))
        cases += [
            Case(
                task=task,
                strategy=strategy,
                rows=count,
                use_bf16=precision == "bf16",
                **shared,
            )
            for strategy in strategies
            if strategy != "sequential"
            for count in rows
            for precision in precisions
        ]
    return cases


def _choose_device(asked: str) -> str:
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device; use --device cpu")
    return asked


def _machine(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores"


def _precision(use_bf16: bool) -> str:
    return "bf16" if use_bf16 else "fp32"


Column = tuple[str, str, Callable[[Any], str]]

_CASE: tuple[Column, ...] = (
    ("task", "task", str),
    ("strategy", "strategy", str),
    ("rows", "rows", str),
    ("type", "precision", str),
)

_RATES: tuple[Column, ...] = (
    *_CASE,
    ("ms per row", "row_ms", lambda value: f"{value:.1f}"),
    ("row epochs per s", "row_epochs_per_s", lambda value: f"{value:,.1f}"),
    ("images per s", "images_per_s", lambda value: f"{value:,.0f}"),
    ("ratio", "ratio", lambda value: "–" if value is None else f"{value:.2f}"),
)

_PHASES: tuple[Column, ...] = (
    *_CASE,
    ("train s", "train_s", lambda value: f"{value:.3f}"),
    ("val s", "validate_s", lambda value: f"{value:.3f}"),
    ("other s", "other_s", lambda value: f"{value:.3f}"),
    ("GiB", "memory_gib", lambda value: "–" if value is None else f"{value:.1f}"),
    ("of mm", "matmul_share", lambda value: f"{100 * value:.1f}%"),
)


def _print_table(title: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1), pad_edge=False)
    for name, _, show in columns:
        is_text = show is str
        # A number that is cut off would be a wrong one: in a narrow terminal it is folded.
        table.add_column(
            name, justify="left" if is_text else "right", no_wrap=is_text, overflow="fold"
        )
    for row in rows:
        table.add_row(*(safe(show(row[key])) for _, key, show in columns))
    out_console().print(table)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)
