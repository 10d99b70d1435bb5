"""The policy against sb3-contrib's RecurrentPPO: one step, and one full-batch update, as ratios.

How the reference is set up is in `esper.bench.recurrent_ppo`. Both run in one process
that keeps freed memory, by turns; the ratio is the median over the turns, by the wall clock and by
the CPU time of the thread. `esper bench policy` measures the same at its defaults.
"""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.table import print_table

_WORK = {
    "step": "policy step",
    "plain_step": "policy step by get_action",
    "update": "forward + backward, whole batch",
    "captured_step": "policy step from a CUDA graph",
}


def main(arguments: list[str]) -> int:
    import torch

    from esper.bench.policy import PolicyWork, compare_captured, compare_policies
    from esper.bench.recurrent_ppo import find_reference
    from esper.leyline.process import keep_freed_memory
    from esper.testing.imagined import random_lives

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks policy", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=16, help="environments (default: 16)")
    parser.add_argument("--steps", type=int, default=150, help="steps an episode (default: 150)")
    parser.add_argument("--hidden", type=int, default=512, help="width (default: 512)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved pairs (default: 15)")
    parser.add_argument(
        "--features",
        choices=("same", "flat"),
        default="same",
        help="what the reference's LSTM reads: a layer like ours, or the observation itself",
    )
    parser.add_argument(
        "--captured-rows", type=int, default=256, help="rows of the CUDA graph (default: 256)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    ours = PolicyWork(random_lives(options.rows, options.steps), options.hidden, options.device)
    reference, left_out = find_reference(ours, options.features)
    found = [
        (options.rows, each) for each in compare_policies(ours, reference, rounds=options.rounds)
    ]
    if options.device == "cuda":
        rows = options.captured_rows
        wide = PolicyWork(random_lives(rows, 1), options.hidden, options.device)
        found.append((rows, compare_captured(wide, rounds=options.rounds)))
    if left_out:
        print(left_out, file=sys.stderr)
    parameters = {"esper": ours.parameters, "reference": reference.parameters}
    if options.json:
        settings = {**vars(options), "parameters": parameters, "left_out": left_out or None}
        results = [{"rows": rows, **each.to_mapping()} for rows, each in found]
        print(json.dumps({**settings, "results": results}, indent=2))
        return 0
    print(
        f"{options.steps} steps an episode, hidden {options.hidden}, {options.device}; "
        f"parameters {parameters['esper']:,} and {parameters['reference']:,}\n"
    )
    print_table(
        ["", "rows", "esper", "reference", "ratio", "range", "CPU ratio", "against"],
        [
            [
                _WORK[each.work],
                rows,
                f"{each.esper_ms:.3f} ms",
                f"{each.reference_ms:.3f} ms",
                f"{each.ratio:.2f}",
                f"{each.least_ratio:.2f} to {each.greatest_ratio:.2f}",
                f"{each.cpu_ratio:.2f}",
                each.reference,
            ]
            for rows, each in found
        ],
    )
    return 0
