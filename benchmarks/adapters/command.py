"""The command line of the adapter benchmark."""

from __future__ import annotations

import argparse
import ast
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import benchmarks.adapters
from benchmarks.adapters.cases import CASES
from benchmarks.adapters.plan import next_job
from benchmarks.adapters.summary import print_summary
from benchmarks.adapters.training import ARMS, Bench, train
from benchmarks.depth.command import read_records
from benchmarks.table import require_results


def main(arguments: Sequence[str]) -> int:
    """Carry out one of the verbs."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks adapters",
        description=benchmarks.adapters.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="adapt the networks of some cases")
    run.add_argument("cases", nargs="+", choices=list(CASES))
    run.add_argument("--data", type=Path, default=Path("data"), help="folder of texts and images")
    run.add_argument("--out", type=Path, required=True, help="results, a line of JSON a run")
    run.add_argument("--cache", type=Path, default=Path("build/adapters"), help="trained networks")
    run.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    run.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of AdaptConfig to try"
    )
    run.add_argument("--seconds", type=float, default=float("inf"), help="time to stop after")
    summary = verbs.add_parser("summary", help="print tables of what was measured")
    summary.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    if options.verb == "summary":
        require_results(*options.files)
        print_summary([record for file in options.files for record in read_records(file)])
        return 0
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    deadline = time.monotonic() + options.seconds
    bench = Bench(options.data, options.cache)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings: tuple[tuple[str, Any], ...] = tuple(
        (key, ast.literal_eval(value))
        for key, _, value in (one.partition("=") for one in options.set)
    )
    for case in options.cases:
        for arm in options.arms:
            if arm == "head" and not CASES[case].head:
                continue
            own = settings if arm in ("esper", "placed") else ()
            while job := next_job(read_records(options.out), case, arm, own):
                if time.monotonic() > deadline:
                    return 0
                record = train(job, bench)
                with open(options.out, "ab", buffering=0) as file:
                    file.write(json.dumps(record).encode() + b"\n")
                print(
                    f"{job.name}: {record['score']:.2f} (loss {record['loss']:.4f}), "
                    f"{record['parameters']:,} parameters, {record['seconds']:.0f} s",
                    flush=True,
                )
    return 0
