"""Compare the engine's speed with that of another checkout, in turns within one run.

    python -m benchmarks trees --other ../before --cases digits:stacked:4 cifar_baseline:stacked:64

Each case is TASK:STRATEGY:ROWS[:bf16]. Every tree runs in a process of its own that lives one step
(one random action per row and the epoch that follows) whenever it is asked to; the trees are asked
in turns, so that whatever else the machine does falls on both. Both act alike: the last column says
in how many steps all rows had the same validation loss, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.table import print_table

# Speaks only names that both trees promise.
_STEPPER = """
import sys, time
import numpy as np, torch
torch.set_num_threads(1)
import esper
from esper.tamiyo.controllers import RandomController
try:
    from esper.lab.population.engine import PopulationConfig
    from esper.lab.tasks import get_task, make_data
    from esper.lab.tasks.data.source import Source
except ImportError:  # before the tree had eleven folders
    from esper.population.engine import PopulationConfig
    from esper.tasks import get_task, make_data
    from esper.tasks.data.source import Source
name, strategy, rows, bf16, device, samples = sys.argv[1:]
rows, samples = int(rows), int(samples)
task = get_task(name, **({"samples_per_step": samples} if samples else {}))
config = task.config
data = None
if name != "digits":
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (8192, *config.input_shape), dtype=np.uint8)
    y = rng.integers(0, config.num_classes or 10, 8192)
    data = [make_data(
        Source("random bytes", "memory", x, y, num_classes=config.num_classes),
        samples_per_step=config.samples_per_step,
        augmentation=config.augment,
        validation_samples=config.validation_samples,
    )]
options = {}
population = esper.Population(
    task, rows, 3, device, strategy, horizon=10_000, data=data,
    config=PopulationConfig(use_bf16=bf16 == "1"),
)
controller = RandomController(5)
controller.reset(rows, population.device)
signals = population.reset()
print("ready", flush=True)
for line in sys.stdin:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    signals = population.step(controller.act(signals, population.masks()))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    print(seconds, *(loss.hex() for loss in signals.val_loss.tolist()), flush=True)
population.close()
"""


class Tree:
    """A process that lives steps of one tree."""

    def __init__(self, root: Path, arguments: Sequence[str]) -> None:
        """Start it; `wait` until it is ready."""
        path = [str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _STEPPER, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Return when the process has built its rows."""
        self._read()

    def step(self) -> tuple[float, list[str]]:
        """Live one step and return its seconds, and every row's validation loss to the bit."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds, *losses = self._read().split()
        return float(seconds), losses

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a tree's process ended; its complaint stands above")
        return line


def compare(
    case: str, roots: tuple[Path, Path], device: str, steps: int, samples: int
) -> list[str]:
    """Return one row of the table: medians of both trees and the median of their ratios."""
    task, strategy, rows, *rest = case.split(":")
    arguments = (task, strategy, rows, "1" if "bf16" in rest else "0", device, str(samples))
    trees = [Tree(root, arguments) for root in roots]
    try:
        for tree in trees:
            tree.wait()
        # The first steps load kernels, capture graphs and fill allocators.
        for _ in range(max(2, steps // 10)):
            for tree in trees:
                tree.step()
        pairs, same = [], 0
        for number in range(steps):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            steps_of = {which: trees[which].step() for which in order}
            pairs.append((steps_of[0][0], steps_of[1][0]))
            same += steps_of[0][1] == steps_of[1][1]
    finally:
        for tree in trees:
            tree.close()
    here, other = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(this / that for this, that in pairs)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    ratio = f"{here / other:.3f}"
    spread, agree = f"{low:.3f} to {high:.3f}", f"{same} of {steps}"
    return [case, f"{1e3 * here:.1f}", f"{1e3 * other:.1f}", ratio, spread, agree]


def main(arguments: list[str]) -> int:
    """Compare the trees case by case."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks trees",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--other", type=Path, required=True, help="root of the other checkout")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each tree")
    parser.add_argument("--samples", type=int, default=0, help="samples of an epoch; 0: the task's")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["digits:sequential:4", "digits:stacked:4", "digits:workers:4"],
    )
    options = parser.parse_args(arguments)
    if not (options.other / "src" / "esper").is_dir():
        parser.error(f"{options.other} has no src/esper; name the root of a checkout")
    roots = (Path(__file__).resolve().parent.parent, options.other.resolve())
    rows = []
    for case in options.cases:
        print(f"{case} ...", file=sys.stderr, flush=True)
        rows.append(compare(case, roots, options.device, options.steps, options.samples))
        print("  " + "  ".join(rows[-1][1:]), file=sys.stderr, flush=True)
    print_table(
        [
            "case",
            "ms a step here",
            "ms a step there",
            "here / there",
            "ratios, middle half",
            "same losses",
        ],
        rows,
    )
    return 0
