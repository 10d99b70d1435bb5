"""Compare growing a finished network further with training the larger one from scratch.

Two cells. `gpt`: a finished byte-level GPT of two blocks (task `sources`) is deepened to four.
`cnn`: the heuristic adds seeds to a finished network of the task `digits`. With the same additional
compute, the larger network is trained from scratch, and the finished one is trained further without
growing. Every arm runs at the task's learning rate and at half of it; the summary uses the better
one on validation data. The compute of the finished network is not counted.

    python -m benchmarks checkpoints --seeds 0 1 2 3
    python -m benchmarks checkpoints --summary

Results are lines of JSON, one for each run; existing ones are not run again.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.table import print_table, require_results

OUT = Path("research/checkpoints/results.jsonl")
TASKS = {"gpt": "sources", "cnn": "digits"}
ARMS = ("grown", "scratch", "continued")
RATES = (1.0, 0.5)
"""Learning rates, as multiples of the task's own."""
SHORT = 0.5
"""Epochs of growing further, as a share of the task's own."""


class Cell:
    """One task with one seed: its data, its finished network, and runs from there."""

    def __init__(self, name: str, seed: int, folder: Path, scale: float = 1.0) -> None:
        """Load the data; the finished network is trained when it is first asked for."""
        from esper.lab.tasks import get_task
        from esper.lab.tasks.request import FixedBatches, TrainingBatches

        self.name, self.seed, self._folder, self._scale = name, seed, folder, scale
        self._task = get_task(TASKS[name])
        data = self._task.load()
        size = self._task.config.training.batch_size
        self._batches: dict[str, Any] = {
            "train": TrainingBatches(data, size, seed),
            "val": FixedBatches(data, "val", subset=True),
            "test": FixedBatches(data, "test"),
            "loss": data.objective,
        }

    def epochs(self, share: float = 1.0) -> int:
        """Return a share of the epochs of the task."""
        return max(4, round(share * self._scale * self._task.config.horizon))

    def host(self, blocks: int = 4) -> Any:
        """Return an untrained network; the GPT has so many blocks."""
        task = self._task
        if self.name == "gpt":
            options = task.config.host_options.replace(layers=blocks, segments=blocks)
            task = type(task)(task.config.replace(host_options=options))
        return task.build_host(self.seed)

    def config(self, epochs: int, rate: float) -> Any:
        """Return the settings of the task at a multiple of its learning rate."""
        from esper.lab.tasks.request import task_config

        config = task_config(self._task, seed=self.seed, epochs=epochs, twin=False, keep="last")
        training = config.training
        return config.replace(
            training=training.replace(learning_rate=rate * training.learning_rate)
        )

    def train(self, model: Any, epochs: int, rate: float, **how: Any) -> Any:
        """Run `esper.grow` on the cell's data."""
        import esper

        if "deepen" not in how:
            how = {"controller": "wait", **how}
        return esper.grow(
            model, **self._batches, config=self.config(epochs, rate), progress=False, **how
        )

    def finished(self) -> Path:
        """Return the file with the weights of the finished network, which is trained once."""
        import torch

        path = self._folder / f"{self.name}-{self.seed}-{self._scale:g}.pt"
        if not path.exists():
            grown = self.train(self.host(2), self.epochs(), 1.0)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(grown.bake().state_dict(), path)
        return path

    def grow_further(self, rate: float) -> tuple[Any, float, Any]:
        """Return the network grown further, its compute in epochs of the larger one, and this."""
        from esper.growth.static import at_full_amplitude

        epochs, weights = self.epochs(SHORT), self.finished()
        if self.name == "gpt":
            grown = self.train(self.host(), epochs, rate, checkpoint=weights, deepen=True)
            share = grown.summary.training_flops / grown.summary.static_flops
            return grown, share * epochs, None
        grown = self.train(self.host(), epochs, rate, checkpoint=weights, controller="heuristic")
        spent = sum(record.flops for record in grown.history) / grown.summary.flops_after
        larger = (grown.model.placed, at_full_amplitude(grown.model.state))
        return grown, spent, larger

    def train_scratch(self, rate: float, compute: float, larger: Any) -> Any:
        """Train the larger network from its first weights for as much compute."""
        from esper.growth.run import GrowthLoop

        epochs = max(1, round(compute))
        if larger is None:
            return self.train(self.host(), epochs, rate)
        placed, planted = larger
        grown = self.train(self.host(), 1, rate)  # only for its request
        request = replace(
            grown.recipe.again(),
            placed=placed,
            planted=planted,
            config=self.config(epochs, rate),
        )
        loop = GrowthLoop(request)
        for _ in loop.epochs():
            pass
        return loop.finish()

    def train_on(self, rate: float, compute: float, flops: int) -> Any:
        """Train the finished network, as it is, for as much compute."""
        model = self.host(2)
        small = self.train(self.host(2), 1, rate).summary.flops_before
        return self.train(
            model, max(1, round(compute * flops / small)), rate, checkpoint=self.finished()
        )


