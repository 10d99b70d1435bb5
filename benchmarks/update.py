"""A whole PPO update against sb3-contrib's RecurrentPPO: the same passes and minibatches.

Both run in one process that keeps freed memory, by turns; the ratio is the median over the turns,
by the wall clock and by the CPU time of the thread. `esper bench update` measures the same at its
defaults.
"""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.table import print_table


def main(arguments: list[str]) -> int:
    import torch

    from esper.bench.update import UpdateWork, compare_updates, find_update_reference
    from esper.leyline.process import keep_freed_memory
    from esper.testing.imagined import random_lives

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks update", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=16, help="environments (default: 16)")
    parser.add_argument("--steps", type=int, default=150, help="steps an episode (default: 150)")
    parser.add_argument("--hidden", type=int, default=512, help="width (default: 512)")
    parser.add_argument("--epochs", type=int, default=4, help="passes of an update (default: 4)")
    parser.add_argument(
        "--minibatches", type=int, default=4, help="minibatches of a pass (default: 4)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved pairs (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    ours = UpdateWork(
        random_lives(options.rows, options.steps),
        options.hidden,
        epochs=options.epochs,
        minibatches=options.minibatches,
        device=options.device,
    )
    reference, left_out = find_update_reference(ours)
    found = compare_updates(ours, reference, rounds=options.rounds)
    if left_out:
        print(left_out, file=sys.stderr)
    if options.json:
        parameters = {"esper": ours.parameters, "reference": reference.parameters}
        settings = {**vars(options), "parameters": parameters, "left_out": left_out or None}
        print(json.dumps({**settings, **found.to_mapping()}, indent=2))
        return 0
    print(
        f"{options.rows} rows x {options.steps} steps, hidden {options.hidden}, {options.epochs} "
        f"passes of {options.minibatches} minibatches, {options.device}; "
        f"parameters {ours.parameters:,} and {reference.parameters:,}\n"
    )
    print_table(
        ["", "esper", found.reference, "ratio", "range", "CPU ratio"],
        [
            [
                "PPO update",
                f"{found.esper_ms:.0f} ms",
                f"{found.reference_ms:.0f} ms",
                f"{found.ratio:.2f}",
                f"{found.least_ratio:.2f} to {found.greatest_ratio:.2f}",
                f"{found.cpu_ratio:.2f}",
            ]
        ],
    )
    return 0
