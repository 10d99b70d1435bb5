"""What an observation costs against the readable reference, as ratios measured in one run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from benchmarks.table import print_table


def main(arguments: list[str]) -> int:
    import torch

    from esper.bench.observation import time_extraction
    from esper.testing.imagined import middle_aged_hosts

    parser = argparse.ArgumentParser(prog="python -m benchmarks observation", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--epochs", type=int, nargs="+", default=[0, 15, 30, 45])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = [
        (
            epochs,
            time_extraction(
                middle_aged_hosts(rows, options.slots, epochs=epochs).signals(), options.turns
            ),
        )
        for rows in options.rows
        for epochs in options.epochs
    ]
    if options.json:
        print(json.dumps([{"epochs": epochs, **asdict(timing)} for epochs, timing in results]))
        return 0
    print_table(
        ["rows", "epochs lived", "occupied", "extraction per row", "reference per row", "ratio"],
        [
            [
                timing.rows,
                epochs,
                f"{timing.occupied:.0%}",
                f"{timing.extraction_us:.2f} us",
                f"{timing.reference_us:.1f} us",
                f"{timing.ratio:.1f}",
            ]
            for epochs, timing in results
        ],
    )
    return 0