def run_cell(name: str, seed: int, folder: Path, scale: float, done: set[str]) -> Any:
    """Yield a record for every run of a cell that is not done yet."""
    import torch

    torch.set_num_threads(1)
    cell = Cell(name, seed, folder, scale)
    for rate in RATES:
        keys = {arm: key_of({"cell": name, "seed": seed, "arm": arm, "rate": rate}) for arm in ARMS}
        if done >= set(keys.values()):
            continue
        started = time.process_time()
        grown, compute, larger = cell.grow_further(rate)
        flops = grown.summary.flops_after
        for arm in ARMS:
            if arm != "grown":
                started = time.process_time()
                found = (
                    cell.train_scratch(rate, compute, larger)
                    if arm == "scratch"
                    else cell.train_on(rate, compute, flops)
                )
            else:
                found = grown
            summary = found.summary
            if keys[arm] in done:
                continue
            yield {
                "cell": name,
                "seed": seed,
                "arm": arm,
                "rate": rate,
                "epochs": summary.epochs,
                "compute": compute,
                "parameters": summary.parameters_after,
                "val": summary.val_score,
                "test": summary.test_score,
                "grew": [
                    f"{one.blueprint} at {one.slot}"
                    for one in summary.seeds
                    if one.fate not in ("pruned", "dropped")
                ]
                or [f"{one.awake} blocks" for one in summary.stacks],
                "cpu_s": round(time.process_time() - started, 1),
            }


def key_of(record: dict[str, Any]) -> str:
    """Return what names a run."""
    return " ".join(str(record[name]) for name in ("cell", "seed", "arm", "rate"))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return all results so far; a line that was cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def summarize(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row for every cell and arm, each seed at its better rate on validation data."""
    rows = []
    for cell in dict.fromkeys(record["cell"] for record in records):
        best = {}
        for arm in ARMS:
            own = [one for one in records if (one["cell"], one["arm"]) == (cell, arm)]
            for seed in {one["seed"] for one in own}:
                best[arm, seed] = max((o for o in own if o["seed"] == seed), key=lambda o: o["val"])
        for arm in ARMS:
            seeds = sorted(seed for name, seed in best if name == arm)
            if not seeds:
                continue
            chosen = [best[arm, seed] for seed in seeds]
            paired = [best["grown", s]["test"] - best[arm, s]["test"] for s in seeds]
            error = f" ± {stdev(paired) / len(paired) ** 0.5:.3f}" if len(paired) > 1 else ""
            rows.append(
                [
                    cell,
                    arm,
                    str(len(seeds)),
                    f"{fmean(one['parameters'] for one in chosen):,.0f}",
                    f"{fmean(one['val'] for one in chosen):.3f}",
                    f"{fmean(one['test'] for one in chosen):.3f}",
                    "–" if arm == "grown" else f"{fmean(paired):+.3f}{error}",
                ]
            )
    return rows


HEADER = ["cell", "arm", "seeds", "parameters", "validation", "test", "grown minus this, test"]


def main(arguments: list[str]) -> int:
    """Run what is left, then print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cells", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--scale", type=float, default=1.0, help="share of all epochs")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/checkpoints"), help="for finished networks"
    )
    parser.add_argument("--summary", action="store_true", help="print the table alone")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="benchmarks")
    if options.summary:
        require_results(options.out)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        for seed in options.seeds:
            for cell in options.cells:
                done = {key_of(record) for record in read_records(options.out)}
                for record in run_cell(cell, seed, options.folder, options.scale, done):
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(record) + "\n")
                    told = f"{record['test']:.3f} test, {record['cpu_s']:.0f} s"
                    print(f"{key_of(record)}: {told}", flush=True)
    print_table(HEADER, summarize(read_records(options.out)))
    print("\nScores are points of accuracy: of digits (cnn), of the next byte (gpt).")
    return 0
